// The board's page and locks; what they mean is told in `core_board.h`.
#include "core_board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

namespace baton {
namespace {

constexpr size_t kPageBytes = size_t(CoreBoard::kMaxWorkers * CoreBoard::kLineBytes);

#if defined(F_OFD_SETLK)
// Byte w is worker w's life, byte kMaxWorkers + c the guest on core c.
bool set_lock(int fd, int64_t byte, short kind) {
    struct flock lock = {};
    lock.l_type = kind;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

bool is_locked(int fd, int64_t byte) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}
#endif

}  // namespace

std::unique_ptr<CoreBoard> CoreBoard::open(const char* path) {
#if defined(F_OFD_SETLK)
    const int fd = ::open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return nullptr;
    struct stat facts;
    void* page = MAP_FAILED;
    if (fstat(fd, &facts) == 0 && facts.st_size >= off_t(kPageBytes))
        page = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) {
        ::close(fd);
        return nullptr;
    }
    return std::unique_ptr<CoreBoard>(new CoreBoard(fd, page));
#else
    static_cast<void>(path);
    return nullptr;
#endif
}

CoreBoard::~CoreBoard() {
    munmap(page_, kPageBytes);
    ::close(fd_);
}

int64_t CoreBoard::now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

bool CoreBoard::is_idle(int64_t worker) const {
    const int64_t since_ns = line(worker).load(std::memory_order_acquire);
    return since_ns >= 0 && now_ns() - since_ns >= kLingerNs;
}

#if defined(F_OFD_SETLK)
bool CoreBoard::sit_down(int64_t worker) {
    // Shared, so that a life that is just ending does not stand in the way of the next.
    if (!set_lock(fd_, worker, F_RDLCK)) return false;
    seat_ = worker;
    busy_mark_ = -now_ns();  // after the lock: no two lives of a worker sit down in the same nanosecond
    rest();
    return true;
}

void CoreBoard::bury(int64_t worker) {
    int64_t mark = line(worker).load(std::memory_order_acquire);
    if (mark < 0 && !is_locked(fd_, worker)) line(worker).compare_exchange_strong(mark, now_ns());
}

bool CoreBoard::claim(int64_t core) { return set_lock(fd_, kMaxWorkers + core, F_WRLCK); }
void CoreBoard::release(int64_t core) { set_lock(fd_, kMaxWorkers + core, F_UNLCK); }
#else
bool CoreBoard::sit_down(int64_t) { return false; }
void CoreBoard::bury(int64_t) {}
bool CoreBoard::claim(int64_t) { return false; }
void CoreBoard::release(int64_t) {}
#endif

}  // namespace baton

using namespace baton;

extern "C" {

// For owners, and for tests of guests. Null: see `CoreBoard::open`.
void* baton_board_open(const char* path) { return CoreBoard::open(path).release(); }
void baton_board_close(void* board) { delete static_cast<CoreBoard*>(board); }
int64_t baton_board_bytes() { return int64_t(kPageBytes); }
int64_t baton_board_sit_down(void* board, int64_t worker) { return static_cast<CoreBoard*>(board)->sit_down(worker); }
void baton_board_work(void* board) { static_cast<CoreBoard*>(board)->work(); }
void baton_board_rest(void* board) { static_cast<CoreBoard*>(board)->rest(); }
int64_t baton_board_is_busy(void* board, int64_t worker) { return static_cast<CoreBoard*>(board)->is_busy(worker); }
int64_t baton_board_is_idle(void* board, int64_t worker) { return static_cast<CoreBoard*>(board)->is_idle(worker); }
void baton_board_bury(void* board, int64_t worker) { static_cast<CoreBoard*>(board)->bury(worker); }
int64_t baton_board_claim(void* board, int64_t core) { return static_cast<CoreBoard*>(board)->claim(core); }
void baton_board_release(void* board, int64_t core) { static_cast<CoreBoard*>(board)->release(core); }
}
