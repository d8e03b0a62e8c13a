// What attention by dot-product instructions (`attention_pairs.h`, `attention_bytes.h`) does with rows of the pool.
//
// Keys meet queries as quarters: 16 bytes of kWidth / 4 keys side by side, four such vectors for kWidth keys. No key is
// turned over: a score is four chains over the row, one per word of the quarters, added in one fixed tree. A panel of keys
// is, per kWidth keys, [row bytes / 16][4 quarters].
// Values are interleaved, two or four rows at a time, so that a word has one element of each.
#pragma once

#include <utility>

#include "attention_panels.h"
#include "words.h"

namespace baton {

static_assert(!kHasDot || kWidth >= 8);
constexpr int64_t kQuarterBytes = 16;

template <typename V>
inline V pick_as(V a, V b, auto lane) {
    return V(pick(UintVec(a), UintVec(b), lane));
}

// The 16 bytes at `source` in every quarter.
inline IntVec splat_quarter(const void* source) {
#if defined(BATON_AVX512)  // asked for by name: the compiler goes through memory
    return IntVec(_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(source))));
#else
    IntVec result;
    for (int64_t i = 0; i < kWidth / 4; ++i) std::memcpy(reinterpret_cast<char*>(&result) + 16 * i, source, 16);
    return result;
#endif
}

// Four vectors of word chains, keys i, i + 4, ... in vector i, to one score per key in the order of keys.
template <typename V>
inline V add_chains(const V (&sums)[4]) {
    constexpr auto low = [](int l) { return (l & 1) * int(kWidth) + (l & ~3) + l % 4 / 2; };
    constexpr auto high = [](int l) { return (l & 1) * int(kWidth) + (l & ~3) + l % 4 / 2 + 2; };
    constexpr auto first = [](int l) { return (l & 2) / 2 * int(kWidth) + (l & ~3) + (l & 1); };
    constexpr auto second = [](int l) { return (l & 2) / 2 * int(kWidth) + (l & ~3) + (l & 1) + 2; };
    const V ab = pick_as(sums[0], sums[1], low) + pick_as(sums[0], sums[1], high);  // chains 0+2 and 1+3 of each key
    const V cd = pick_as(sums[2], sums[3], low) + pick_as(sums[2], sums[3], high);
    return pick_as(ab, cd, first) + pick_as(ab, cd, second);
}

// `num_bytes` of kWidth keys to their place in a panel.
inline void pack_quarters(const char* const* keys, int64_t num_bytes, char* panel) {
    for (int64_t byte = 0; byte < num_bytes; byte += kQuarterBytes)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, panel += sizeof(UintVec)) {
            const UintVec some = load_quarters(keys + i, byte);
            std::memcpy(panel, &some, sizeof some);
        }
}

typedef uint8_t Bytes __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 4)));

// kGroup elements as 16 bits each.
template <typename Kv>
inline Halves halves(const char* source) {
    if constexpr (sizeof(Kv) == 1) {
        typedef int8_t Narrow __attribute__((vector_size(kWidth * 2)));
        Narrow some;
        std::memcpy(&some, source, sizeof some);
#if defined(BATON_AVX512)
        return Halves(_mm512_cvtepi8_epi16(__m256i(some)));
#else
        typedef int16_t Shorts __attribute__((vector_size(kWidth * 4)));
        return Halves(__builtin_convertvector(some, Shorts));
#endif
    } else {
        Halves some;
        std::memcpy(&some, source, sizeof some);
        return some;
    }
}

// Lane l of the result is lane Lane{}(l) of a, or of b after a's last.
template <typename V, typename Lane, int... Lanes>
inline V mix(V a, V b, Lane, std::integer_sequence<int, Lanes...>) {
    return __builtin_shufflevector(a, b, Lane{}(Lanes)...);
}
// Lanes of a and b in turn, of the first half of each 16 bytes ...
template <typename V>
inline V mix_low(V a, V b) {
    constexpr int count = int(sizeof(V) / sizeof(a[0])), per_quarter = count * 16 / int(sizeof(V));
    constexpr auto lane = [](int l) { return (l & 1) * count + l / per_quarter * per_quarter + l % per_quarter / 2; };
    return mix(a, b, lane, std::make_integer_sequence<int, count>());
}
// ... or of the second.
template <typename V>
inline V mix_high(V a, V b) {
    constexpr int count = int(sizeof(V) / sizeof(a[0])), per_quarter = count * 16 / int(sizeof(V));
    constexpr auto lane = [](int l) {
        return (l & 1) * count + l / per_quarter * per_quarter + l % per_quarter / 2 + per_quarter / 2;
    };
    return mix(a, b, lane, std::make_integer_sequence<int, count>());
}

}  // namespace baton
