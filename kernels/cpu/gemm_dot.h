// Rows of bf16 times a bf16 weight by an instruction that multiplies pairs (`vdpbf16ps`, AVX-512 BF16): twice the
// multiply-adds of fp32 per instruction, and weights are never widened.
//
// A packed weight is panels of words (`gemm_words.h`), a word two values of k of one column, K rounded up to pairs with
// zeros. Rows are rounded to bf16 (they are of that type already where the model is) and kept in such pairs too.
//
// Each y[m, n] is one chain of the instruction in k order from 0, whatever the tile it fell in, so bits depend neither
// on the number of rows nor on their places.
//
// Where the compiler's target lacks the instruction (`kHasDot`) no product of this file may be called.
#pragma once

#include "words.h"
#include "gemm_words.h"

namespace baton {

inline int64_t num_pairs(int64_t in_features) { return ceil_div(in_features, 2); }

// `num_rows` rows (at most kWordRowTile) against a panel: sums[row * kWordPanel + column]. `x` as `LineRows::tile`.
void dot_tile(int64_t num_rows, const char* x, int64_t stride, int64_t pairs, const char* panel, Ahead ahead, float* sums);

// Rows (`narrow_row`) x panels [begin, end) of a weight; `output` as in `gemm.h`.
template <typename Output>
void gemm_dot(const LineRows& x, int64_t in_features, const char* panels, int64_t begin, int64_t end,
              const Output& output, const KvRide& ride = {}) {
    alignas(64) float sums[kWordRowTile * kWordPanel];
    const int64_t pairs = num_pairs(in_features), panel_bytes = pairs * 4 * kWordPanel;
    walk_words(x.cut, 4 * pairs, pairs, begin, end, ride, [&](int64_t tile, int64_t panel, Ahead ahead) {
        const int64_t rows = x.cut.rows(tile), first = x.cut.first(tile);
        dot_tile(rows, x.tile(tile), x.stride(), pairs, panels + panel * panel_bytes, ahead, sums);
        for (int64_t r = 0; r < rows; ++r)
            output.write(first + r, panel * kWordPanel, load(sums + r * kWordPanel),
                         load(sums + r * kWordPanel + kWidth));
    });
}

// `baton_packed_bytes`, `baton_linear` of this kind.
int64_t dot_packed_bytes(int64_t out_features, int64_t in_features);
void dot_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                int64_t num_threads);

}  // namespace baton
