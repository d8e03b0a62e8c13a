// The tiles of `gemm_int8.h`, packing, and products of single calls.
//
// One instruction sums four byte products into a 32-bit lane where the machine has it (AVX-512 VNNI, AVX-VNNI); with
// AVX2 two do (`vpmaddubsw`, `vpmaddwd`), without saturation for packed values; elsewhere shifts do. All are exact.
#include "gemm_int8.h"

#include "word_tile.h"

namespace baton {
namespace {

// sum + the four products of a lane's bytes: x unsigned, w signed.
struct DotBytes {
    using Sums = IntVec;

    static IntVec add(IntVec sum, IntVec x, IntVec w) {
#if defined(BATON_AVX512) && defined(__AVX512BW__) && !defined(__AVX512VNNI__)
        const __m512i pairs = _mm512_maddubs_epi16(__m512i(x), __m512i(w));
        return sum + IntVec(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(BATON_AVX2) && defined(__AVX512VNNI__) && defined(__AVX512VL__)
        return IntVec(_mm256_dpbusd_epi32(__m256i(sum), __m256i(x), __m256i(w)));
#elif defined(BATON_AVX2) && defined(__AVXVNNI__)
        return IntVec(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(x), __m256i(w)));
#elif defined(BATON_AVX2)
        const __m256i pairs = _mm256_maddubs_epi16(__m256i(x), __m256i(w));
        return sum + IntVec(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
        return add_quads(sum, x, w);
#endif
    }
};

// Lanes of 0 to 255 as bytes.
inline void store_bytes(uint8_t* target, UintVec lanes) {
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

// Byte `k % 4` of every lane of a line's two halves, as floats.
template <int Byte>
inline void widen_line(const int8_t* line, Vec& low, Vec& high) {
    const auto widened = [](IntVec quads) {
        return __builtin_convertvector(IntVec(UintVec(quads) << (24 - 8 * Byte)) >> 24, Vec);
    };
    low = widened(load_words(reinterpret_cast<const char*>(line)));
    high = widened(load_words(reinterpret_cast<const char*>(line + 4 * kWidth)));
}

template <int Rows, int Panels, int Byte>
inline void widened_step(const float* x, int64_t in_features, const int8_t* line, int64_t panel_bytes,
                         Vec (&sums)[Rows][2 * Panels]) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
        Vec low, high;
        widen_line<Byte>(line + p * panel_bytes, low, high);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const Vec value = splat(x[r * in_features]);
            sums[r][2 * p] = fma(value, low, sums[r][2 * p]);
            sums[r][2 * p + 1] = fma(value, high, sums[r][2 * p + 1]);
        }
    }
}

template <int Rows, int Panels>
int64_t widened_sums(const float* x, int64_t in_features, const int8_t* panel, Ahead ahead, float* out) {
    const int64_t whole = in_features / 4, rest = in_features % 4, line = 4 * kWordPanel;
    const int64_t panel_bytes = num_quads(in_features) * line;
    Vec sums[Rows][2 * Panels];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * Panels; ++v) sums[r][v] = Vec{};
    const char* next = reinterpret_cast<const char*>(panel) + ahead.offset;
    for (int64_t k = 0; k < whole; ++k, next += ahead.step, panel += line, x += 4) {
        if (Rows >= kRideRows) ahead.ride.ask(k);
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p) prefetch(next + p * panel_bytes);
        widened_step<Rows, Panels, 0>(x, in_features, panel, panel_bytes, sums);
        widened_step<Rows, Panels, 1>(x + 1, in_features, panel, panel_bytes, sums);
        widened_step<Rows, Panels, 2>(x + 2, in_features, panel, panel_bytes, sums);
        widened_step<Rows, Panels, 3>(x + 3, in_features, panel, panel_bytes, sums);
    }
    if (rest > 0) widened_step<Rows, Panels, 0>(x, in_features, panel, panel_bytes, sums);
    if (rest > 1) widened_step<Rows, Panels, 1>(x + 1, in_features, panel, panel_bytes, sums);
    if (rest > 2) widened_step<Rows, Panels, 2>(x + 2, in_features, panel, panel_bytes, sums);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * Panels; ++v) store(out + r * kWordTileColumns + v * kWidth, sums[r][v]);
    return Panels;
}

}  // namespace

int64_t int8_tile(int64_t num_rows, int64_t panels_left, const uint8_t* x, int64_t quads, const int8_t* panel,
                  Ahead ahead, int32_t* sums) {
    return with_rows(num_rows, panels_left, [&]<int Rows, int Panels>() {
        return word_sums<DotBytes, Rows, Panels>(reinterpret_cast<const char*>(x), quads,
                                               reinterpret_cast<const char*>(panel), ahead, sums);
    });
}

int64_t widened_tile(int64_t num_rows, int64_t panels_left, const float* x, int64_t in_features, const int8_t* panel,
                     Ahead ahead, float* sums) {
    return with_rows(num_rows, panels_left, [&]<int Rows, int Panels>() {
        return widened_sums<Rows, Panels>(x, in_features, panel, ahead, sums);
    });
}

void quantize_row(const float* x, int64_t in_features, int64_t m, const Int8Rows& rows) {
    IntVec largest_bits = {};  // magnitudes order as their bits do, a NaN above all
    for (int64_t i = 0; i < in_features; i += kWidth) {
        const IntVec bits = IntVec(load_partial(x + i, in_features - i)) & 0x7fffffff;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    int32_t bits = 0;
    for (int64_t lane = 0; lane < kWidth; ++lane) bits = std::max(bits, largest_bits[lane]);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool is_finite = bits < 0x7f800000, is_zero = largest < 1e-30f;
    rows.scales[m] = is_finite ? (is_zero ? 0.0f : largest / 127.0f) : std::numeric_limits<float>::quiet_NaN();
    uint8_t* values = rows.values + m * 4 * num_quads(in_features);
    if (!is_finite || is_zero) {
        std::memset(values, 128, size_t(4 * num_quads(in_features)));
        return;
    }
    const Vec inverse = splat(127.0f / largest);
    // adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits
    const Vec magic = splat(kMagic);
    const auto quantized = [&](Vec value) { return UintVec(value * inverse + magic) + (128 - 0x4b400000u); };
    int64_t i = 0;
    for (; i + kWidth <= in_features; i += kWidth) store_bytes(values + i, quantized(load(x + i)));
    if (i < in_features) {
        uint8_t last[kWidth];
        store_bytes(last, quantized(load_partial(x + i, in_features - i)));
        std::memcpy(values + i, last, size_t(in_features - i));
    }
    for (i = in_features; i < 4 * num_quads(in_features); ++i) values[i] = 128;
}

int64_t int8_packed_bytes(int64_t out_features, int64_t in_features) {
    const int64_t columns = ceil_div(out_features, kWordPanel) * kWordPanel;
    return int64_t(sizeof(PackedHeader)) + columns * (8 + 4 * num_quads(in_features)) + kWordSlackBytes;
}

namespace {

template <typename Y>
void linear(const float* x, int64_t num_rows, const void* packed, const float* bias, Y* y, int64_t num_threads) {
    static thread_local Scratch scratch;
    const Int8Weight weight(packed);
    const Store<Y> output{y, bias, weight.out_features};
    const bool quantizes = header_of(packed).kind == WeightKind::kInt8;
    const Int8Rows rows(scratch.floats(quantizes ? Int8Rows::floats(num_rows, weight.in_features) : 0), num_rows);
    if (quantizes)
        parallel_ranges(num_threads, num_rows, 8, [&](int64_t begin, int64_t end) {
            for (int64_t m = begin; m < end; ++m) quantize_row(x + m * weight.in_features, weight.in_features, m, rows);
        });
    parallel_ranges(num_threads, weight.num_panels(), 2, [&](int64_t begin, int64_t end) {
        if (quantizes)
            gemm_int8(rows, num_rows, weight, begin, end, output);
        else
            gemm_widened(x, num_rows, weight, begin, end, output);
    });
}

}  // namespace

void int8_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                 int64_t num_threads) {
    if (y_bf16)
        linear(x, num_rows, packed, bias, static_cast<bf16*>(y), num_threads);
    else
        linear(x, num_rows, packed, bias, static_cast<float*>(y), num_threads);
}

}  // namespace baton

using namespace baton;

extern "C" {

int64_t baton_int8_panel_width() { return kWordPanel; }

int64_t baton_int8_packed_bytes(int64_t out_features, int64_t in_features) {
    return int8_packed_bytes(out_features, in_features);
}

// values [out, in] int8 and scales [out] fp32 as one packed weight; `kind` is a WeightKind.
void baton_int8_pack(int64_t kind, const int8_t* values, const float* scales, int64_t out_features, int64_t in_features,
                     void* packed) {
    std::memset(packed, 0, size_t(int8_packed_bytes(out_features, in_features)));
    const PackedHeader header{kPackedMagic, out_features, in_features, 1, kWordPanel, WeightKind(kind), {}};
    std::memcpy(packed, &header, sizeof header);
    const Int8Weight weight(packed);
    std::memcpy(const_cast<float*>(weight.scales), scales, size_t(out_features) * sizeof(float));
    int32_t* sums = const_cast<int32_t*>(weight.sums);
    int8_t* panels = const_cast<int8_t*>(weight.panels);
    for (int64_t n = 0; n < out_features; ++n) {
        int8_t* panel = panels + n / kWordPanel * weight.panel_bytes() + n % kWordPanel * 4;
        for (int64_t k = 0; k < in_features; ++k) {
            const int8_t value = values[n * in_features + k];
            sums[n] += value;
            panel[k / 4 * 4 * kWordPanel + k % 4] = value;
        }
    }
}
}
