// What products share whose weights come as 32-bit words: four bytes (`gemm_int8.h`) or two bf16 (`gemm_dot.h`) of one
// column that are neighbours in k, which is what one lane of a dot-product instruction reads.
//
// Panels are [ceil(N / kWordPanel)][words of K][kWordPanel words]; rows are words of the same kind, a word broadcast to
// all lanes at a time. Rows are cut into tiles of equal height, and these into blocks that stay in cache; a tile's sums with
// one panel stay in registers for the whole of k. Panels are taken one at a time: however few the rows are, memory is then
// one stream, which it serves faster than several.
#pragma once

#include "gemm.h"
#include "line_rows.h"

namespace baton {

constexpr int64_t kWordPanel = 2 * kWidth;
constexpr int64_t kWordRowTile = kRowTile;
constexpr int64_t kWordRowBlockBytes = 256 * 1024;  // bytes of rows that stay in L2 while panels pass
constexpr int64_t kWordSlackBytes = 2048;           // after the last panel, for what is asked for ahead

inline RowCut word_cut(int64_t num_rows) { return {num_rows, std::max<int64_t>(1, ceil_div(num_rows, kWordRowTile))}; }

// A weight's panels as they lie in memory. Where one tile covers all rows, what is `ahead` bytes on is asked for.
struct PanelStream {
    const char* data;
    int64_t words;                  // of a column
    int64_t line = 4 * kWordPanel;  // bytes of one word of all columns
    int64_t ahead = kPrefetchBytes;

    int64_t panel_bytes() const { return words * line; }
    const char* panel(int64_t index) const { return data + index * panel_bytes(); }
};

constexpr int64_t kOneBlock = 0;  // as `row_bytes`: panels pass all rows at once

// All tiles of `cut` x panels [begin, end); multiply(tile, panel, ahead) computes one, a panel's first one first.
template <typename Multiply>
void walk_words(const RowCut& cut, int64_t row_bytes, const PanelStream& stream, int64_t begin, int64_t end,
                const KvRide& ride, const Multiply& multiply) {
    if (cut.num_rows == 0) return;  // a tile has a row
    const int64_t wanted = std::max<int64_t>(1, ceil_div(cut.num_rows * row_bytes, kWordRowBlockBytes));
    const int64_t num_blocks = std::min(cut.num_tiles, wanted);
    for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t first = cut.num_tiles * b / num_blocks, last = cut.num_tiles * (b + 1) / num_blocks;
        const int64_t passes = last - first;
        const KvRide none;
        KvRide::Cursor cursor(b == 0 ? ride : none, begin, passes);
        for (int64_t panel = begin; panel < end; ++panel)
            for (int64_t tile = first; tile < last; ++tile) {
                const char* here = stream.panel(panel);
                Ahead ahead = passes == 1 ? Ahead{here + stream.ahead, stream.line}
                                          : Ahead{here + stream.panel_bytes() * (passes + tile - first) / passes,
                                                  stream.line / passes};
                ahead.ride = cursor.next();
                multiply(tile, panel, ahead);
            }
    }
}

}  // namespace baton
