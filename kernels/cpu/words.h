// Vectors of 32-bit words that hold several small numbers each, and sums of products: of bf16 pairs, of four bytes.
//
// `add_pairs` adds two products to each lane of fp32 sums by the one instruction that does so (`vdpbf16ps`, AVX-512 BF16):
// lanes of x and w hold a pair each. The odd value's product is added first, then the even one's, each rounded once;
// subnormals count as zero.
//
// Where the compiler's target lacks the instruction, `kHasDot` is false and nobody may add pairs.
//
// `add_quads` adds four products of bytes, the first one's unsigned, to each lane of int32 sums, `add_shorts` two of int16:
// exact everywhere, fast where there are instructions (`vpdpbusd`, `vpdpwssd`, AVX-512 VNNI; whoever has pairs has them).
#pragma once

#include "simd.h"

#if defined(BATON_DOT_EMULATED) || (defined(BATON_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VNNI__))
#define BATON_DOT
#endif

namespace baton {

#if defined(BATON_DOT)
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif

#if defined(BATON_DOT_EMULATED)
inline Vec add_pairs(Vec sum, IntVec x, IntVec w) {
    const auto flushed = [](Vec value) {
        return Vec((UintVec(value) & 0x7f800000) == 0 ? UintVec(value) & 0x80000000 : UintVec(value));
    };
    const auto high = [&](IntVec words) { return flushed(Vec(UintVec(words) & 0xffff0000)); };
    const auto low = [&](IntVec words) { return flushed(Vec(UintVec(words) << 16)); };
    sum = flushed(flushed(sum) + high(x) * high(w));  // products of bf16 are exact in fp32, but at its ends
    return flushed(sum + low(x) * low(w));
}
#elif defined(BATON_DOT)
// Asked for as in `accumulate`: the sum stays in its register.
inline Vec add_pairs(Vec sum, IntVec x, IntVec w) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
}
#else
Vec add_pairs(Vec sum, IntVec x, IntVec w);  // never called
#endif

#if defined(BATON_AVX512) && defined(__AVX512VNNI__)
inline IntVec add_quads(IntVec sum, IntVec x, IntVec w) {
    return IntVec(_mm512_dpbusd_epi32(__m512i(sum), __m512i(x), __m512i(w)));
}
inline IntVec add_shorts(IntVec sum, IntVec x, IntVec w) {
    return IntVec(_mm512_dpwssd_epi32(__m512i(sum), __m512i(x), __m512i(w)));
}
#else
inline IntVec add_quads(IntVec sum, IntVec x, IntVec w) {
    for (int shift = 0; shift < 32; shift += 8)
        sum += IntVec((UintVec(x) >> shift) & 255) * (IntVec(UintVec(w) << (24 - shift)) >> 24);
    return sum;
}
inline IntVec add_shorts(IntVec sum, IntVec x, IntVec w) {
    const auto low = [](IntVec words) { return IntVec(UintVec(words) << 16) >> 16; };
    return sum + low(x) * low(w) + (x >> 16) * (w >> 16);
}
#endif

inline IntVec load_words(const void* source) {
    IntVec result;
    std::memcpy(&result, source, sizeof result);
    return result;
}

// One word in every lane.
inline IntVec splat_word(const void* source) {
    int32_t word;
    std::memcpy(&word, source, sizeof word);
    return word - IntVec{};
}

}  // namespace baton
