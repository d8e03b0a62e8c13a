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
#include "words.h"

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

    int64_t num_panels() const { return ceil_div(out_features, kWordPanel); }
    PanelStream stream() const { return {reinterpret_cast<const char*>(panels), num_quads(in_features)}; }
    int64_t panel_bytes() const { return stream().panel_bytes(); }
};

// Results from the sums of a panel's columns, from n on.
class Int8Columns {
public:
    Int8Columns(const Int8Weight& weight, int64_t n)
        : low_offset_(load_words(weight.sums + n) * 128), high_offset_(load_words(weight.sums + n + kWidth) * 128),
          low_scale_(load(weight.scales + n)), high_scale_(load(weight.scales + n + kWidth)) {}

    Vec low(const int32_t* sums, float x_scale) const { return scaled(sums, low_offset_, low_scale_, x_scale); }
    Vec high(const int32_t* sums, float x_scale) const { return scaled(sums + kWidth, high_offset_, high_scale_, x_scale); }

private:
    static Vec scaled(const int32_t* sums, IntVec offset, Vec scale, float x_scale) {
        return __builtin_convertvector(load_words(sums) - offset, Vec) * (splat(x_scale) * scale);
    }

    const IntVec low_offset_, high_offset_;
    const Vec low_scale_, high_scale_;
};

// Quantized rows: their bytes and a scale each.
struct Int8Rows {
    LineRows lines;
    float* scales = nullptr;

    void quantize(const float* x, int64_t in_features, int64_t m) const {
        scales[m] = quantize_row(x, in_features, m, lines);
    }
};

// num_rows rows (at most kWordRowTile) against a panel: sums[row * kWordPanel + column]. `x` of `int8_tile` as
// `LineRows::tile`, of `widened_tile` rows of fp32.
void int8_tile(int64_t num_rows, const char* x, int64_t stride, int64_t quads, const int8_t* panel, Ahead ahead,
               int32_t* sums);
void widened_tile(int64_t num_rows, const float* x, int64_t in_features, const int8_t* panel, Ahead ahead, float* sums);

// Quantized rows x panels [begin, end); `output` as in `gemm`.
template <typename Output>
void gemm_int8(const Int8Rows& x, const Int8Weight& weight, int64_t begin, int64_t end, const Output& output,
               const KvRide& ride = {}) {
    alignas(64) int32_t sums[kWordRowTile * kWordPanel];
    const RowCut& cut = x.lines.cut;
    const int64_t quads = num_quads(weight.in_features);
    walk_words(cut, 4 * quads, weight.stream(), begin, end, ride, [&](int64_t tile, int64_t panel, Ahead ahead) {
        const int64_t rows = cut.rows(tile), first = cut.first(tile), n = panel * kWordPanel;
        int8_tile(rows, x.lines.tile(tile), x.lines.stride(), quads, weight.panels + panel * weight.panel_bytes(), ahead,
                  sums);
        const Int8Columns columns(weight, n);
        for (int64_t r = 0; r < rows; ++r) {
            const int32_t* line = sums + r * kWordPanel;
            const float scale = x.scales[first + r];
            output.write(first + r, n, columns.low(line, scale), columns.high(line, scale));
        }
    });
}

// fp32 rows [num_rows, in_features] x panels [begin, end).
template <typename Output>
void gemm_widened(const float* x, int64_t num_rows, const Int8Weight& weight, int64_t begin, int64_t end,
                  const Output& output, const KvRide& ride = {}) {
    alignas(64) float sums[kWordRowTile * kWordPanel];
    const RowCut cut = word_cut(num_rows);
    const int64_t in_features = weight.in_features;
    walk_words(cut, 4 * in_features, weight.stream(), begin, end, ride,
               [&](int64_t tile, int64_t panel, Ahead ahead) {
                   const int64_t rows = cut.rows(tile), first = cut.first(tile), n = panel * kWordPanel;
                   widened_tile(rows, x + first * in_features, in_features,
                                weight.panels + panel * weight.panel_bytes(), ahead, sums);
                   const Vec low = load(weight.scales + n), high = load(weight.scales + n + kWidth);
                   for (int64_t r = 0; r < rows; ++r)
                       output.write(first + r, n, load(sums + r * kWordPanel) * low,
                                    load(sums + r * kWordPanel + kWidth) * high);
               });
}

// `baton_packed_bytes`, `baton_linear` of the int8 kinds.
int64_t int8_packed_bytes(int64_t out_features, int64_t in_features);
void int8_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                 int64_t num_threads);

}  // namespace baton
