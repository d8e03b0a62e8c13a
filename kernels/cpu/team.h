// Threads that work on one step together: they sleep between steps and wait for one another within a step.
//
// A step meets at some hundred barriers, each far shorter than waking a thread takes, so a waiting thread spins;
// but not for long: whoever is late may have lost its core to another process, and then this core is better left
// to others. Between steps nothing spins: an idle role costs its neighbour nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace baton {

class Team {
public:
    explicit Team(int64_t num_threads) : size_(num_threads) {
        for (int64_t rank = 1; rank < size_; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
    }
    ~Team() {
        stopping_ = true;
        next_job();
        for (std::thread& thread : threads_) thread.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int64_t size() const { return size_; }

    // body(rank) on every rank, the caller being rank 0; returns when all have. One caller at a time.
    void run(const std::function<void(int64_t)>& body) {
        if (size_ == 1) return body(0);
        body_ = &body;
        next_job();
        body(0);
        barrier();
    }

    // Every rank of a running body calls it; writes before it are visible to all after it.
    void barrier() {
        if (size_ == 1) return;
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
            return;
        }
        for (int64_t spins = 0; spins < kSpins; ++spins) {
            if (round_.load(std::memory_order_acquire) != round) return;
            relax();
        }
        while (round_.load(std::memory_order_acquire) == round) round_.wait(round, std::memory_order_acquire);
    }

    // Items 0, 1, ... handed out one by one within a body; `next` is 0 when the first rank asks.
    template <typename Body>
    static void share(std::atomic<int64_t>& next, int64_t num_items, const Body& body) {
        for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) body(item);
    }

private:
    static constexpr int64_t kSpins = 4000;  // about a tenth of a millisecond

    static void relax() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    void next_job() {
        jobs_.fetch_add(1, std::memory_order_release);
        jobs_.notify_all();
    }

    void serve(int64_t rank) {
        for (uint32_t seen = 0;; ++seen) {
            jobs_.wait(seen, std::memory_order_acquire);
            if (stopping_) return;
            (*body_)(rank);
            barrier();
        }
    }

    const int64_t size_;
    const std::function<void(int64_t)>* body_ = nullptr;
    bool stopping_ = false;
    alignas(64) std::atomic<uint32_t> jobs_{0};
    alignas(64) std::atomic<int64_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    std::vector<std::thread> threads_;
};

}  // namespace baton
