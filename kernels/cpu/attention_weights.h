// A row's scores of one partition to weights of its values, and what the row keeps of it: a running maximum and sum.
//
// Where weights are fp32, so is what `exp` computes. Where they end as bf16 or as 15-bit integers (`attention_bytes.h`), a
// power of two with a shorter polynomial does, to 4e-6. Of keys that a row does not see weights are 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention.h"
#include "simd.h"
#include "threads.h"

namespace baton {

// e^x for x <= 0, as `exp` of simd.h computes it, and 0 from where 2^power is no normal number; a NaN stays one.
inline Vec exp_of_negative(Vec x) {
    const ExpParts parts = exp_parts(max(splat(-88.0f), x));  // in this order a NaN passes
    return parts.rest * Vec((parts.power + 127) << 23);       // 2^power, power >= -127, or 0
}

// 2^t * p(t - floor(t)) for t <= 0 (or just above), p being 2^f on [0, 1] to 4e-6, with p(0) = 1; 0 where that is no normal
// number, which machines take a hundred cycles to make; a NaN stays one.
inline Vec power_of_two(Vec t) {
    constexpr float least = -126.0f;
#if defined(BATON_AVX512)
    const __mmask16 is_normal = _mm512_cmp_ps_mask(__m512(t), __m512(splat(least)), _CMP_NLT_UQ);
    const Vec whole = Vec(_mm512_roundscale_ps(__m512(t), 0x09));  // floor
#else
    Vec whole;
    for (int64_t l = 0; l < kWidth; ++l) whole[l] = std::floor(t[l]);
#endif
    const Vec f = t - whole;
    Vec p = splat(0.013555747456848621f);
    p = fma(p, f, splat(0.05203237012028694f));
    p = fma(p, f, splat(0.2413797676563263f));
    p = fma(p, f, splat(0.6930321455001831f));
    p = fma(p, f, splat(1.0f));
#if defined(BATON_AVX512)
    return Vec(_mm512_maskz_scalef_ps(is_normal, __m512(p), __m512(whole)));
#else
    for (int64_t l = 0; l < kWidth; ++l)
        p[l] = t[l] < least ? 0.0f : whole[l] <= 0.0f ? std::ldexp(p[l], int(whole[l])) : t[l];
    return p;
#endif
}

// e^x for x <= 0, as near as weights of type W need it: of bf16, and of integers (void).
template <typename W>
inline Vec weight_of(Vec x) {
    if constexpr (std::is_same_v<W, float>)
        return exp_of_negative(x);
    else
        return power_of_two(x * 1.44269504088896341f);
}

// Rounded as by `store`, subnormals perhaps to zero.
inline void store_fast(float* target, Vec value) { store(target, value); }
inline void store_fast(bf16* target, Vec value) {
#if defined(BATON_AVX512) && defined(__AVX512BF16__)
    const __m256bh narrow = _mm512_cvtneps_pbh(value);
    std::memcpy(target, &narrow, sizeof narrow);
#else
    store(target, value);
#endif
}

inline void store_two_fast(bf16* target, Vec low, Vec high) {
#if defined(BATON_AVX512) && defined(__AVX512BF16__)
    const auto both = _mm512_cvtne2ps_pbh(high, low);
    std::memcpy(target, &both, sizeof both);
#else
    store(target, low), store(target + kWidth, high);
#endif
}

// Keys of a partition whose weights are computed: whole vectors of them.
inline int64_t num_weighed(int64_t visible) { return ceil_div(visible, kWidth) * kWidth; }

// The first `count` lanes, and `other` in those behind.
inline Vec first_lanes(Vec some, int64_t count, float other) {
    IntVec lane;
    for (int i = 0; i < kWidth; ++i) lane[i] = i;
    return lane < int32_t(std::clamp<int64_t>(count, 0, kWidth)) ? some : splat(other);
}

// Of a row's scores; those past `visible` that are weighed become -inf.
inline float highest_score(float* scores, int64_t visible) {
    const int64_t end = num_weighed(visible);
    if (visible < end) {
        const Vec some = first_lanes(load(scores + end - kWidth), visible - (end - kWidth), -kInfinity);
        store(scores + end - kWidth, some);
    }
    Vec highest = load(scores);
    for (int64_t j = kWidth; j < end; j += kWidth) highest = max(highest, load(scores + j));
    return max_lanes(highest);
}

// The running pair with a partition's weights; returns the factor for what was accumulated before.
template <typename W>
inline float extend(Vec total, float new_max, float& running_max, float& running_sum) {
    const float rescale = weight_of<W>(splat(running_max - new_max))[0];
    running_max = new_max;
    running_sum = running_sum * rescale + sum_lanes(total);
    return rescale;
}

// Scores [kPartition] of one row to weights exp(score - max), in place, as W from the row's start; rescales and extends
// the running pair. Returns the factor for what was accumulated before.
template <typename W>
inline float softmax_row(float* scores, int64_t visible, float& running_max, float& running_sum) {
    const float new_max = std::max(running_max, highest_score(scores, visible));
    const int64_t end = num_weighed(visible);
    W* const weights = reinterpret_cast<W*>(scores);  // written no further than scores are read
    Vec total = {};
    for (int64_t j = 0; j < end; j += kWidth) {
        const Vec some = weight_of<W>(load(scores + j) - new_max);
        store_fast(weights + j, some);
        total += some;
    }
    std::memset(static_cast<void*>(weights + end), 0, size_t(kPartition - end) * sizeof(W));
    return extend<W>(total, new_max, running_max, running_sum);
}

// The same of up to kMostWeighed rows at once, to bf16 elsewhere: 2^(score * unit - max), the maximum being of scores times
// the unit. Weights of the first `num_keys` keys are written (a multiple of 2 * kWidth, no fewer than a row sees); no row
// sees fewer than the first one, and who sees none of them keeps what it has. `running_max` and the like are read and
// written up to kMostWeighed.
constexpr int64_t kMostWeighed = 16;
template <typename Visible>
inline void weigh_rows(float* scores, bf16* weights, int64_t num_rows, const Visible& visible, int64_t num_keys, float unit,
                       float* running_max, float* running_sum, float* rescale) {
    constexpr int64_t step = 2 * kWidth;
    alignas(64) float maxima[kMostWeighed] = {}, sums[kMostWeighed] = {};
    // What all rows see whole steps of is taken as it is, the rest with what a row does not see hidden.
    const int64_t whole = visible(0) / step * step;
    for (int64_t r = 0; r < num_rows; ++r) {
        float* const row = scores + r * kPartition;
        const int64_t seen = visible(r);
        Vec highest = splat(-kInfinity);
        for (int64_t j = 0; j < whole; j += kWidth) highest = max(highest, load(row + j));
        for (int64_t j = whole; j < num_keys; j += kWidth) {
            const Vec some = first_lanes(load(row + j), seen - j, -kInfinity);
            store(row + j, some);
            highest = max(highest, some);
        }
        maxima[r] = max_lanes(highest);
    }
    for (int64_t r = 0; r < kMostWeighed; r += kWidth) {
        const Vec before = load(running_max + r), now = max(before, load(maxima + r) * unit);
        store(running_max + r, now), store(rescale + r, power_of_two(before - now));
    }
    for (int64_t r = 0; r < num_rows; ++r, weights += kPartition) {
        const float* const row = scores + r * kPartition;
        const Vec factor = splat(unit), offset = splat(-running_max[r]);
        Vec total = {};
        for (int64_t j = 0; j < num_keys; j += step) {
            const Vec low = power_of_two(fma(load(row + j), factor, offset));
            const Vec high = power_of_two(fma(load(row + j + kWidth), factor, offset));
            total += low, total += high;
            store_two_fast(weights + j, low, high);
        }
        sums[r] = sum_lanes(total);
    }
    for (int64_t r = 0; r < kMostWeighed; r += kWidth)
        store(running_sum + r, load(running_sum + r) * load(rescale + r) + load(sums + r));
}

}  // namespace baton
