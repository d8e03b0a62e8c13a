// Which core each thread of a team is on, so that no two stay on one core while another could have been theirs.
//
// A thread that slept for a moment wakes on the core it slept on, whoever works there by now. If that is another of
// its team, the two go on in turns: each soon sleeps while the other runs. No load balancer sees two threads that want
// the core, so none parts them, and another core idles for many milliseconds. So who has slept within a step looks
// where the others work, and moves if one is here. Nobody is bound to a core: where it goes later is the kernel's affair.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace baton {

class Places {
public:
    explicit Places(int64_t num_threads) : places_(size_t(num_threads)) {}

    // By the thread itself, all three. It works, on the core that it is on.
    void note(int64_t thread) { set(thread, here()); }

    // It works no more.
    void leave(int64_t thread) { set(thread, kNowhere); }

    // It has slept and works again, apart from the others if its process may use so many cores.
    void wake(int64_t thread) {
#if defined(__linux__)
        const int core = here();
        bool is_shared = false;
        for (int64_t other = 0; other < int64_t(places_.size()); ++other)
            is_shared |= other != thread && core_of(other) == core;
        if (is_shared && core != kNowhere) part(thread);
#endif
        note(thread);
    }

private:
    static constexpr int kNowhere = -1;

    struct alignas(64) Place {
        std::atomic<int> core{kNowhere};
    };

    static int here() {
#if defined(__linux__)
        return sched_getcpu();
#else
        return kNowhere;
#endif
    }

    int core_of(int64_t thread) const { return places_[size_t(thread)].core.load(std::memory_order_relaxed); }

    void set(int64_t thread, int core) {
        if (core_of(thread) != core) places_[size_t(thread)].core.store(core, std::memory_order_relaxed);
    }

#if defined(__linux__)
    // To a core without one of the team: for this moment it may run nowhere else.
    void part(int64_t thread) const {
        cpu_set_t allowed, apart;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;  // more cores than a set has
        apart = allowed;
        for (int64_t other = 0; other < int64_t(places_.size()); ++other) {
            const int core = core_of(other);
            if (other != thread && core >= 0 && core < CPU_SETSIZE) CPU_CLR(core, &apart);
        }
        if (CPU_COUNT(&apart) > 0 && sched_setaffinity(0, sizeof apart, &apart) == 0)
            sched_setaffinity(0, sizeof allowed, &allowed);
    }
#endif

    std::vector<Place> places_;
};

}  // namespace baton
