// The arithmetic of attention where the machine adds pairs of products (`words.h`), on a few query rows at a time: pairs of
// bf16, and of int16, which keys and values of int8 become where many rows share them (`attention_bytes.h`).
//
// Values are taken two keys at a time: an element of both is a pair, and so are their weights. Interleaving two rows
// leaves elements in an order of its own within each group of kGroup (`store_pairs_in_order` undoes it), which sums keep
// until the end. A panel of values is [strips of kGroup elements][pairs of keys][kGroup words].
//
// Queries of bf16 are `dim` elements apart; weights are at the start of their row of scores.
#pragma once

#include "attention.h"
#include "attention_quarters.h"
#include "attention_tiles.h"

namespace baton {

constexpr int64_t kQuarter = kQuarterBytes / 2;  // elements

// What a word of rows is, and its sum of products.
struct Bf16Pair {
    using Sums = Vec;
    static Sums add(Sums sums, IntVec x, IntVec w) { return add_pairs(sums, x, w); }
};
struct ShortPair {
    using Sums = IntVec;
    static Sums add(Sums sums, IntVec x, IntVec w) { return add_shorts(sums, x, w); }
};

// scores[r][j] = finish(r, q[r] . keys[j]) for kWidth keys, whose quarters `quarter(d, i)` gives; rows of q are `stride`
// bytes apart.
template <typename Pair, int Rows, typename Quarter, typename Finish>
inline void score_quarters(const char* q, int64_t stride, int64_t dim, const Quarter& quarter, const Finish& finish,
                           float* scores) {
    typename Pair::Sums sums[Rows][4];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[r][i] = typename Pair::Sums{};
    for (int64_t d = 0; d < dim; d += kQuarter) {
        IntVec keys[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) keys[i] = quarter(d, i);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const IntVec query = splat_quarter(q + r * stride + d * 2);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) sums[r][i] = Pair::add(sums[r][i], query, keys[i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) store(scores + r * kPartition, finish(r, add_chains(sums[r])));
}

// Keys of bf16 read where they lie; scores are (q . key) * factor.
template <int Rows>
BATON_NOINLINE void score_pairs_in_place(const bf16* q, int64_t dim, const char* const* keys, const float* factors,
                                         float* scores) {
    const Vec factor = load(factors);
    score_quarters<Bf16Pair, Rows>(
        reinterpret_cast<const char*>(q), dim * 2, dim,
        [&](int64_t d, int i) { return IntVec(load_quarters(keys + i, d * 2)); },
        [&](int, Vec sum) { return sum * factor; }, scores);
}

// The first `num_keys` of a panel, rounded up to kWidth; `finish` gets the first key's place too.
template <typename Pair, int Rows, typename Finish>
inline void score_panel(const char* q, int64_t stride, int64_t dim, const char* panel, int64_t num_keys,
                        const Finish& finish, float* scores) {
    for (int64_t j = 0; j < num_keys; j += kWidth, panel += kWidth * dim * 2)
        score_quarters<Pair, Rows>(
            q, stride, dim, [&](int64_t d, int i) { return load_words(panel + (d / kQuarter * 4 + i) * kWidth * 4); },
            [&](int r, typename Pair::Sums sum) { return finish(r, j, sum); }, scores + j);
}

template <int Rows>
BATON_NOINLINE void score_pairs(const bf16* q, int64_t dim, const char* panel, int64_t num_keys, const float* factors,
                                float* scores) {
    score_panel<Bf16Pair, Rows>(reinterpret_cast<const char*>(q), dim * 2, dim, panel, num_keys,
                                [&](int, int64_t j, Vec sum) { return sum * load(factors + j); }, scores);
}

// kGroup elements from element d on of two values as pairs, in two vectors and an order of their own.
template <typename Kv>
inline void interleave(const char* even, const char* odd, int64_t d, IntVec (&words)[2]) {
    const Halves a = halves<Kv>(even + d * int64_t(sizeof(Kv))), b = halves<Kv>(odd + d * int64_t(sizeof(Kv)));
    words[0] = IntVec(mix_low(a, b)), words[1] = IntVec(mix_high(a, b));
}

// A group's sums as `interleave` has left them, to the order of elements.
inline void store_pairs_in_order(const float* sums, float* target) {
    constexpr auto first = [](int l) { return (l & 4) / 4 * int(kWidth) + l / 8 * 4 + (l & 3); };
    constexpr auto second = [](int l) { return (l & 4) / 4 * int(kWidth) + l / 8 * 4 + (l & 3) + int(kWidth) / 2; };
    const Vec low = load(sums), high = load(sums + kWidth);
    store(target, pick_as(low, high, first)), store(target + kWidth, pick_as(low, high, second));
}

// out[r] += sum of pairs of weights times pairs of values, over Strips groups of elements; `words(p, strip, words)` gives
// pair p of a strip. Weights are of rows kPartition floats apart.
template <typename Pair, int Rows, int Strips, typename Words>
inline void add_pair_strips(const char* weights, int64_t num_pairs, int64_t dim, const Words& words, float* out) {
    using Sums = typename Pair::Sums;
    Sums sums[Rows][2 * Strips];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * Strips; ++v) sums[r][v] = Sums(load_words(out + r * dim + v * kWidth));
    for (int64_t p = 0; p < num_pairs; ++p) {
        IntVec values[Strips][2];
#pragma GCC unroll 2
        for (int s = 0; s < Strips; ++s) words(p, s, values[s]);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const IntVec weight = splat_word(weights + (r * kPartition + p) * 4);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * Strips; ++v) sums[r][v] = Pair::add(sums[r][v], weight, values[v / 2][v % 2]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * Strips; ++v) std::memcpy(out + r * dim + v * kWidth, &sums[r][v], sizeof(Sums));
}

template <typename Pair, int Rows, typename Words>
inline void add_pairs_of_values(const char* weights, int64_t num_pairs, int64_t dim, const Words& words, float* out) {
    int64_t d = 0;
    for (; d + 2 * kGroup <= dim; d += 2 * kGroup)
        add_pair_strips<Pair, Rows, 2>(
            weights, num_pairs, dim, [&](int64_t p, int s, IntVec(&pair)[2]) { words(p, d + s * kGroup, pair); }, out + d);
    if (d < dim)
        add_pair_strips<Pair, Rows, 1>(
            weights, num_pairs, dim, [&](int64_t p, int, IntVec(&pair)[2]) { words(p, d, pair); }, out + d);
}

// Values of bf16 read where they lie.
template <int Rows>
BATON_NOINLINE void add_value_pairs_in_place(const char* weights, const char* const* values, int64_t num_pairs, int64_t dim,
                                             float* out) {
    add_pairs_of_values<Bf16Pair, Rows>(
        weights, num_pairs, dim,
        [&](int64_t p, int64_t d, IntVec(&pair)[2]) { interleave<bf16>(values[2 * p], values[2 * p + 1], d, pair); }, out);
}

// Two values to their lines in each strip; strips are `strip` bytes apart.
template <typename Kv>
inline void pack_pair(const char* even, const char* odd, int64_t dim, int64_t strip, char* line) {
    for (int64_t d = 0; d < dim; d += kGroup, line += strip) {
        IntVec words[2];
        interleave<Kv>(even, odd, d, words);
        for (int64_t i = 0; i < 2; ++i) std::memcpy(line + i * int64_t(sizeof words[i]), &words[i], sizeof words[i]);
    }
}

// Sums of `ShortPair` are int32 in the memory of `out`.
template <typename Pair, int Rows>
BATON_NOINLINE void add_value_pairs(const char* weights, const char* panel, int64_t strip, int64_t num_pairs, int64_t dim,
                                    float* out) {
    add_pairs_of_values<Pair, Rows>(
        weights, num_pairs, dim,
        [&](int64_t p, int64_t d, IntVec(&pair)[2]) {
            std::memcpy(pair, panel + d / kGroup * strip + p * int64_t(sizeof pair), sizeof pair);
        },
        out);
}

}  // namespace baton
