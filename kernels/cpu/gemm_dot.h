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

// Rows as the instruction reads them: [rows][num_pairs][2] bf16.
struct DotRows {
    const char* data;

    static int64_t bytes(int64_t num_rows, int64_t in_features) { return num_rows * num_pairs(in_features) * 4; }
};

// Row m of x, rounded to bf16, to its place in `target` (`DotRows::bytes`).
void dot_row(const float* x, int64_t in_features, int64_t m, char* target);

// `num_rows` rows (at most kWordRowTile) against some of `panels_left` panels from `panel` on; returns how many. The sums
// go to sums[row * kWordTileColumns + column].
int64_t dot_tile(int64_t num_rows, int64_t panels_left, const char* x, int64_t pairs, const char* panel, Ahead ahead,
                 float* sums);

// Rows x panels [begin, end) of a weight; `output` as in `gemm.h`.
template <typename Output>
void gemm_dot(const DotRows& x, int64_t num_rows, int64_t in_features, const char* panels, int64_t begin, int64_t end,
              const Output& output, const KvRide& ride = {}) {
    alignas(64) float sums[kWordRowTile * kWordTileColumns];
    const int64_t pairs = num_pairs(in_features), panel_bytes = pairs * 4 * kWordPanel;
    walk_words(
        pairs, num_rows, 4 * pairs, begin, end, ride,
        [&](int64_t row, int64_t rows, int64_t panel, int64_t panels_left, Ahead ahead) {
            return dot_tile(rows, panels_left, x.data + row * 4 * pairs, pairs, panels + panel * panel_bytes, ahead, sums);
        },
        [&](int64_t row, int64_t rows, int64_t panel, int64_t taken) {
            for (int64_t column = 0; column < taken * kWordPanel; column += kWidth)
                for (int64_t r = 0; r < rows; ++r)
                    output.write(row + r, panel * kWordPanel + column, load(sums + r * kWordTileColumns + column));
        });
}

// `baton_packed_bytes`, `baton_linear` of this kind.
int64_t dot_packed_bytes(int64_t out_features, int64_t in_features);
void dot_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                int64_t num_threads);

}  // namespace baton
