// A socket in a table of files of its own: when its process is killed, it or the other files are closed at once.
//
// 1. A killed process gives up its memory before its files: for a model and its KV that takes most of a second, in
//    which whoever waits for the end of its streams learns nothing.
// 2. On Linux a thread may have a table of open files of its own. `baton_lifeline_hold` starts one that keeps the
//    socket, and nothing else, in its table, and waits; the caller's copy is closed. All threads of a killed process
//    end at once, and only the last of them takes the memory apart before it closes the files of its table. The
//    other table's files are closed by then: whoever has a socket in each learns of the end from the first.
// 3. `baton_lifeline_release` closes the socket on purpose. It is closed too when the other end closes its own.
//
// No Python runs on that thread: a garbage collection there would close files by numbers of another table.
#include <cstdint>

#if defined(__linux__)
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

namespace baton {
namespace {

struct Lifeline {
    int socket, wake_read, wake_write;
    pthread_t thread;
    sem_t settled;
    bool is_apart = false;  // the thread has a table with these two files alone

    bool keep_two() {
#if defined(SYS_close_range)
        // `unshare` itself is forbidden in many containers; this call, with its flag, is not.
        constexpr unsigned with_a_table_of_its_own = 2;  // CLOSE_RANGE_UNSHARE
        const unsigned low = unsigned(std::min(socket, wake_read)), high = unsigned(std::max(socket, wake_read));
        const auto close_all = [](unsigned first, unsigned last, unsigned flags = 0) {
            return first > last || syscall(SYS_close_range, first, last, flags) == 0;
        };
        return close_all(high + 1, ~0u, with_a_table_of_its_own) && (low == 0 || close_all(0, low - 1)) &&
               close_all(low + 1, high - 1);
#else
        return false;
#endif
    }

    static void* wait(void* self) {
        Lifeline& line = *static_cast<Lifeline*>(self);
        line.is_apart = line.keep_two();
        const bool waits = line.is_apart;
        pollfd files[2] = {{line.socket, POLLRDHUP, 0}, {line.wake_read, 0, 0}};
        sem_post(&line.settled);
        while (waits && poll(files, 2, -1) < 0) {  // only a signal ends it early, and they are all blocked
        }
        return nullptr;  // the last user of this table: both files are closed with it
    }
};

}  // namespace
}  // namespace baton

extern "C" {

// Takes the socket over: it is closed here, and stays open as long as the process lives, or until released.
// Null, with the socket open as before, where the system cannot do it.
void* baton_lifeline_hold(int64_t socket) {
    using baton::Lifeline;
    auto line = std::make_unique<Lifeline>();
    int wake[2];
    if (pipe2(wake, O_CLOEXEC) != 0) return nullptr;
    line->socket = int(socket), line->wake_read = wake[0], line->wake_write = wake[1];
    sem_init(&line->settled, 0, 0);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // handlers of the process do not run there
    const bool started = pthread_create(&line->thread, nullptr, Lifeline::wait, line.get()) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (started)
        while (sem_wait(&line->settled) != 0) {
        }
    close(wake[0]);
    if (started && line->is_apart) {
        close(int(socket));
        return line.release();
    }
    if (started) pthread_join(line->thread, nullptr);
    close(wake[1]);
    sem_destroy(&line->settled);
    return nullptr;
}

// Closes the socket, if it is still open.
void baton_lifeline_release(void* lifeline) {
    std::unique_ptr<baton::Lifeline> line(static_cast<baton::Lifeline*>(lifeline));
    close(line->wake_write);
    pthread_join(line->thread, nullptr);
    sem_destroy(&line->settled);
}
}
#else
extern "C" {
void* baton_lifeline_hold(int64_t) { return nullptr; }
void baton_lifeline_release(void*) {}
}
#endif
