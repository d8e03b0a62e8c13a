// One vector type, its width chosen when compiled: 16 floats with AVX-512, 8 with AVX2, 4 elsewhere.
//
// Bits must not depend on which copy of a loop an element went through, so
//  - a fused multiply-add is asked for by name (the build forbids contraction), never left to the compiler;
//  - the end of a row goes through the same vector code as its body, by partial loads and stores;
//  - a horizontal sum adds lanes in one fixed tree.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace baton {

#if defined(__AVX512F__)
constexpr int64_t kWidth = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int64_t kWidth = 8;
#else
constexpr int64_t kWidth = 4;
#endif

constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));

struct bf16 {
    uint16_t bits;
};

inline Vec splat(float value) { return value - Vec{}; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

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
    HalfVec half;
    std::memcpy(&half, source, sizeof half);
    return Vec(__builtin_convertvector(half, UintVec) << 16);
}

// To bf16, nearest even; a NaN stays a (quiet) NaN.
inline HalfVec narrow(Vec value) {
    UintVec bits = UintVec(value);
    UintVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    UintVec is_nan = UintVec(value != value);
    return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), HalfVec);
}

inline void store(float* target, Vec value) { std::memcpy(target, &value, sizeof value); }
inline void store(bf16* target, Vec value) {
    HalfVec half = narrow(value);
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

template <typename T>
inline Vec round_to(Vec value);
template <>
inline Vec round_to<float>(Vec value) { return value; }
template <>
inline Vec round_to<bf16>(Vec value) {
    HalfVec half = narrow(value);
    return Vec(__builtin_convertvector(half, UintVec) << 16);
}

inline float sum_lanes(Vec value) {
    float lanes[kWidth];
    store(lanes, value);
    for (int64_t half = kWidth / 2; half >= 1; half /= 2)
        for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}
inline float max_lanes(Vec value) {
    float lanes[kWidth];
    store(lanes, value);
    float result = lanes[0];
    for (int64_t i = 1; i < kWidth; ++i) result = lanes[i] > result ? lanes[i] : result;
    return result;
}

// e^x by range reduction to |r| <= ln2/2 and a degree-6 polynomial (Cephes); within 2 ulp.
// Below -87.3 the result is exactly 0, above 88.3 infinity; a NaN stays a NaN.
inline Vec exp(Vec x) {
    const Vec smallest = splat(-87.3f), largest = splat(88.3f);
    Vec clamped = max(x, smallest);
    clamped = clamped < largest ? clamped : largest;
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Vec shifted = fma(clamped, splat(1.44269504088896341f), magic);
    Vec n = shifted - magic;
    Vec r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    IntVec exponent = (IntVec(shifted) - IntVec(magic)) << 23;
    Vec result = Vec(IntVec(p) + exponent);
    result = x < smallest ? Vec{} : result;
    result = x > largest ? splat(kInfinity) : result;
    return x != x ? x : result;
}

}  // namespace baton
