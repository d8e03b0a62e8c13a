// What scores become (`attention_weights.h`), called from a test.
#include "attention_weights.h"

using namespace baton;

extern "C" {

void weights_power_of_two(const float* t, float* power, int64_t count) {
    for (int64_t i = 0; i < count; i += kWidth) store_partial(power + i, power_of_two(load_partial(t + i, count - i)), count - i);
}

// scores [num_rows, kPartition], weights as 16 bits each, likewise; running_max, running_sum and rescale [16].
void weights_weigh_rows(float* scores, void* weights, int64_t num_rows, const int64_t* visible, int64_t num_keys, float unit,
                        float* running_max, float* running_sum, float* rescale) {
    weigh_rows(scores, static_cast<bf16*>(weights), num_rows, [&](int64_t r) { return visible[r]; }, num_keys, unit, running_max,
               running_sum, rescale);
}
}
