// One vector type, its width chosen when compiled: 16 floats with AVX-512, 8 with AVX2, 4 elsewhere. Where the
// machine's own instructions do not fit the width (`-DBATON_WIDTH=16` on any machine), GCC's vectors do the same.
//
// Bits must not depend on which copy of a loop an element went through, so
//  - a fused multiply-add is asked for by name (the build forbids contraction), never left to the compiler;
//  - the end of a row goes through the same vector code as its body, by partial loads and stores;
//  - a horizontal sum adds lanes in one fixed tree.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#ifndef BATON_WIDTH
#if defined(__AVX512F__)
#define BATON_WIDTH 16
#elif defined(__AVX2__) && defined(__FMA__)
#define BATON_WIDTH 8
#else
#define BATON_WIDTH 4
#endif
#endif

#if defined(__AVX512F__) && BATON_WIDTH == 16
#define BATON_AVX512
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && BATON_WIDTH == 8
#define BATON_AVX2
#include <immintrin.h>
#endif

namespace baton {

constexpr int64_t kWidth = BATON_WIDTH;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));

struct bf16 {
    uint16_t bits;
};

inline Vec splat(float value) { return value - Vec{}; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(BATON_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(BATON_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// As fma, for loops that hold a tile of sums: the sum stays in its register. Left to itself, the compiler moves and
// spills registers between unrolled steps.
inline Vec accumulate(Vec sum, Vec a, Vec b) {
#if defined(BATON_AVX512)
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#elif defined(BATON_AVX2)
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    return fma(a, b, sum);
#endif
}

// a > b ? a : b, in one instruction.
inline Vec max(Vec a, Vec b) {
#if defined(BATON_AVX512)
    return _mm512_max_ps(a, b);
#elif defined(BATON_AVX2)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

// Asked for by an instruction: a function that only calls `__builtin_prefetch` is dropped as having no effect.
inline void prefetch(const void* address) {
#if defined(__x86_64__)
    asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(address)));
#else
    __builtin_prefetch(address);
#endif
}

inline void prefetch_l2(const void* address) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(address)));
#else
    __builtin_prefetch(address, 0, 2);
#endif
}

inline float widen(float value) { return value; }
inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline Vec load(const float* source) {
    Vec result;
    std::memcpy(&result, source, sizeof result);
    return result;
}
inline Vec load(const bf16* source) {
#if defined(BATON_AVX512)  // by the masked form: GCC warns of what the other leaves undefined
    __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return Vec(UintVec(_mm512_maskz_cvtepu16_epi32(0xffff, half)) << 16);
#elif defined(BATON_AVX2)
    __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return Vec(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#else
    HalfVec half;
    std::memcpy(&half, source, sizeof half);
    return Vec(__builtin_convertvector(half, UintVec) << 16);
#endif
}

inline Vec load(const int8_t* source) {
#if defined(BATON_AVX512)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
#elif defined(BATON_AVX2)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))));
#else
    typedef int8_t ByteVec __attribute__((vector_size(kWidth)));
    ByteVec bytes;
    std::memcpy(&bytes, source, sizeof bytes);
    return __builtin_convertvector(bytes, Vec);
#endif
}

// To the nearest bf16, ties to even, in the upper halves of the lanes; a NaN stays a (quiet) NaN.
inline UintVec round_bf16(Vec value) {
    UintVec bits = UintVec(value);
    UintVec rounded = bits + 0x7fff + ((bits >> 16) & 1);
    UintVec is_nan = UintVec(value != value);
    return (rounded & ~is_nan) | (is_nan & 0x7fc00000);
}

// Two vectors that lie side by side in memory. bf16 pairs are interleaved by whoever wrote them, the first vector's
// lanes in the low halves of 32-bit words, the second's in the high ones: a shift and a mask take them apart.
inline void load_pair(const float* source, Vec& first, Vec& second) {
    first = load(source);
    second = load(source + kWidth);
}
inline void load_pair(const bf16* source, Vec& first, Vec& second) {
    UintVec words;
    std::memcpy(&words, source, sizeof words);
    first = Vec(words << 16);
    second = Vec(words & 0xffff0000);
}

inline void store(float* target, Vec value) { std::memcpy(target, &value, sizeof value); }
inline void store(bf16* target, Vec value) {
    UintVec high = round_bf16(value) >> 16;
#if defined(BATON_AVX512)
    __m256i half = _mm512_maskz_cvtepi32_epi16(0xffff, __m512i(high));
#elif defined(BATON_AVX2)
    __m256i packed = _mm256_packus_epi32(__m256i(high), __m256i(high));
    __m128i half = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
#else
    HalfVec half = __builtin_convertvector(high, HalfVec);
#endif
    std::memcpy(target, &half, sizeof half);
}

// The first `count` lanes; the others are zero.
template <typename T>
inline Vec load_partial(const T* source, int64_t count) {
    if (count >= kWidth) return load(source);
    T lanes[kWidth] = {};
    std::memcpy(lanes, source, size_t(count) * sizeof(T));
    return load(lanes);
}
template <typename T>
inline void store_partial(T* target, Vec value, int64_t count) {
    if (count >= kWidth) return store(target, value);
    T lanes[kWidth];
    store(lanes, value);
    std::memcpy(target, lanes, size_t(count) * sizeof(T));
}

// Two vectors side by side, or the first `count` lanes of both.
inline void store_two(float* target, Vec low, Vec high) {
    store(target, low);
    store(target + kWidth, high);
}
inline void store_two(bf16* target, Vec low, Vec high) {
#if defined(BATON_AVX512) && defined(__AVX512BF16__) && defined(__AVX512DQ__)
    // The machine's own rounding is `round_bf16` but for subnormals (zeros to it) and NaNs.
    constexpr int odd = 0x01 | 0x20 | 0x80;
    if ((_mm512_fpclass_ps_mask(low, odd) | _mm512_fpclass_ps_mask(high, odd)) == 0) [[likely]] {
        const auto both = _mm512_cvtne2ps_pbh(high, low);
        std::memcpy(target, &both, sizeof both);
        return;
    }
#endif
    store(target, low);
    store(target + kWidth, high);
}
template <typename T>
inline void store_two(T* target, Vec low, Vec high, int64_t count) {
    if (count >= 2 * kWidth) return store_two(target, low, high);
    store_partial(target, low, count);
    if (count > kWidth) store_partial(target + kWidth, high, count - kWidth);
}
template <typename T>
inline void add_two(const T* source, Vec& low, Vec& high) {
    low += load(source);
    high += load(source + kWidth);
}
template <typename T>
inline void add_two(const T* source, int64_t count, Vec& low, Vec& high) {
    if (count >= 2 * kWidth) return add_two(source, low, high);
    low += load_partial(source, count);
    if (count > kWidth) high += load_partial(source + kWidth, count - kWidth);
}

template <typename T>
inline Vec round_to(Vec value);
template <>
inline Vec round_to<float>(Vec value) { return value; }
template <>
inline Vec round_to<bf16>(Vec value) {
    return Vec(round_bf16(value) & 0xffff0000);
}

// Both to T.
template <typename T>
[[gnu::always_inline]] inline void round_two(Vec& low, Vec& high) {
#if defined(BATON_AVX512) && defined(__AVX512BF16__) && defined(__AVX512DQ__)
    if constexpr (sizeof(T) == 2) {
        bf16 both[2 * kWidth];  // in a register
        store_two(both, low, high);
        low = load(both), high = load(both + kWidth);
        return;
    }
#endif
    low = round_to<T>(low), high = round_to<T>(high);
}

// Lane sums all follow one tree: halves of the vector are added until four lanes are left, then (0+2)+(1+3).
typedef float Vec4 __attribute__((vector_size(16)));

template <typename Combine>
inline Vec4 fold(Vec value, [[maybe_unused]] Combine combine) {
#if BATON_WIDTH == 16
    auto low = __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7);
    auto high = __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
    auto half = combine(low, high);
#else
    auto half = value;
#endif
#if BATON_WIDTH >= 8
    return combine(__builtin_shufflevector(half, half, 0, 1, 2, 3), __builtin_shufflevector(half, half, 4, 5, 6, 7));
#else
    return half;
#endif
}

inline Vec4 fold_sum(Vec value) {
    return fold(value, [](auto a, auto b) { return a + b; });
}
inline float sum_lanes(Vec value) {
    Vec4 four = fold_sum(value);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
// The lane sums of four vectors side by side.
inline Vec4 sum_lanes(Vec a, Vec b, Vec c, Vec d) {
    Vec4 fa = fold_sum(a), fb = fold_sum(b), fc = fold_sum(c), fd = fold_sum(d);
    Vec4 ab_low = __builtin_shufflevector(fa, fb, 0, 4, 1, 5), ab_high = __builtin_shufflevector(fa, fb, 2, 6, 3, 7);
    Vec4 cd_low = __builtin_shufflevector(fc, fd, 0, 4, 1, 5), cd_high = __builtin_shufflevector(fc, fd, 2, 6, 3, 7);
    Vec4 ab = ab_low + ab_high, cd = cd_low + cd_high;  // a0+a2, b0+b2, a1+a3, b1+b3
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}
inline float max_lanes(Vec value) {
    Vec4 four = fold(value, [](auto a, auto b) { return a > b ? a : b; });
    float low = four[0] > four[2] ? four[0] : four[2], high = four[1] > four[3] ? four[1] : four[3];
    return low > high ? low : high;
}

// e^x = 2^power * rest, by range reduction to |r| <= ln2/2 and a degree-6 polynomial of e^r (Cephes).
struct ExpParts {
    IntVec power;
    Vec rest;
};
inline ExpParts exp_parts(Vec x) {
    const Vec magic = splat(kMagic);
    const Vec shifted = fma(x, splat(1.44269504088896341f), magic);
    const Vec n = shifted - magic;
    Vec r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    return {IntVec(shifted) - IntVec(magic), fma(p, r * r, r) + 1.0f};
}

// e^x within 2 ulp. Below -87.3 the result is exactly 0, above 88.3 infinity; a NaN stays a NaN.
constexpr float kExpSmallest = -87.3f, kExpLargest = 88.3f;
inline Vec exp(Vec x) {
    const Vec smallest = splat(kExpSmallest), largest = splat(kExpLargest);
    Vec clamped = max(x, smallest);
    clamped = clamped < largest ? clamped : largest;
    const ExpParts parts = exp_parts(clamped);
    Vec result = Vec(IntVec(parts.rest) + (parts.power << 23));
    result = x < smallest ? Vec{} : result;
    result = x > largest ? splat(kInfinity) : result;
    return x != x ? x : result;
}

// The same, sooner where no lane is outside.
[[gnu::always_inline]] inline Vec exp_mostly_inside(Vec x) {
#if defined(BATON_AVX512)
    const __mmask16 above = _mm512_cmp_ps_mask(x, splat(kExpSmallest), _CMP_GE_OQ);
    if (_mm512_mask_cmp_ps_mask(above, x, splat(kExpLargest), _CMP_LE_OQ) == 0xffff) [[likely]] {
        const ExpParts parts = exp_parts(x);
        return Vec(IntVec(parts.rest) + (parts.power << 23));
    }
#endif
    return exp(x);
}

}  // namespace baton
