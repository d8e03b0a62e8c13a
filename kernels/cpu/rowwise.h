// Operations that look at one row at a time, a row (or a part of one) per call: RMS norm, rotary embedding, SiLU gate.
//
// A row is walked in vectors from its own start, its end through the same code by partial loads. T is the model's
// type; results are rounded to it, and stored as T or, for a product that reads fp32 next, widened again.
#pragma once

#include <cmath>

#include "simd.h"

namespace baton {

// y = round(x * rsqrt(mean(x^2) + eps)) * w
template <typename T, typename Y>
inline void rms_norm_row(const T* x, const T* weight, float eps, int64_t size, Y* y) {
    Vec squares = {};
    for (int64_t i = 0; i < size; i += kWidth) {
        Vec value = load_partial(x + i, size - i);
        squares = fma(value, value, squares);
    }
    Vec inverse_rms = splat(1.0f / std::sqrt(sum_lanes(squares) / float(size) + eps));
    int64_t i = 0;
    for (; i + 2 * kWidth <= size; i += 2 * kWidth) {
        Vec low = load(x + i) * inverse_rms, high = load(x + i + kWidth) * inverse_rms;
        round_two<T>(low, high);
        low *= load(weight + i), high *= load(weight + i + kWidth);
        round_two<T>(low, high);
        store_two(y + i, low, high);
    }
    for (; i < size; i += kWidth) {
        Vec normed = round_to<T>(load_partial(x + i, size - i) * inverse_rms);
        store_partial(y + i, round_to<T>(normed * load_partial(weight + i, size - i)), size - i);
    }
}

// (a, b) = halves of a head -> (a cos - b sin, b cos + a sin); x and y may be the same.
template <typename T>
inline void rotate_head(const T* x, const float* cos, const float* sin, int64_t head_dim, T* y) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += kWidth) {
        const int64_t count = half - i;
        Vec a = load_partial(x + i, count), b = load_partial(x + half + i, count);
        Vec c = load_partial(cos + i, count), s = load_partial(sin + i, count);
        store_partial(y + i, a * c - b * s, count);
        store_partial(y + half + i, b * c + a * s, count);
    }
}

// gate / (1 + exp(-gate)) * up, not rounded yet
inline Vec silu_mul(Vec gate, Vec up) { return gate / (exp_mostly_inside(-gate) + 1.0f) * up; }

// The same over `size` columns.
template <typename T, typename Y>
inline void silu_mul_row(const T* gates, const T* ups, int64_t size, Y* y) {
    for (int64_t i = 0; i < size; i += kWidth)
        store_partial(y + i, round_to<T>(silu_mul(load_partial(gates + i, size - i), load_partial(ups + i, size - i))),
                      size - i);
}

}  // namespace baton
