// Rows times an int8 weight: the integer product (`Int8Rows`, both sides int8) and the widened one (rows fp32).
//
// A packed weight is, after its `PackedHeader`: scales fp32 [N'], column sums int32 [N'], and panels
// [N' / kWordPanel][ceil(K / 4)][kWordPanel][4] of int8, N' = N rounded up to panels: four values of k of one column
// share a 32-bit lane, which is what a dot-product instruction (and a matrix unit's tile) reads.
//
// Integer product. A row is x[k] ~ scale_x * q[k] with q in [-127, 127], kept as bytes q + 128; a column is
// w[k] ~ scale_w * p[k]. Sums are exact integers, so they are the same on every path and in every order:
//
//     y[m, n] = float(sum_k (q + 128) * p  -  128 * sum_k p) * (scale_x[m] * scale_w[n])  (+ bias, rounded to Y)
//
// Where the machine multiplies bytes only in pairs with a 16-bit sum (`vpmaddubsw`), the sum cannot saturate: the
// packed values are such that max(p0, 0) + max(p1, 0) <= 128 and the same for their negatives, and 255 * 128 < 2^15
// (`kernels/quantization.py` sees to it).
//
// Widened product. y = (one chain of fused multiply-adds in k order over x[k] * float(p[k])) * scale_w[n] (+ bias).
#pragma once

#include "gemm_words.h"

namespace baton {

inline int64_t num_quads(int64_t in_features) { return ceil_div(in_features, 4); }

// The parts of a packed int8 weight.
struct Int8Weight {
    int64_t in_features, out_features;
    const float* scales;
    const int32_t* sums;
    const int8_t* panels;

    explicit Int8Weight(const void* packed)
        : in_features(header_of(packed).in_features), out_features(header_of(packed).out_features),
          scales(reinterpret_cast<const float*>(static_cast<const char*>(packed) + sizeof(PackedHeader))),
          sums(reinterpret_cast<const int32_t*>(scales + num_panels() * kWordPanel)),
          panels(reinterpret_cast<const int8_t*>(sums + num_panels() * kWordPanel)) {}

    // Results from the sums of columns n to n + kWidth - 1.
    Vec scaled(const int32_t* column_sums, int64_t n, float x_scale) const {
        IntVec offset, sum;
        std::memcpy(&offset, sums + n, sizeof offset);
        std::memcpy(&sum, column_sums, sizeof sum);
        return __builtin_convertvector(sum - offset * 128, Vec) * (splat(x_scale) * load(scales + n));
    }

    int64_t num_panels() const { return ceil_div(out_features, kWordPanel); }
    int64_t panel_bytes() const { return num_quads(in_features) * 4 * kWordPanel; }
};

// Quantized rows: bytes q + 128, each row filled up to whole quads, and one scale per row.
struct Int8Rows {
    uint8_t* values;  // [rows, 4 * num_quads]
    float* scales;    // [rows]

    // Floats of scratch that `num_rows` rows of at most `in_features` take.
    static int64_t floats(int64_t num_rows, int64_t in_features) {
        return num_rows * (num_quads(in_features) + 1);
    }
    Int8Rows(float* memory, int64_t num_rows) : values(reinterpret_cast<uint8_t*>(memory + num_rows)), scales(memory) {}
};

// Row m of x to row m of `rows`: scale = max |x| / 127, q = x * (127 / max |x|) to the nearest integer, ties to even.
// A row whose largest magnitude is below 1e-30 becomes zeros of scale 0; one with a NaN or an infinity becomes zeros
// of scale NaN, so that all of its results are NaN and no other row's are.
void quantize_row(const float* x, int64_t in_features, int64_t m, const Int8Rows& rows);

// num_rows rows (at most kWordRowTile) against some of `panels_left` panels from `panel` on; returns how many. The
// sums go to sums[row * kWordTileColumns + column]. Panels are a fixed number of bytes apart.
int64_t int8_tile(int64_t num_rows, int64_t panels_left, const uint8_t* x, int64_t quads, const int8_t* panel,
                  Ahead ahead, int32_t* sums);
int64_t widened_tile(int64_t num_rows, int64_t panels_left, const float* x, int64_t in_features, const int8_t* panel,
                     Ahead ahead, float* sums);

// Quantized rows x panels [begin, end); `output` as in `gemm`.
template <typename Output>
void gemm_int8(const Int8Rows& x, int64_t num_rows, const Int8Weight& weight, int64_t begin, int64_t end,
               const Output& output, const KvRide& ride = {}) {
    alignas(64) int32_t sums[kWordRowTile * kWordTileColumns];
    const int64_t quads = num_quads(weight.in_features);
    walk_words(
        quads, num_rows, 4 * quads, begin, end, ride,
        [&](int64_t row, int64_t rows, int64_t panel, int64_t panels_left, Ahead ahead) {
            return int8_tile(rows, panels_left, x.values + row * 4 * quads, quads,
                             weight.panels + panel * weight.panel_bytes(), ahead, sums);
        },
        [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
            for (int64_t column = 0; column < panels * kWordPanel; column += kWidth) {
                const int64_t n = panel * kWordPanel + column;
                for (int64_t r = 0; r < rows; ++r)
                    output.write(row + r, n,
                                 weight.scaled(sums + r * kWordTileColumns + column, n, x.scales[row + r]));
            }
        });
}

// fp32 rows [num_rows, in_features] x panels [begin, end).
template <typename Output>
void gemm_widened(const float* x, int64_t num_rows, const Int8Weight& weight, int64_t begin, int64_t end,
                  const Output& output, const KvRide& ride = {}) {
    alignas(64) float sums[kWordRowTile * kWordTileColumns];
    walk_words(
        num_quads(weight.in_features), num_rows, 4 * weight.in_features, begin, end, ride,
        [&](int64_t row, int64_t rows, int64_t panel, int64_t panels_left, Ahead ahead) {
            return widened_tile(rows, panels_left, x + row * weight.in_features, weight.in_features,
                                weight.panels + panel * weight.panel_bytes(), ahead, sums);
        },
        [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
            for (int64_t column = 0; column < panels * kWordPanel; column += kWidth) {
                const int64_t n = panel * kWordPanel + column;
                const Vec scale = load(weight.scales + n);
                for (int64_t r = 0; r < rows; ++r)
                    output.write(row + r, n, load(sums + r * kWordTileColumns + column) * scale);
            }
        });
}

// `baton_packed_bytes`, `baton_linear` of the int8 kinds.
int64_t int8_packed_bytes(int64_t out_features, int64_t in_features);
void int8_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                 int64_t num_threads);

}  // namespace baton
