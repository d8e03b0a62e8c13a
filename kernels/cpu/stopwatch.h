// Where a step's time goes: seconds per thread and stage, at work and waiting for other threads at the stage's end.
// Costs a comparison per stage while nobody asks.
#pragma once

#include <chrono>
#include <cstdint>

namespace baton {

// As `STAGES` of `native_forward.py` names them.
enum class StepStage : int64_t {
    kEmbedding, kNorm, kQkv, kHeads, kAttention, kOutput, kGateUp, kGate, kDown, kHead, kBest, kCount
};

// One thread's. `seconds` [ranks, stages, 2] may be null.
class Stopwatch {
public:
    enum Kind : int64_t { kWork, kWait };

    Stopwatch(double* seconds, int64_t rank)
        : seconds_(seconds == nullptr ? nullptr : seconds + rank * int64_t(StepStage::kCount) * 2) {
        if (seconds_ != nullptr) last_ = Clock::now();
    }

    // What passed since the last lap belongs to `stage`.
    void lap(StepStage stage, Kind kind = kWork) {
        if (seconds_ == nullptr) return;
        const Clock::time_point now = Clock::now();
        seconds_[int64_t(stage) * 2 + kind] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }

private:
    using Clock = std::chrono::steady_clock;

    double* seconds_;
    Clock::time_point last_;
};

}  // namespace baton
