// Keys and values on their way from the pool to fp32: in registers for a few query rows, in panels for many.
//
// Rows of the pool are given by their addresses, so blocks of any size look alike; a row that is not there is a row of
// zeros. Keys are turned over in registers, so that a vector holds one element of kWidth keys: as 32-bit words, which
// hold one fp32, two bf16 or four int8 of a key, and only then widened.
//  - a key panel holds groups of kGroup keys; a line of a group is one element of each key;
//  - a value panel holds strips of kGroup elements; a line of a strip belongs to one value.
// An int8 row's scale is not applied to its elements: the tiles multiply scores and weights instead.
#pragma once

#include <algorithm>
#include <utility>

#include "simd.h"

namespace baton {

constexpr int64_t kGroup = 2 * kWidth;

// Elements of a row that are turned over at a time: 16 bytes.
template <typename Kv>
constexpr int64_t kStep = 16 / int64_t(sizeof(Kv));

template <typename Lane, int... Lanes>
inline UintVec pick(UintVec a, UintVec b, Lane, std::integer_sequence<int, Lanes...>) {
    return __builtin_shufflevector(a, b, Lane{}(Lanes)...);
}
// Lane l of the result is lane Lane{}(l) of a, or of b from kWidth on.
template <typename Lane>
inline UintVec pick(UintVec a, UintVec b, Lane lane) {
    return pick(a, b, lane, std::make_integer_sequence<int, int(kWidth)>());
}

// The 16 bytes at `byte` of rows[0], rows[4], ... side by side; put together in registers, not in memory.
inline UintVec load_quarters(const char* const* rows, int64_t byte) {
    typedef uint32_t UintVec4 __attribute__((vector_size(16)));
    UintVec4 part[kWidth / 4];
#pragma GCC unroll 4
    for (int i = 0; i < kWidth / 4; ++i) std::memcpy(&part[i], rows[4 * i] + byte, 16);
#if BATON_WIDTH == 4
    return part[0];
#else
    const auto low = __builtin_shufflevector(part[0], part[1], 0, 1, 2, 3, 4, 5, 6, 7);
#if BATON_WIDTH == 8
    return low;
#else
    const auto high = __builtin_shufflevector(part[2], part[3], 0, 1, 2, 3, 4, 5, 6, 7);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#endif
#endif
}

// words[w][i] = word w of the 16 bytes at `byte` of row i, for kWidth rows.
inline void load_words(const char* const* rows, int64_t byte, UintVec (&words)[4]) {
    constexpr auto low_words = [](int l) { return (l & 1) * int(kWidth) + (l & ~3) + l % 4 / 2; };
    constexpr auto high_words = [](int l) { return (l & 1) * int(kWidth) + (l & ~3) + l % 4 / 2 + 2; };
    constexpr auto low_pairs = [](int l) { return (l & 2) / 2 * int(kWidth) + (l & ~3) + (l & 1); };
    constexpr auto high_pairs = [](int l) { return (l & 2) / 2 * int(kWidth) + (l & ~3) + (l & 1) + 2; };
    UintVec quarters[4];  // rows i, i + 4, ... side by side
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) quarters[i] = load_quarters(rows + i, byte);
    const UintVec ab_low = pick(quarters[0], quarters[1], low_words);
    const UintVec ab_high = pick(quarters[0], quarters[1], high_words);
    const UintVec cd_low = pick(quarters[2], quarters[3], low_words);
    const UintVec cd_high = pick(quarters[2], quarters[3], high_words);
    words[0] = pick(ab_low, cd_low, low_pairs), words[1] = pick(ab_low, cd_low, high_pairs);
    words[2] = pick(ab_high, cd_high, low_pairs), words[3] = pick(ab_high, cd_high, high_pairs);
}

// Element `index` of those a word holds.
template <typename Kv>
inline Vec element(UintVec words, int index) {
    if constexpr (sizeof(Kv) == 4) return Vec(words);
    if constexpr (sizeof(Kv) == 2) return Vec(index == 0 ? words << 16 : words & 0xffff0000);
    if constexpr (sizeof(Kv) == 1) return __builtin_convertvector(IntVec(words << (24 - 8 * index)) >> 24, Vec);
}

// kWidth keys to one half of a group's lines, `dim` of them.
template <typename Kv>
__attribute__((noinline)) void pack_keys(const char* const* rows, int64_t dim, float* lines) {
    constexpr int per_word = 4 / int(sizeof(Kv));
    for (int64_t d = 0; d < dim; d += kStep<Kv>) {
        UintVec words[4];
        load_words(rows, d * int64_t(sizeof(Kv)), words);
#pragma GCC unroll 4
        for (int w = 0; w < 4; ++w)
#pragma GCC unroll 4
            for (int e = 0; e < per_word; ++e)
                store(lines + (d + w * per_word + e) * kGroup, element<Kv>(words[w], e));
    }
}

// A value to its line in each strip; strips are `strip` floats apart.
template <typename Kv>
inline void widen_value(const char* row, int64_t head_dim, int64_t dim, int64_t strip, float* line) {
    const Kv* values = reinterpret_cast<const Kv*>(row);
    for (int64_t d = 0; d < dim; d += kGroup, line += strip) {
        if (d + kGroup <= head_dim) {
            store(line, load(values + d));
            store(line + kWidth, load(values + d + kWidth));
        } else {
            Kv rest[kGroup] = {};
            if (d < head_dim) std::memcpy(rest, values + d, size_t(head_dim - d) * sizeof(Kv));
            store(line, load(rest));
            store(line + kWidth, load(rest + kWidth));
        }
    }
}

}  // namespace baton
