// What one rank of a team has to do between two barriers, cut into pieces that others may take from it.
//
// 1. The rank offers its share and takes pieces from the front; whoever has nothing to do takes them from the back.
//    So each streams the same memory in every step, but for where they meet, and nobody waits for who is late with
//    pieces that it has not begun.
// 2. The state is one word: which offer, first and end of the pieces that are left. A compare-and-swap takes a piece.
//    No two offers have the same word, so a piece that was taken belongs to the offer that was read before.
// 3. The rank's `settle` returns when the pieces that others took are done too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "threads.h"

namespace baton {

constexpr int64_t kSpins = 4000;  // about a tenth of a millisecond

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// The length of pieces with which `num_threads` of one speed share `length` most evenly: `shortest`, or up to twice that.
inline int64_t even_piece(int64_t length, int64_t shortest, int64_t num_threads) {
    const auto longest_share = [&](int64_t piece) { return ceil_div(ceil_div(length, piece), num_threads) * piece; };
    int64_t best = shortest;
    for (int64_t piece = shortest + 1; piece <= 2 * shortest; ++piece)
        if (longest_share(piece) < longest_share(best)) best = piece;
    return best;
}

constexpr int64_t kNoNext = -1;

// body(begin, end), or body(begin, end, next) of who wants to know where the next piece begins, or kNoNext.
template <typename Body>
void do_piece(const Body& body, int64_t begin, int64_t end, int64_t next) {
    if constexpr (std::is_invocable_v<const Body&, int64_t, int64_t, int64_t>)
        body(begin, end, next);
    else
        body(begin, end);
}

class alignas(64) Stage {
public:
    static constexpr int64_t kMostPieces = 0xffff;

    // `do_piece` for all pieces of [begin, end), each `piece` long but the last; kMostPieces of them at most. The next piece
    // is what the same thread takes then, unless another one does before. The body must live until `settle` returns.
    template <typename Body>
    void offer(int64_t begin, int64_t end, int64_t piece, const Body& body) {
        begin_.store(begin, std::memory_order_relaxed);
        end_.store(end, std::memory_order_relaxed);
        piece_.store(piece, std::memory_order_relaxed);
        body_.store(&body, std::memory_order_relaxed);
        call_.store([](const void* called, int64_t from, int64_t to,
                       int64_t next) { do_piece(*static_cast<const Body*>(called), from, to, next); },
                    std::memory_order_relaxed);
        num_returned_.store(0, std::memory_order_relaxed);
        num_lent_ = num_pieces_ = ceil_div(end - begin, piece);
        ++offer_;
        word_.store(pack(offer_, 0, uint64_t(num_pieces_)), std::memory_order_release);
    }

    // The rank itself: the pieces that nobody else takes.
    void work() {
        while (take(true)) --num_lent_;
    }

    // The rank itself, after `work`: until the pieces that others took are done. Whether it slept.
    bool settle() {
        const uint32_t all = uint32_t(num_lent_);
        uint32_t done = num_returned_.load(std::memory_order_acquire);
        int64_t spins = 0;
        for (; done != all; done = num_returned_.load(std::memory_order_acquire)) {
            if (++spins < kSpins)
                relax();
            else
                num_returned_.wait(done, std::memory_order_acquire);
        }
        return spins >= kSpins;
    }

    // Anybody else: one piece, if one is left.
    bool help() {
        if (!take(false)) return false;
        num_returned_.fetch_add(1, std::memory_order_release);
        num_returned_.notify_one();
        return true;
    }

private:
    static uint64_t pack(uint32_t offer, uint64_t first, uint64_t end) {
        return uint64_t(offer) << 32 | first << 16 | end;
    }

    bool take(bool from_front) {
        uint64_t word = word_.load(std::memory_order_acquire);
        for (;;) {
            const int64_t first = int64_t(word >> 16 & 0xffff), end = int64_t(word & 0xffff);
            if (first >= end) return false;
            // If the word is still the same below, these were its offer's.
            const int64_t begin = begin_.load(std::memory_order_relaxed), piece = piece_.load(std::memory_order_relaxed);
            const int64_t last = end_.load(std::memory_order_relaxed);
            const void* body = body_.load(std::memory_order_relaxed);
            const Call call = call_.load(std::memory_order_relaxed);
            const uint64_t rest = pack(uint32_t(word >> 32), uint64_t(first + from_front), uint64_t(end - !from_front));
            if (!word_.compare_exchange_weak(word, rest, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            const int64_t from = begin + (from_front ? first : end - 1) * piece;
            const int64_t next = end - first == 1 ? kNoNext : from + (from_front ? piece : -piece);
            call(body, from, std::min(from + piece, last), next);
            return true;
        }
    }

    using Call = void (*)(const void*, int64_t, int64_t, int64_t);

    std::atomic<uint64_t> word_{0};
    std::atomic<int64_t> begin_{0}, end_{0}, piece_{0};
    std::atomic<const void*> body_{nullptr};
    std::atomic<Call> call_{nullptr};
    uint32_t offer_ = 0;
    int64_t num_pieces_ = 0, num_lent_ = 0;
    alignas(64) std::atomic<uint32_t> num_returned_{0};
};

}  // namespace baton
