// Rows times an int8 weight: the integer product (`Int8Rows`, both sides int8) and the widened one (rows fp32).
//
// A packed weight is, after its `PackedHeader`: scales fp32 [N'], column sums int32 [N'], and panels
// [N' / kInt8Panel][ceil(K / 4)][kInt8Panel][4] of int8, N' = N rounded up to panels: four values of k of one column
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

#include "gemm.h"

namespace baton {

constexpr int64_t kInt8Panel = 2 * kWidth;
constexpr int64_t kInt8RowTile = kRowTile;
constexpr int64_t kInt8TileColumns = 4 * kInt8Panel;
constexpr int64_t kInt8SlackBytes = 2048;  // after the last panel, for tiles that are read past its end
constexpr int64_t kInt8RowBlockBytes = 256 * 1024;  // bytes of rows that stay in L2 while panels pass

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
          sums(reinterpret_cast<const int32_t*>(scales + num_panels() * kInt8Panel)),
          panels(reinterpret_cast<const int8_t*>(sums + num_panels() * kInt8Panel)) {}

    // Results from the sums of columns n to n + kWidth - 1.
    Vec scaled(const int32_t* column_sums, int64_t n, float x_scale) const {
        IntVec offset, sum;
        std::memcpy(&offset, sums + n, sizeof offset);
        std::memcpy(&sum, column_sums, sizeof sum);
        return __builtin_convertvector(sum - offset * 128, Vec) * (splat(x_scale) * load(scales + n));
    }

    int64_t num_panels() const { return ceil_div(out_features, kInt8Panel); }
    int64_t panel_bytes() const { return num_quads(in_features) * 4 * kInt8Panel; }
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

// num_rows rows (at most kInt8RowTile) against some of `panels_left` panels from `panel` on; returns how many. The
// sums go to sums[row * kInt8TileColumns + column]. Panels are a fixed number of bytes apart.
int64_t int8_tile(int64_t num_rows, int64_t panels_left, const uint8_t* x, int64_t quads, const int8_t* panel,
                  Ahead ahead, int32_t* sums);
int64_t widened_tile(int64_t num_rows, int64_t panels_left, const float* x, int64_t in_features, const int8_t* panel,
                     Ahead ahead, float* sums);

// Panels [begin, end) of `weight`, `num_rows` rows cut into blocks that stay in cache and tiles of about equal
// height. multiply(first row, number of rows, panel, panels left, ahead) computes a tile and returns its panels;
// finish(first row, number of rows, panel, panels) writes it.
template <typename Multiply, typename Finish>
void walk_int8(const Int8Weight& weight, int64_t num_rows, int64_t row_bytes, int64_t begin, int64_t end,
               const Multiply& multiply, const Finish& finish) {
    const int64_t block = std::max(2 * kInt8RowTile, kInt8RowBlockBytes / std::max<int64_t>(row_bytes, 1));
    const int64_t num_blocks = ceil_div(num_rows, block), panel_bytes = weight.panel_bytes();
    constexpr int64_t line = 4 * kInt8Panel;
    for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t first = num_rows * b / num_blocks, rows = num_rows * (b + 1) / num_blocks - first;
        const int64_t tiles = ceil_div(rows, kInt8RowTile);
        for (int64_t panel = begin; panel < end;) {
            int64_t taken = 0;
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t from = first + rows * t / tiles, count = first + rows * (t + 1) / tiles - from;
                const Ahead ahead = tiles == 1 ? Ahead{kPrefetchBytes, line}
                                               : Ahead{panel_bytes * (tiles + t) / tiles, line / tiles};
                taken = multiply(from, count, panel, tiles == 1 ? end - panel : 1, ahead);
                finish(from, count, panel, taken);
            }
            panel += taken;
        }
    }
}

// Quantized rows x panels [begin, end); `output` as in `gemm`.
template <typename Output>
void gemm_int8(const Int8Rows& x, int64_t num_rows, const Int8Weight& weight, int64_t begin, int64_t end,
               const Output& output) {
    alignas(64) int32_t sums[kInt8RowTile * kInt8TileColumns];
    const int64_t quads = num_quads(weight.in_features);
    walk_int8(
        weight, num_rows, 4 * quads, begin, end,
        [&](int64_t row, int64_t rows, int64_t panel, int64_t panels_left, Ahead ahead) {
            return int8_tile(rows, panels_left, x.values + row * 4 * quads, quads,
                             weight.panels + panel * weight.panel_bytes(), ahead, sums);
        },
        [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
            for (int64_t column = 0; column < panels * kInt8Panel; column += kWidth) {
                const int64_t n = panel * kInt8Panel + column;
                for (int64_t r = 0; r < rows; ++r)
                    output.write(row + r, n,
                                 weight.scaled(sums + r * kInt8TileColumns + column, n, x.scales[row + r]));
            }
        });
}

// fp32 rows [num_rows, in_features] x panels [begin, end).
template <typename Output>
void gemm_widened(const float* x, int64_t num_rows, const Int8Weight& weight, int64_t begin, int64_t end,
                  const Output& output) {
    alignas(64) float sums[kInt8RowTile * kInt8TileColumns];
    walk_int8(
        weight, num_rows, 4 * weight.in_features, begin, end,
        [&](int64_t row, int64_t rows, int64_t panel, int64_t panels_left, Ahead ahead) {
            return widened_tile(rows, panels_left, x + row * weight.in_features, weight.in_features,
                                weight.panels + panel * weight.panel_bytes(), ahead, sums);
        },
        [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
            for (int64_t column = 0; column < panels * kInt8Panel; column += kWidth) {
                const int64_t n = panel * kInt8Panel + column;
                const Vec scale = load(weight.scales + n);
                for (int64_t r = 0; r < rows; ++r)
                    output.write(row + r, n, load(sums + r * kInt8TileColumns + column) * scale);
            }
        });
}

// `baton_packed_bytes`, `baton_linear` of the int8 kinds.
int64_t int8_packed_bytes(int64_t out_features, int64_t in_features);
void int8_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                 int64_t num_threads);

}  // namespace baton
