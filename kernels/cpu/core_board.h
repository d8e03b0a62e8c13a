// What the workers of a host are doing, on one shared page, so that a worker may use cores whose owners rest.
//
// 1. Line w of the page is worker w's own state; only w writes it: busy from the start of a step to its end, and the
//    time since when it rests otherwise. An owner never waits for anybody and asks nobody: it says busy and begins.
// 2. A guest looks at the owners' lines before it takes a core and between any two pieces of work.
// 3. At most one guest is on a core: whoever holds the lock of the core's byte of the page's file. Locks belong to an
//    open file description, so the kernel drops them with the process that held them: nothing is left behind by a
//    death at any point, no process number can be mistaken for another, and nobody has to wait for a timeout.
// 4. A worker holds the lock of its own line's byte as long as it lives. Who finds a busy line without it resets the
//    line: that owner died within a step. The busy mark is unique to each life, so its next life is never reset.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace baton {

class CoreBoard {
public:
    static constexpr int64_t kLineBytes = 64;
    static constexpr int64_t kMaxWorkers = 512;
    static constexpr int64_t kLingerNs = 2'000'000;  // a rest this short is the gap between two steps

    // The board in the file at `path`; null where it cannot be opened, is too small, or there are no such locks.
    static std::unique_ptr<CoreBoard> open(const char* path);
    ~CoreBoard();
    CoreBoard(const CoreBoard&) = delete;
    CoreBoard& operator=(const CoreBoard&) = delete;

    // As the owner `worker`, for the life of this object. The line says that it rests.
    bool sit_down(int64_t worker);
    void work() { line(seat_).store(busy_mark_, std::memory_order_seq_cst); }
    void rest() { line(seat_).store(now_ns(), std::memory_order_release); }

    bool is_busy(int64_t worker) const { return line(worker).load(std::memory_order_relaxed) < 0; }
    // Resting, and for longer than a gap between steps.
    bool is_idle(int64_t worker) const;
    // Frees a busy line whose worker is dead; a system call.
    void bury(int64_t worker);

    // One guest per core among all open boards: false if there is one. A system call each.
    bool claim(int64_t core);
    void release(int64_t core);

private:
    CoreBoard(int fd, void* page) : fd_(fd), page_(page) {}

    std::atomic<int64_t>& line(int64_t worker) const {
        return *reinterpret_cast<std::atomic<int64_t>*>(static_cast<char*>(page_) + worker * kLineBytes);
    }
    static int64_t now_ns();

    const int fd_;
    void* const page_;
    int64_t seat_ = 0, busy_mark_ = -1;
};
static_assert(std::atomic<int64_t>::is_always_lock_free, "lines are shared between processes");

}  // namespace baton
