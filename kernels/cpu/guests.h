// Threads that help a team: its own, and those on cores of other workers, there only while the owners rest.
//
// 1. Rank 0 calls `recruit` at the start of a step and at every layer: for each core whose owners are idle it takes
//    the core's lock and wakes the thread that sleeps for this core.
// 2. The thread takes pieces of whatever the team's ranks offer (`Stage`). It is no member of the team: no barrier
//    counts it, so one that is late holds up no more than the piece it has taken.
// 3. When there was nothing to do for a tenth of a millisecond it sleeps until a rank has `news`. So it spins at most
//    so long, on a core that nobody wants.
// 4. It goes home, which gives up the lock, when an owner is busy (looked at before every piece) or the step is over.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "core_board.h"
#include "places.h"
#include "stage.h"

namespace baton {

struct LentCore {
    int64_t core;                 // by which the board locks it
    std::vector<int64_t> owners;  // workers; none: the team's own, which nobody else may take
};

class Guests {
public:
    // `stages` are those of the team's ranks and outlive this object, as do `places`: of the ranks, then of the guests.
    // `board` may be null where no core has owners.
    Guests(std::unique_ptr<CoreBoard> board, const std::vector<LentCore>& cores, std::vector<Stage>& stages,
           Places& places)
        : board_(std::move(board)), stages_(stages), places_(places) {
        for (const LentCore& core : cores) guests_.push_back(std::make_unique<Guest>(core));
        try {
            for (size_t i = 0; i < guests_.size(); ++i)
                guests_[i]->thread = std::thread([this, i] { live(*guests_[i], i); });
        } catch (const std::exception&) {
            stop();
            throw;
        }
    }
    ~Guests() { stop(); }

    // By rank 0 within a step. At its start it also frees the lines of owners that died within theirs.
    void recruit(bool is_start) {
        in_step_.store(true, std::memory_order_relaxed);
        for (std::unique_ptr<Guest>& guest : guests_) {
            if (guest->place.load(std::memory_order_acquire) == kAway) continue;
            if (is_start)
                for (int64_t owner : guest->lent.owners)
                    if (board_->is_busy(owner)) board_->bury(owner);
            if (!may_come(guest->lent) || (is_lent(guest->lent) && !board_->claim(guest->lent.core))) continue;
            num_away_.fetch_add(1, std::memory_order_relaxed);
            guest->place.store(kAway, std::memory_order_release);
            guest->place.notify_one();
        }
    }

    // Between steps: whether the team's own threads take part in the next one.
    void want_helpers(bool wanted) { wants_helpers_.store(wanted, std::memory_order_relaxed); }

    // There is something to take.
    void news() {
        news_.fetch_add(1);
        news_.notify_all();
    }

    // By rank 0: the step is over.
    void end_step() {
        in_step_.store(false, std::memory_order_relaxed);
        news();
    }

    int64_t size() const { return int64_t(guests_.size()); }
    int64_t num_away() const { return num_away_.load(std::memory_order_relaxed); }
    // Pieces that were done on lent cores since the beginning.
    int64_t num_pieces() const { return num_pieces_.load(std::memory_order_relaxed); }

private:
    static constexpr uint32_t kHome = 0, kAway = 1;

    struct Guest {
        explicit Guest(const LentCore& core) : lent(core) {}

        const LentCore lent;
        std::atomic<uint32_t> place{kHome};
        std::thread thread;
    };

    static bool is_lent(const LentCore& core) { return !core.owners.empty(); }

    bool may_come(const LentCore& lent) const {
        if (!is_lent(lent)) return wants_helpers_.load(std::memory_order_relaxed);
        for (int64_t owner : lent.owners)
            if (!board_->is_idle(owner)) return false;
        return true;
    }

    bool may_stay(const LentCore& lent) const {
        if (!is_lent(lent) && !wants_helpers_.load(std::memory_order_relaxed)) return false;
        for (int64_t owner : lent.owners)
            if (board_->is_busy(owner)) return false;
        return !stopping_.load(std::memory_order_relaxed);
    }

    void live(Guest& guest, size_t index) {
        const size_t first_stage = index % stages_.size();
        const int64_t thread = int64_t(stages_.size() + index);
        for (;;) {
            guest.place.wait(kHome, std::memory_order_acquire);
            if (stopping_) return;
            places_.wake(thread);
            for (int64_t spins = 0; may_stay(guest.lent);) {
                const uint32_t seen = news_.load();
                if (help(first_stage)) {
                    num_pieces_.fetch_add(is_lent(guest.lent), std::memory_order_relaxed);
                    places_.note(thread);
                    spins = 0;
                } else if (++spins < kSpins) {
                    relax();
                } else if (in_step_.load(std::memory_order_relaxed)) {
                    news_.wait(seen);
                    places_.wake(thread);
                    spins = 0;
                } else {
                    break;
                }
            }
            places_.leave(thread);
            if (is_lent(guest.lent)) board_->release(guest.lent.core);
            num_away_.fetch_sub(1, std::memory_order_relaxed);
            guest.place.store(kHome);
            if (stopping_) return;
        }
    }

    bool help(size_t first_stage) {
        for (size_t i = 0; i < stages_.size(); ++i)
            if (stages_[(first_stage + i) % stages_.size()].help()) return true;
        return false;
    }

    void stop() {
        stopping_ = true;
        end_step();
        for (std::unique_ptr<Guest>& guest : guests_) {
            // One that is about to store kHome sees `stopping_` right after it.
            guest->place.store(kAway);
            guest->place.notify_one();
        }
        for (std::unique_ptr<Guest>& guest : guests_)
            if (guest->thread.joinable()) guest->thread.join();
    }

    const std::unique_ptr<CoreBoard> board_;
    std::vector<Stage>& stages_;
    Places& places_;
    std::atomic<bool> stopping_{false}, in_step_{false}, wants_helpers_{false};
    std::atomic<uint32_t> news_{0};
    std::atomic<int64_t> num_away_{0}, num_pieces_{0};
    std::vector<std::unique_ptr<Guest>> guests_;
};

}  // namespace baton
