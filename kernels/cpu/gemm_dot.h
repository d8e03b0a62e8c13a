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

// The sums of a tile's rows with a panel's columns.
template <typename Output>
void write_sums(const RowCut& cut, int64_t tile, int64_t panel, const float* sums, const Output& output) {
    for (int64_t r = 0; r < cut.rows(tile); ++r, sums += kWordPanel)
        output.write(cut.first(tile) + r, panel * kWordPanel, load(sums), load(sums + kWidth));
}

// Rows (`narrow_row`) x panels [begin, end) of a weight; `output` as in `gemm.h`.
template <typename Output>
void gemm_dot(const LineRows& x, int64_t in_features, const char* panels, int64_t begin, int64_t end,
              const Output& output, const KvRide& ride = {}) {
    alignas(64) float sums[kWordRowTile * kWordPanel];
    const PanelStream stream{panels, num_pairs(in_features)};
    walk_words(x.cut, 4 * stream.words, stream, begin, end, ride, [&](int64_t tile, int64_t panel, Ahead ahead) {
        dot_tile(x.cut.rows(tile), x.tile(tile), x.stride(), stream.words, stream.panel(panel), ahead, sums);
        write_sums(x.cut, tile, panel, sums, output);
    });
}

// `baton_packed_bytes`, `baton_linear` of this kind.
int64_t dot_packed_bytes(int64_t out_features, int64_t in_features);
void dot_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                int64_t num_threads);

}  // namespace baton
