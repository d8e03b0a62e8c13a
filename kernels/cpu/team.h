// Threads that work on one step together: they sleep between steps and wait for one another within a step. Helpers, the
// team's own and guests on cores that are lent to it (`guests.h`), take part where a rank offers its work (`divide`).
//
// A step meets at some hundred barriers, each far shorter than waking a thread takes, so a waiting thread spins;
// but not for long: whoever is late may have lost its core to another process, and then this core is better left
// to others. Who has slept keeps apart from the others of the team (`places.h`). Between steps nothing spins: an idle
// role costs its neighbour nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "guests.h"
#include "places.h"
#include "stage.h"

namespace baton {

class Team {
public:
    // `num_helpers` threads are there for steps of one rank (`gather`): they take pieces of what it divides, and nothing
    // waits for them to come.
    explicit Team(int64_t num_ranks, int64_t num_helpers = 0)
        : num_ranks_(num_ranks), size_(num_ranks), helpers_(size_t(num_helpers)), stages_(size_t(num_ranks)) {
        places_.emplace(num_ranks + num_helpers);
        if (num_helpers > 0) guests_.emplace(nullptr, helpers_, stages_, *places_);
        for (int64_t rank = 1; rank < num_ranks_; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
    }
    ~Team() {
        stopping_ = true;
        next_job();
        for (std::thread& thread : threads_) thread.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Before a step: it has one rank and the helpers, if there are any, or all ranks and no helper.
    void gather(bool as_one) {
        const bool with_helpers = as_one && !helpers_.empty();
        size_ = with_helpers ? 1 : num_ranks_;
        if (guests_) guests_->want_helpers(with_helpers);
    }

    // Ranks of this step.
    int64_t size() const { return size_; }
    // Threads that may work on one `divide`.
    int64_t most() const { return size_ + (guests_ ? guests_->size() : 0); }

    // Pieces of work that were not done by the team itself.
    int64_t num_borrowed() const { return guests_ ? guests_->num_pieces() : 0; }

    // From the next step on; before the first.
    void borrow(std::unique_ptr<CoreBoard> board, std::vector<LentCore> cores) {
        cores.insert(cores.begin(), helpers_.begin(), helpers_.end());
        guests_.reset();
        places_.emplace(num_ranks_ + int64_t(cores.size()));
        guests_.emplace(std::move(board), cores, stages_, *places_);
    }

    // By rank 0, where guests that come or have gone make no difference: anywhere, for bits do not depend on them.
    void recruit(bool is_start) {
        if (guests_) guests_->recruit(is_start);
    }

    // body(rank) on every rank, the caller being rank 0; returns when all have. One caller at a time.
    void run(const std::function<void(int64_t)>& body) {
        places_->note(0);
        if (size_ > 1) {
            body_ = &body;
            next_job();
        }
        body(0);
        barrier(0);
        places_->leave(0);
        if (guests_) guests_->end_step();
    }

    // Every rank of a running body calls it; writes before it are visible to all after it.
    void barrier(int64_t rank) {
        if (size_ == 1) return;
        places_->note(rank);
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
        places_->wake(rank);
    }

    // `do_piece` for pieces of [begin, end), this rank's share of a stage, each a multiple of `unit` long but the last.
    // Others take pieces from it when they have nothing to do; at most `pieces` for each thread there is, and none shorter
    // than `least`. What a piece writes is seen by this rank after the call, by others after a barrier.
    template <typename Body>
    void divide(int64_t rank, int64_t begin, int64_t end, int64_t unit, int64_t least, const Body& body,
                int64_t pieces = kPieces) {
        const int64_t num_threads = size_ + (guests_ ? guests_->num_away() : 0);
        if (num_threads == 1 || end - begin <= least) {
            if (begin < end) do_piece(body, begin, end, kNoNext);
            return;
        }
        places_->note(rank);
        Stage& stage = stages_[size_t(rank)];
        const int64_t num_units = ceil_div(end - begin, unit);
        const int64_t most = std::min(pieces * num_threads / size_, Stage::kMostPieces);
        const int64_t shortest = std::max(ceil_div(num_units, most), ceil_div(least, unit));
        stage.offer(begin, end, unit * even_piece(num_units, shortest, ceil_div(num_threads, size_)), body);
        if (guests_) guests_->news();
        stage.work();
        for (int64_t other = 1; other < size_; ++other)
            while (stages_[size_t((rank + other) % size_)].help()) {
            }
        if (stage.settle()) places_->wake(rank);
    }

private:
    static constexpr int64_t kPieces = 8;  // a thread that lost its core holds up an eighth of its work

    void next_job() {
        jobs_.fetch_add(1, std::memory_order_release);
        jobs_.notify_all();
    }

    void serve(int64_t rank) {
        for (uint32_t seen = 0;; ++seen) {
            jobs_.wait(seen, std::memory_order_acquire);
            if (stopping_) return;
            places_->wake(rank);
            (*body_)(rank);
            barrier(rank);
            places_->leave(rank);
        }
    }

    const int64_t num_ranks_;
    int64_t size_;
    const std::function<void(int64_t)>* body_ = nullptr;
    bool stopping_ = false;
    alignas(64) std::atomic<uint32_t> jobs_{0};
    alignas(64) std::atomic<int64_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    const std::vector<LentCore> helpers_;
    std::vector<Stage> stages_;
    std::optional<Places> places_;  // of ranks, then of guests
    std::optional<Guests> guests_;
    std::vector<std::thread> threads_;
};

}  // namespace baton
