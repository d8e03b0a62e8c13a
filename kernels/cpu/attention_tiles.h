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

// Keys of a partition laid out for many rows: groups of kKeyGroup keys, and in a group a line of one element of each
// key per element of a head, in the order that `score_group` takes them: lane by lane of the vectors of a head.
constexpr int64_t kKeyGroup = 2 * kWidth;

// Keys [first, first + count) of a partition, fp32 rows `dim` floats apart, to their places.
inline void scatter_keys(const float* keys, int64_t dim, int64_t first, int64_t count, float* groups) {
    const int64_t num_vecs = dim / kWidth;
    const auto line = [&](int64_t j, int64_t d) {
        return groups + (j / kKeyGroup * dim + d % kWidth * num_vecs + d / kWidth) * kKeyGroup + j % kKeyGroup;
    };
    int64_t j = 0;
    for (; first % 4 == 0 && j + 4 <= count; j += 4)
        for (int64_t d = 0; d < dim; d += 4) {
            Vec4 a, b, c, e;
            std::memcpy(&a, keys + j * dim + d, 16), std::memcpy(&b, keys + (j + 1) * dim + d, 16);
            std::memcpy(&c, keys + (j + 2) * dim + d, 16), std::memcpy(&e, keys + (j + 3) * dim + d, 16);
            Vec4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            Vec4 ce_low = __builtin_shufflevector(c, e, 0, 4, 1, 5), ce_high = __builtin_shufflevector(c, e, 2, 6, 3, 7);
            const Vec4 columns[4] = {__builtin_shufflevector(ab_low, ce_low, 0, 1, 4, 5),
                                     __builtin_shufflevector(ab_low, ce_low, 2, 3, 6, 7),
                                     __builtin_shufflevector(ab_high, ce_high, 0, 1, 4, 5),
                                     __builtin_shufflevector(ab_high, ce_high, 2, 3, 6, 7)};
            for (int64_t i = 0; i < 4; ++i) std::memcpy(line(first + j, d + i), &columns[i], 16);
        }
    for (; j < count; ++j)
        for (int64_t d = 0; d < dim; ++d) *line(first + j, d) = keys[j * dim + d];
}

// The lane sums of Rows rows and a group of keys, in the tree that `sum_lanes` keeps: lane `Lane` and those `Step`,
// 2 * Step, ... after it, halves of the vector first.
template <int Rows, int Lane, int Step>
inline void lane_tree(const float* q, int64_t dim, const float* group, Vec (&sums)[Rows][2]) {
    if constexpr (Step == kWidth) {
        const int64_t num_vecs = dim / kWidth;
        const float* line = group + Lane * num_vecs * kKeyGroup;
        Vec chains[Rows][2];  // of its own: nothing else can point at it, so it stays in registers
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) chains[r][0] = chains[r][1] = Vec{};
        for (int64_t i = 0; i < num_vecs; ++i, line += kKeyGroup) {
            Vec first = load(line), second = load(line + kWidth);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                Vec value = splat(q[r * dim + i * kWidth + Lane]);
                chains[r][0] = fma(value, first, chains[r][0]);
                chains[r][1] = fma(value, second, chains[r][1]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            sums[r][0] = chains[r][0];
            sums[r][1] = chains[r][1];
        }
    } else {
        Vec others[Rows][2];
        lane_tree<Rows, Lane, 2 * Step>(q, dim, group, sums);
        lane_tree<Rows, Lane + Step, 2 * Step>(q, dim, group, others);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            sums[r][0] += others[r][0];
            sums[r][1] += others[r][1];
        }
    }
}

// As `score_keys`, over groups of keys: the same sums in the same order, without adding across a vector.
template <int Rows>
void score_groups(const float* q, int64_t dim, const float* groups, int64_t count, float scale, float* scores) {
    for (int64_t j = 0; j < count; j += kKeyGroup) {
        Vec sums[Rows][2];
        lane_tree<Rows, 0, 1>(q, dim, groups + j * dim, sums);
        for (int r = 0; r < Rows; ++r) {
            store(scores + r * kPartition + j, sums[r][0] * scale);
            store(scores + r * kPartition + j + kWidth, sums[r][1] * scale);
        }
    }
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

// The same, by sixes first.
template <typename Body>
inline void by_many_rows(int64_t num_rows, const Body& body) {
    int64_t sixes = num_rows / 6 * 6;
    for (int64_t r = 0; r < sixes; r += 6) body(r, std::integral_constant<int, 6>());
    by_rows(num_rows - sixes, [&](int64_t r, auto rows) { body(sixes + r, rows); });
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
