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

// Byte `k % 4` of every lane of a line's two halves, as floats.
template <int Byte>
inline void widen_line(const int8_t* line, Vec& low, Vec& high) {
    const auto widened = [](IntVec quads) {
        return __builtin_convertvector(IntVec(UintVec(quads) << (24 - 8 * Byte)) >> 24, Vec);
    };
    low = widened(load_words(reinterpret_cast<const char*>(line)));
    high = widened(load_words(reinterpret_cast<const char*>(line + 4 * kWidth)));
}

template <int Rows, int Byte>
inline void widened_step(const float* x, int64_t in_features, const int8_t* line, Vec (&sums)[Rows][2]) {
    Vec low, high;
    widen_line<Byte>(line, low, high);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        const Vec value = splat(x[r * in_features]);
        sums[r][0] = fma(value, low, sums[r][0]);
        sums[r][1] = fma(value, high, sums[r][1]);
    }
}

template <int Rows>
void widened_sums(const float* x, int64_t in_features, const int8_t* panel, Ahead ahead, float* out) {
    const int64_t whole = in_features / 4, rest = in_features % 4, line = 4 * kWordPanel;
    Vec sums[Rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = Vec{};
    const char* next = ahead.from;
    const bool whole_lines = line > 64 && ahead.step > 64;
    for (int64_t k = 0; k < whole; ++k, next += ahead.step, panel += line, x += 4) {
        if (Rows >= kRideRows) ahead.ride.ask(k);
        prefetch(next);
        if (whole_lines) prefetch(next + 64);
        widened_step<Rows, 0>(x, in_features, panel, sums);
        widened_step<Rows, 1>(x + 1, in_features, panel, sums);
        widened_step<Rows, 2>(x + 2, in_features, panel, sums);
        widened_step<Rows, 3>(x + 3, in_features, panel, sums);
    }
    if (rest > 0) widened_step<Rows, 0>(x, in_features, panel, sums);
    if (rest > 1) widened_step<Rows, 1>(x + 1, in_features, panel, sums);
    if (rest > 2) widened_step<Rows, 2>(x + 2, in_features, panel, sums);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) store_two(out + r * kWordPanel, sums[r][0], sums[r][1]);
}

}  // namespace

void int8_tile(int64_t num_rows, const char* x, int64_t stride, int64_t quads, const int8_t* panel, Ahead ahead,
               int32_t* sums) {
    with_rows(num_rows, [&]<int Rows>() {
        word_sums<DotBytes, Rows>(x, stride, quads, reinterpret_cast<const char*>(panel), ahead, sums);
    });
}

void widened_tile(int64_t num_rows, const float* x, int64_t in_features, const int8_t* panel, Ahead ahead, float* sums) {
    with_rows(num_rows, [&]<int Rows>() { widened_sums<Rows>(x, in_features, panel, ahead, sums); });
}

int64_t int8_packed_bytes(int64_t out_features, int64_t in_features) {
    const int64_t columns = ceil_div(out_features, kWordPanel) * kWordPanel;
    return int64_t(sizeof(PackedHeader)) + columns * (8 + 4 * num_quads(in_features)) + kWordSlackBytes;
}

namespace {

template <typename Y>
void linear(const float* x, int64_t num_rows, const void* packed, const float* bias, Y* y, int64_t num_threads) {
    static thread_local Scratch bytes, scales;
    const Int8Weight weight(packed);
    const Store<Y> output{y, bias, weight.out_features};
    const bool quantizes = header_of(packed).kind == WeightKind::kInt8;
    Int8Rows rows;
    if (quantizes) {
        rows = {LineRows::in(bytes, word_cut(num_rows), weight.in_features), scales.floats(num_rows)};
        parallel_ranges(num_threads, num_rows, 8, [&](int64_t begin, int64_t end) {
            for (int64_t m = begin; m < end; ++m) rows.quantize(x + m * weight.in_features, weight.in_features, m);
        });
    }
    parallel_ranges(num_threads, weight.num_panels(), 2, [&](int64_t begin, int64_t end) {
        if (quantizes)
            gemm_int8(rows, weight, begin, end, output);
        else
            gemm_widened(x, num_rows, weight, begin, end, output);
    });
}

}  // namespace

void int8_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                 int64_t num_threads) {
    with_type(y, y_bf16, [&](auto* out) { linear(x, num_rows, packed, bias, out, num_threads); });
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
    const PackedHeader header{kPackedMagic, out_features, in_features, 1, kWordPanel, WeightKind(kind), 0, 0};
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
