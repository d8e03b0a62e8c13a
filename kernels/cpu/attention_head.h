// What an item of attention keeps of one KV head (`attention_item.h`): its rows and what they have accumulated so far.
#pragma once

#include "attention_bytes.h"

namespace baton {

struct HeadState {
    float *q, *accumulator, *partial;  // [rows, dim]; with pairs q is bf16, of integers an `IntegerQuery` and partial int32
    float *scores;                     // [rows, kPartition]; then weights, bf16 ones or `IntegerWeights` in the same memory
    float *running_max, *running_sum;  // [rows]

    static int64_t num_floats(int64_t num_rows, int64_t dim) {
        return ceil_div(num_rows * (3 * dim + kPartition + 2), 16) * 16;
    }

    HeadState(float* memory, int64_t num_rows, int64_t dim)
        : q(memory), accumulator(q + num_rows * dim), partial(accumulator + num_rows * dim),
          scores(partial + num_rows * dim), running_max(scores + num_rows * kPartition),
          running_sum(running_max + num_rows) {
        std::fill(accumulator, accumulator + num_rows * dim, 0.0f);
        std::fill(running_max, running_max + num_rows, -kInfinity);
        std::fill(running_sum, running_sum + num_rows, 0.0f);
    }

    bf16* pairs() const { return reinterpret_cast<bf16*>(q); }
    // A row's weights of the keys from `first` of the partition on.
    const char* weights(int64_t r, int64_t first, int64_t num_bytes) const {
        return reinterpret_cast<const char*>(scores + r * kPartition) + first * num_bytes;
    }
};

// A group's sums in the order of elements: as they are, as pairs have left them, or quads.
enum class Interleaved { kNot, kPairs, kQuads };
template <int64_t Unit>
inline void load_in_order(const float* sums, Interleaved how, Vec (&ordered)[Unit / kWidth]) {
    float* const target = reinterpret_cast<float*>(ordered);
    if constexpr (Unit == kQuadGroup)
        if (how == Interleaved::kQuads) return load_quads_in_order(sums, ordered);
    if (how == Interleaved::kNot) {
        std::memcpy(target, sums, sizeof ordered);
    } else {
        for (int64_t i = 0; i < Unit; i += kGroup) store_pairs_in_order(sums + i, target + i);
    }
}

}  // namespace baton
