// What `Places` does with a thread that has slept where another of its team works.
#include "places.h"

#include <thread>

using namespace baton;

extern "C" {

// A thread works on the core `from`; a second one, which may run on the cores `allowed`, wakes there. The core it goes
// on from, or -1 if its own cores are others than before. `has_left`: the first works no more.
int64_t places_core_after_waking(int64_t from, const int64_t* allowed, int64_t num_allowed, int64_t has_left) {
    Places places(2);
    int64_t core = -1;
    const auto stay_on = [](const cpu_set_t& cores) { sched_setaffinity(0, sizeof cores, &cores); };
    cpu_set_t one, all, after;
    CPU_ZERO(&one);
    CPU_ZERO(&all);
    CPU_SET(from, &one);
    for (int64_t i = 0; i < num_allowed; ++i) CPU_SET(allowed[i], &all);
    std::thread first([&] {
        stay_on(one);
        places.note(0);
        if (has_left) places.leave(0);
    });
    first.join();
    std::thread second([&] {
        stay_on(one);
        stay_on(all);
        places.wake(1);
        core = sched_getcpu();
        sched_getaffinity(0, sizeof after, &after);
    });
    second.join();
    return CPU_EQUAL(&all, &after) ? core : -1;
}
}
