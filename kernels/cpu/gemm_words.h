// What products share whose weights come as 32-bit words: four bytes (`gemm_int8.h`) or two bf16 (`gemm_dot.h`) of one
// column that are neighbours in k, which is what one lane of a dot-product instruction reads.
//
// Panels are [ceil(N / kWordPanel)][words of K][kWordPanel words]; rows are words of the same kind, a word broadcast to
// all lanes at a time. Rows are cut into blocks that stay in cache and into tiles of about equal height; a tile's sums
// stay in registers for the whole of k.
#pragma once

#include "gemm.h"

namespace baton {

constexpr int64_t kWordPanel = 2 * kWidth;
constexpr int64_t kWordRowTile = kRowTile;
constexpr int64_t kWordTileColumns = 4 * kWordPanel;
constexpr int64_t kWordRowBlockBytes = 256 * 1024;  // bytes of rows that stay in L2 while panels pass
constexpr int64_t kWordSlackBytes = 2048;           // after the last panel, for tiles that are read past its end

// `num_rows` rows x panels [begin, end) of `words` lines each. multiply(first row, number of rows, panel, panels left,
// ahead) computes a tile and returns its panels; finish(first row, number of rows, panel, panels) writes it.
template <typename Multiply, typename Finish>
void walk_words(int64_t words, int64_t num_rows, int64_t row_bytes, int64_t begin, int64_t end,
                const KvRide& ride, const Multiply& multiply, const Finish& finish) {
    constexpr int64_t line = 4 * kWordPanel;
    const int64_t block = std::max(2 * kWordRowTile, kWordRowBlockBytes / std::max<int64_t>(row_bytes, 1));
    const int64_t num_blocks = ceil_div(num_rows, block), panel_bytes = words * line;
    for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t first = num_rows * b / num_blocks, rows = num_rows * (b + 1) / num_blocks - first;
        const int64_t tiles = ceil_div(rows, kWordRowTile);
        const KvRide none;
        KvRide::Cursor cursor(b == 0 ? ride : none, begin, tiles);
        for (int64_t panel = begin; panel < end;) {
            int64_t taken = 0;
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t from = first + rows * t / tiles, count = first + rows * (t + 1) / tiles - from;
                Ahead ahead = tiles == 1 ? Ahead{kPrefetchBytes, line}
                                               : Ahead{panel_bytes * (tiles + t) / tiles, line / tiles};
                ahead.ride = cursor.next();
                taken = multiply(from, count, panel, tiles == 1 ? end - panel : 1, ahead);
                finish(from, count, panel, taken);
            }
            panel += taken;
        }
    }
}

}  // namespace baton
