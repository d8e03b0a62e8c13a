// Rows into the lines of `line_rows.h`.
#include "line_rows.h"

#include <atomic>

namespace baton {
namespace {

// Lanes of 0 to 255 as bytes.
inline void store_bytes(char* target, UintVec lanes) {
#if defined(BATON_AVX512)
    const __m128i bytes = _mm512_cvtepi32_epi8(__m512i(lanes));
#elif defined(BATON_AVX2)
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(__m256i(lanes), __m256i(lanes)), 0b1000);
    const __m128i twice = _mm256_castsi256_si128(words);
    const int64_t bytes = _mm_cvtsi128_si64(_mm_packus_epi16(twice, twice));
#else
    typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
    const Bytes bytes = __builtin_convertvector(lanes, Bytes);
#endif
    static_assert(sizeof bytes == kWidth);
    std::memcpy(target, &bytes, sizeof bytes);
}

// The bits of the largest magnitude: they order as magnitudes do, a NaN above all.
int32_t largest_bits(const float* x, int64_t size) {
    IntVec lanes = {};
    for (int64_t i = 0; i < size; i += kWidth) {
        const IntVec bits = IntVec(load_partial(x + i, size - i)) & 0x7fffffff;
        lanes = bits > lanes ? bits : lanes;
    }
    int32_t largest = 0;
    for (int64_t lane = 0; lane < kWidth; ++lane) largest = std::max(largest, lanes[lane]);
    return largest;
}

}  // namespace

int64_t new_serials(int64_t count) {
    static std::atomic<int64_t> next{1};
    return next.fetch_add(count, std::memory_order_relaxed);
}

void narrow_row(const float* x, int64_t in_features, int64_t m, const LineRows& rows) {
    constexpr int64_t count = kLineBytes / 2;
    char* line = rows.row(m);
    int64_t k = 0;
    for (; k + count <= in_features; k += count, line += rows.stride())
        for (int64_t i = 0; i < count; i += 2 * kWidth)
            store_two(reinterpret_cast<bf16*>(line) + i, load(x + k + i), load(x + k + i + kWidth));
    if (k == in_features) return;
    std::memset(line, 0, kLineBytes);
    for (bf16* end = reinterpret_cast<bf16*>(line); k < in_features; k += kWidth, end += kWidth)
        store_partial(end, load_partial(x + k, in_features - k), in_features - k);
}

float quantize_row(const float* x, int64_t in_features, int64_t m, const LineRows& rows) {
    const int32_t bits = largest_bits(x, in_features);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool is_finite = bits < 0x7f800000, is_zero = largest < 1e-30f;
    const Vec inverse = splat(is_finite && !is_zero ? 127.0f / largest : 0.0f);
    // adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits
    const auto quantized = [&](Vec value) {
        const UintVec q = UintVec(value * inverse + splat(kMagic)) + (128 - 0x4b400000u);
        return is_finite ? q : UintVec{} + 128;
    };
    char* line = rows.row(m);
    int64_t k = 0;
    for (; k + kLineBytes <= in_features; k += kLineBytes, line += rows.stride())
        for (int64_t i = 0; i < kLineBytes; i += kWidth) store_bytes(line + i, quantized(load(x + k + i)));
    if (k < in_features) {
        char last[kLineBytes];
        for (int64_t i = 0; k + i < in_features; i += kWidth)
            store_bytes(last + i, quantized(load_partial(x + k + i, in_features - k - i)));
        std::memset(line, 0, kLineBytes);
        std::memcpy(line, last, size_t(in_features - k));
    }
    if (!is_finite) return std::numeric_limits<float>::quiet_NaN();
    return is_zero ? 0.0f : largest / 127.0f;
}

}  // namespace baton
