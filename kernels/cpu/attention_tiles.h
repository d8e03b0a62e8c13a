// The arithmetic of attention on a few query rows at a time; `attention_item.h` says what orders it keeps.
//
// Rows are fp32, `dim` floats apart; scores and weights are kPartition floats apart. Keys and values come in the panels
// of `attention_panels.h`.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "attention_panels.h"
#include "simd.h"

namespace baton {

// Tiles are compiled once, not once per place and type that uses them: half the time of a first start.
#define BATON_NOINLINE __attribute__((noinline))

constexpr int kMostRows = 6;  // of a tile

// sums[r][v] += row(r) * line(v). The fewer of the two are held in registers beside the sums.
template <int Rows, int Vecs, typename Row, typename Line>
inline void outer_product(Vec (&sums)[Rows][Vecs], const Row& row, const Line& line) {
    if constexpr (Rows < Vecs) {
        Vec rows[Rows];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) rows[r] = row(r);
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) {
            const Vec value = line(v);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) sums[r][v] = fma(rows[r], value, sums[r][v]);
        }
    } else {
        Vec lines[Vecs];
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) lines[v] = line(v);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const Vec value = row(r);
#pragma GCC unroll 8
            for (int v = 0; v < Vecs; ++v) sums[r][v] = fma(value, lines[v], sums[r][v]);
        }
    }
}

// scores[r][j] = (q[r] . keys[j]) * factors[j] for Rows rows and Groups groups of keys; one chain over `dim` each.
template <int Rows, int Groups>
inline void score_tile(const float* q, int64_t dim, const float* keys, const float* factors, float* scores) {
    constexpr int num_vecs = 2 * Groups;
    Vec sums[Rows][num_vecs];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < num_vecs; ++v) sums[r][v] = Vec{};
    for (int64_t d = 0; d < dim; ++d, keys += kGroup) {
        outer_product<Rows, num_vecs>(
            sums, [&](int r) { return splat(q[r * dim + d]); },
            [&](int v) { return load(keys + v / 2 * dim * kGroup + v % 2 * kWidth); });
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < num_vecs; ++v)
            store(scores + r * kPartition + v * kWidth, sums[r][v] * load(factors + v * kWidth));
}

// As `score_tile` for few rows, and Halves times kWidth keys straight from the pool.
template <typename Kv, int Rows, int Halves>
BATON_NOINLINE void score_keys(const float* q, int64_t dim, const char* const* keys, const float* factors,
                               float* scores) {
    constexpr int per_word = 4 / int(sizeof(Kv));
    Vec sums[Rows][Halves];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Halves; ++v) sums[r][v] = Vec{};
    for (int64_t d = 0; d < dim; d += kStep<Kv>) {
        UintVec words[Halves][4];
#pragma GCC unroll 4
        for (int v = 0; v < Halves; ++v) load_words(keys + v * kWidth, d * int64_t(sizeof(Kv)), words[v]);
#pragma GCC unroll 16
        for (int i = 0; i < 4 * per_word; ++i)
            outer_product<Rows, Halves>(
                sums, [&](int r) { return splat(q[r * dim + d + i]); },
                [&](int v) { return element<Kv>(words[v][i / per_word], i % per_word); });
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Halves; ++v)
            store(scores + r * kPartition + v * kWidth, sums[r][v] * load(factors + v * kWidth));
}

// As `value_tile` for few rows and `Vecs` vectors of values straight from the pool, from element d on.
template <typename Kv, int Rows, int Vecs>
inline void add_value_vecs(const float* weights, const char* const* values, int64_t d, int64_t count, int64_t dim,
                           float* out) {
    Vec sums[Rows][Vecs];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vecs; ++v) sums[r][v] = load(out + r * dim + d + v * kWidth);
    for (int64_t j = 0; j < count; ++j) {
        const Kv* value = reinterpret_cast<const Kv*>(values[j]) + d;
        outer_product<Rows, Vecs>(
            sums, [&](int r) { return splat(weights[r * kPartition + j]); },
            [&](int v) { return load(value + v * kWidth); });
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vecs; ++v) store(out + r * dim + d + v * kWidth, sums[r][v]);
}

template <typename Kv, int Rows>
BATON_NOINLINE void add_values_in_place(const float* weights, const char* const* values, int64_t head_dim,
                                        int64_t count, int64_t dim, float* out) {
    constexpr int vecs = Rows <= 3 ? 4 : 2;
    int64_t d = 0;
    for (; d + vecs * kWidth <= head_dim; d += vecs * kWidth)
        add_value_vecs<Kv, Rows, vecs>(weights, values, d, count, dim, out);
    for (; d < head_dim; d += kWidth) add_value_vecs<Kv, Rows, 1>(weights, values, d, count, dim, out);
}

template <int Rows>
BATON_NOINLINE void score_groups(const float* q, int64_t dim, const float* keys, int64_t num_groups,
                                 const float* factors, float* scores) {
    int64_t g = 0;
    if constexpr (Rows <= 3)
        for (; g + 2 <= num_groups; g += 2)
            score_tile<Rows, 2>(q, dim, keys + g * dim * kGroup, factors + g * kGroup, scores + g * kGroup);
    for (; g < num_groups; ++g)
        score_tile<Rows, 1>(q, dim, keys + g * dim * kGroup, factors + g * kGroup, scores + g * kGroup);
}

// out[r] += sum_j weights[r][j] * values[j] over Strips strips, a chain in the order of keys per element.
template <int Rows, int Strips>
inline void value_tile(const float* weights, const float* values, int64_t strip, int64_t count, int64_t dim,
                       float* out) {
    constexpr int num_vecs = 2 * Strips;
    Vec sums[Rows][num_vecs];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < num_vecs; ++v) sums[r][v] = load(out + r * dim + v * kWidth);
    for (int64_t j = 0; j < count; ++j, values += kGroup) {
        outer_product<Rows, num_vecs>(
            sums, [&](int r) { return splat(weights[r * kPartition + j]); },
            [&](int v) { return load(values + v / 2 * strip + v % 2 * kWidth); });
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < num_vecs; ++v) store(out + r * dim + v * kWidth, sums[r][v]);
}

template <int Rows>
BATON_NOINLINE void add_values(const float* weights, const float* values, int64_t strip, int64_t count, int64_t dim,
                               float* out) {
    int64_t d = 0;
    if constexpr (Rows <= 3)
        for (; d + 2 * kGroup <= dim; d += 2 * kGroup)
            value_tile<Rows, 2>(weights, values + d / kGroup * strip, strip, count, dim, out + d);
    for (; d < dim; d += kGroup)
        value_tile<Rows, 1>(weights, values + d / kGroup * strip, strip, count, dim, out + d);
}

// body(first row, constant number of rows) over [begin, end), `Most` at most (six or less) and in tiles of nearly equal
// size.
template <int Most = kMostRows, typename Body>
inline void by_rows(int64_t begin, int64_t end, const Body& body) {
    const auto tile = [&]<int Rows>(std::integral_constant<int, Rows> rows) {
        if constexpr (Rows <= Most) body(begin, rows);
    };
    while (begin < end) {
        const int64_t left = end - begin, tiles = (left + Most - 1) / Most, rows = (left + tiles - 1) / tiles;
        switch (rows) {
            case 1: tile(std::integral_constant<int, 1>()); break;
            case 2: tile(std::integral_constant<int, 2>()); break;
            case 3: tile(std::integral_constant<int, 3>()); break;
            case 4: tile(std::integral_constant<int, 4>()); break;
            case 5: tile(std::integral_constant<int, 5>()); break;
            default: tile(std::integral_constant<int, 6>());
        }
        begin += rows;
    }
}

}  // namespace baton
