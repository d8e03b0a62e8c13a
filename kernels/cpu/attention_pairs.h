// The arithmetic of attention where the model is bf16 and the machine adds pairs of products
// (`words.h`), on a few query rows at a time; `attention.cpp` says what orders it keeps.
//
// Keys meet queries as quarters: 16 bytes (8 elements) of kWidth / 4 keys side by side, four such vectors for kWidth keys.
// No key is turned over; a score is four chains over head_dim, one per word of the quarters, added in one fixed tree.
// Values are taken two keys at a time: an element of both is a pair, and so are their weights. Interleaving two rows
// leaves elements in an order of its own within each group of kGroup (`in_order` undoes it), which sums keep until the end.
// Keys and values of int8 become bf16 first, which is exact; their scales go to scores and weights.
//
// A panel of keys is, per kWidth keys, [dim / 8][4 quarters]; one of values [strips of kGroup elements][pairs of keys]
// [kGroup words]. Queries are bf16, `dim` apart; weights are bf16, from the start of their row of scores.
#pragma once

#include "attention.h"
#include "attention_panels.h"
#include "attention_tiles.h"
#include "words.h"

namespace baton {

constexpr int64_t kQuarter = 8;  // elements
static_assert(!kHasDot || kWidth >= 8);

inline Vec pick(Vec a, Vec b, auto lane) { return Vec(pick(UintVec(a), UintVec(b), lane)); }

// The 16 bytes at `source` in every quarter.
inline IntVec splat_quarter(const bf16* source) {
#if defined(BATON_AVX512)  // asked for by name: the compiler goes through memory
    return IntVec(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
#else
    IntVec result;
    for (int64_t i = 0; i < kWidth / 4; ++i) std::memcpy(reinterpret_cast<char*>(&result) + 16 * i, source, 16);
    return result;
#endif
}

// Four vectors of word chains, keys i, i + 4, ... in vector i, to one score per key in the order of keys.
inline Vec add_chains(const Vec (&sums)[4]) {
    constexpr auto low = [](int l) { return (l & 1) * int(kWidth) + (l & ~3) + l % 4 / 2; };
    constexpr auto high = [](int l) { return (l & 1) * int(kWidth) + (l & ~3) + l % 4 / 2 + 2; };
    constexpr auto first = [](int l) { return (l & 2) / 2 * int(kWidth) + (l & ~3) + (l & 1); };
    constexpr auto second = [](int l) { return (l & 2) / 2 * int(kWidth) + (l & ~3) + (l & 1) + 2; };
    const Vec ab = pick(sums[0], sums[1], low) + pick(sums[0], sums[1], high);  // chains 0+2 and 1+3 of each key
    const Vec cd = pick(sums[2], sums[3], low) + pick(sums[2], sums[3], high);
    return pick(ab, cd, first) + pick(ab, cd, second);
}

// scores[r][j] = (q[r] . keys[j]) * factors[j] for kWidth keys, whose quarters `quarter(d, i)` gives.
template <int Rows, typename Quarter>
inline void score_quarters(const bf16* q, int64_t dim, const Quarter& quarter, const float* factors, float* scores) {
    Vec sums[Rows][4];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[r][i] = Vec{};
    for (int64_t d = 0; d < dim; d += kQuarter) {
        IntVec keys[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) keys[i] = quarter(d, i);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const IntVec query = splat_quarter(q + r * dim + d);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) sums[r][i] = add_pairs(sums[r][i], query, keys[i]);
        }
    }
    const Vec factor = load(factors);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) store(scores + r * kPartition, add_chains(sums[r]) * factor);
}

// As above, keys read where they lie.
template <int Rows>
BATON_NOINLINE void score_pairs_in_place(const bf16* q, int64_t dim, const char* const* keys, const float* factors,
                                         float* scores) {
    const auto quarter = [&](int64_t d, int i) { return IntVec(load_quarters(keys + i, d * 2)); };
    score_quarters<Rows>(q, dim, quarter, factors, scores);
}

// kWidth keys to their place in a panel.
BATON_NOINLINE inline void pack_quarters(const char* const* keys, int64_t dim, char* panel) {
    for (int64_t d = 0; d < dim; d += kQuarter)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, panel += sizeof(UintVec)) {
            const UintVec some = load_quarters(keys + i, d * 2);
            std::memcpy(panel, &some, sizeof some);
        }
}

// The first `num_keys` of a panel, rounded up to kWidth.
template <int Rows>
BATON_NOINLINE void score_pairs(const bf16* q, int64_t dim, const char* panel, int64_t num_keys, const float* factors,
                                float* scores) {
    for (int64_t j = 0; j < num_keys; j += kWidth, panel += kWidth * dim * 2) {
        const auto quarter = [&](int64_t d, int i) { return load_words(panel + (d / kQuarter * 4 + i) * kWidth * 4); };
        score_quarters<Rows>(q, dim, quarter, factors + j, scores + j);
    }
}

typedef uint16_t Halves __attribute__((vector_size(kWidth * 4)));
constexpr auto kHalves = std::make_integer_sequence<int, int(kGroup)>();

// Lane l of the result is half-word Lane{}(l) of a, or of b from kGroup on.
template <typename Lane, int... Lanes>
inline IntVec mix(Halves a, Halves b, Lane, std::integer_sequence<int, Lanes...>) {
    return IntVec(__builtin_shufflevector(a, b, Lane{}(Lanes)...));
}

// Small integers in fp32 as bf16, which is exact: the upper halves of their words, one vector after the other ...
inline IntVec narrow_in_turn(Vec first, Vec second) {
    constexpr auto lane = [](int l) { return l < int(kWidth) ? 2 * l + 1 : int(kGroup) + 2 * (l - int(kWidth)) + 1; };
    return mix(Halves(first), Halves(second), lane, kHalves);
}
// ... or as pairs.
inline IntVec narrow_to_pairs(Vec even, Vec odd) {
    constexpr auto lane = [](int l) { return (l & 1) * int(kGroup) + l / 2 * 2 + 1; };
    return mix(Halves(even), Halves(odd), lane, kHalves);
}

// An int8 row of head_dim elements as `dim` bf16, a whole number of groups.
inline void widen_row(const char* row, int64_t head_dim, int64_t dim, char* target) {
    const int8_t* const values = reinterpret_cast<const int8_t*>(row);
    for (int64_t d = 0; d < dim; d += kGroup) {
        IntVec words;
        if (d + kGroup <= head_dim) {
            words = narrow_in_turn(load(values + d), load(values + d + kWidth));
        } else {
            int8_t rest[kGroup] = {};
            if (d < head_dim) std::memcpy(rest, values + d, size_t(head_dim - d));
            words = narrow_in_turn(load(rest), load(rest + kWidth));
        }
        std::memcpy(target + d * 2, &words, sizeof words);
    }
}

// kGroup elements from element d on of two values as pairs, in two vectors: of bf16 in an order of their own.
template <typename Kv>
inline void interleave(const char* even, const char* odd, int64_t d, IntVec (&words)[2]) {
    if constexpr (sizeof(Kv) == 1) {
        const auto at = [&](const char* row, int64_t i) { return load(reinterpret_cast<const int8_t*>(row) + d + i); };
        words[0] = narrow_to_pairs(at(even, 0), at(odd, 0));
        words[1] = narrow_to_pairs(at(even, kWidth), at(odd, kWidth));
    } else {
        constexpr auto low = [](int l) { return (l & 1) * int(kGroup) + (l & ~7) + l % 8 / 2; };
        constexpr auto high = [](int l) { return (l & 1) * int(kGroup) + (l & ~7) + l % 8 / 2 + 4; };
        Halves a, b;
        std::memcpy(&a, even + d * 2, sizeof a);
        std::memcpy(&b, odd + d * 2, sizeof b);
        words[0] = mix(a, b, low, kHalves), words[1] = mix(a, b, high, kHalves);
    }
}

// A group's sums as `interleave` has left them, to the order of elements.
template <typename Kv>
inline void in_order(Vec low, Vec high, Vec (&ordered)[2]) {
    constexpr auto first = [](int l) { return (l & 4) / 4 * int(kWidth) + l / 8 * 4 + (l & 3); };
    constexpr auto second = [](int l) { return (l & 4) / 4 * int(kWidth) + l / 8 * 4 + (l & 3) + int(kWidth) / 2; };
    if constexpr (sizeof(Kv) == 1)
        ordered[0] = low, ordered[1] = high;
    else
        ordered[0] = pick(low, high, first), ordered[1] = pick(low, high, second);
}

// out[r] += sum of pairs of weights times pairs of values, over Strips groups of elements; `words(p, strip, words)` gives
// pair p of a strip.
template <int Rows, int Strips, typename Words>
inline void add_pair_strips(const bf16* weights, int64_t num_pairs, int64_t dim, const Words& words, float* out) {
    Vec sums[Rows][2 * Strips];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * Strips; ++v) sums[r][v] = load(out + r * dim + v * kWidth);
    for (int64_t p = 0; p < num_pairs; ++p) {
        IntVec values[Strips][2];
#pragma GCC unroll 2
        for (int s = 0; s < Strips; ++s) words(p, s, values[s]);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const IntVec weight = splat_word(weights + r * 2 * kPartition + 2 * p);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * Strips; ++v) sums[r][v] = add_pairs(sums[r][v], weight, values[v / 2][v % 2]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * Strips; ++v) store(out + r * dim + v * kWidth, sums[r][v]);
}

template <int Rows, typename Words>
inline void add_pairs_of_values(const bf16* weights, int64_t num_pairs, int64_t dim, const Words& words, float* out) {
    int64_t d = 0;
    for (; d + 2 * kGroup <= dim; d += 2 * kGroup)
        add_pair_strips<Rows, 2>(
            weights, num_pairs, dim, [&](int64_t p, int s, IntVec(&pair)[2]) { words(p, d + s * kGroup, pair); }, out + d);
    if (d < dim)
        add_pair_strips<Rows, 1>(
            weights, num_pairs, dim, [&](int64_t p, int, IntVec(&pair)[2]) { words(p, d, pair); }, out + d);
}

// Values read where they lie.
template <typename Kv, int Rows>
BATON_NOINLINE void add_value_pairs_in_place(const bf16* weights, const char* const* values, int64_t num_pairs,
                                             int64_t dim, float* out) {
    add_pairs_of_values<Rows>(
        weights, num_pairs, dim,
        [&](int64_t p, int64_t d, IntVec(&pair)[2]) { interleave<Kv>(values[2 * p], values[2 * p + 1], d, pair); },
        out);
}

// Two values to their lines in each strip; strips are `strip` bytes apart.
template <typename Kv>
inline void pack_pair(const char* even, const char* odd, int64_t dim, int64_t strip, char* line) {
    for (int64_t d = 0; d < dim; d += kGroup, line += strip) {
        IntVec words[2];
        interleave<Kv>(even, odd, d, words);
        std::memcpy(line, words, sizeof words);
    }
}

template <int Rows>
BATON_NOINLINE void add_value_pairs(const bf16* weights, const char* panel, int64_t strip, int64_t num_pairs, int64_t dim,
                                    float* out) {
    add_pairs_of_values<Rows>(
        weights, num_pairs, dim,
        [&](int64_t p, int64_t d, IntVec(&pair)[2]) {
            std::memcpy(pair, panel + d / kGroup * strip + p * int64_t(sizeof pair), sizeof pair);
        },
        out);
}

}  // namespace baton
