// The arithmetic of attention on a few rows and keys at a time; `attention.cpp` says what orders it keeps.
//
// Rows are fp32, `dim` floats apart (head_dim padded to whole vectors with zeros); scores and weights are
// `kPartition` floats apart. Keys and values are fp32 or bf16, widened on their way to the registers.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace baton {

constexpr int64_t kPartition = 128;  // kernels.ops.PARTITION_SIZE

// Rows of keys or values of one KV head, `stride` elements apart.
template <typename T>
struct Run {
    const T* rows;
    int64_t stride;
};

// scores[r][j] = scale * q[r] . keys[j] for Rows rows and Keys keys.
template <int Rows, int Keys, typename T>
inline void score_tile(const float* q, int64_t dim, const T* keys, int64_t stride, float scale, float* scores) {
    Vec sums[Rows][Keys];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < Keys; ++j) sums[r][j] = Vec{};
    for (int64_t d = 0; d < dim; d += kWidth)
#pragma GCC unroll 4
        for (int j = 0; j < Keys; ++j) {
            Vec key = load(keys + j * stride + d);
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) sums[r][j] = fma(load(q + r * dim + d), key, sums[r][j]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
        if constexpr (Keys == 4) {
            Vec4 four = sum_lanes(sums[r][0], sums[r][1], sums[r][2], sums[r][3]) * scale;
            std::memcpy(scores + r * kPartition, &four, sizeof four);
        } else {
            static_assert(Keys == 1);
            scores[r * kPartition] = sum_lanes(sums[r][0]) * scale;
        }
    }
}

template <int Rows, typename T>
void score_keys(const float* q, int64_t dim, Run<T> keys, int64_t count, float scale, float* scores) {
    int64_t j = 0;
    for (; j + 4 <= count; j += 4)
        score_tile<Rows, 4>(q, dim, keys.rows + j * keys.stride, keys.stride, scale, scores + j);
    for (; j < count; ++j)
        score_tile<Rows, 1>(q, dim, keys.rows + j * keys.stride, keys.stride, scale, scores + j);
}

// out[r] += sum_j weights[r][j] * values[j], a chain in key order per element, over Vecs vectors of head_dim.
template <int Rows, int Vecs, typename T>
inline void value_tile(const float* weights, const T* values, int64_t stride, int64_t count, int64_t dim, float* out) {
    Vec sums[Rows][Vecs];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < Vecs; ++i) sums[r][i] = load(out + r * dim + i * kWidth);
    for (int64_t j = 0; j < count; ++j)
#pragma GCC unroll 4
        for (int i = 0; i < Vecs; ++i) {
            Vec value = load(values + j * stride + i * kWidth);
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r)
                sums[r][i] = fma(splat(weights[r * kPartition + j]), value, sums[r][i]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < Vecs; ++i) store(out + r * dim + i * kWidth, sums[r][i]);
}

template <int Rows, typename T>
void add_values(const float* weights, Run<T> values, int64_t count, int64_t dim, float* out) {
    int64_t d = 0;
    for (; d + 4 * kWidth <= dim; d += 4 * kWidth)
        value_tile<Rows, 4>(weights, values.rows + d, values.stride, count, dim, out + d);
    for (; d < dim; d += kWidth) value_tile<Rows, 1>(weights, values.rows + d, values.stride, count, dim, out + d);
}

// body(first row, constant number of rows) over num_rows rows, by threes, the rest by twos and one.
template <typename Body>
inline void by_rows(int64_t num_rows, const Body& body) {
    int64_t r = 0;
    for (; num_rows - r >= 5 || num_rows - r == 3; r += 3) body(r, std::integral_constant<int, 3>());
    for (; num_rows - r >= 2; r += 2) body(r, std::integral_constant<int, 2>());
    if (r < num_rows) body(r, std::integral_constant<int, 1>());
}

// Scores [kPartition] of one row to weights exp(score - max), in place; rescales and extends the running pair.
// Returns the factor for what was accumulated before.
inline float softmax_row(float* scores, int64_t visible, float& running_max, float& running_sum) {
    for (int64_t j = visible; j < kPartition; ++j) scores[j] = -kInfinity;
    Vec highest = load(scores);
    for (int64_t j = kWidth; j < kPartition; j += kWidth) highest = max(highest, load(scores + j));
    float new_max = std::max(running_max, max_lanes(highest));
    Vec total = {};
    for (int64_t j = 0; j < kPartition; j += kWidth) {
        Vec weight = exp(load(scores + j) - new_max);
        store(scores + j, weight);
        total += weight;
    }
    float rescale = exp(splat(running_max - new_max))[0];
    running_max = new_max;
    running_sum = running_sum * rescale + sum_lanes(total);
    return rescale;
}

}  // namespace baton
