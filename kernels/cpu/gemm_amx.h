// Products by the matrix unit (AMX) of Intel processors since Sapphire Rapids: rows and weights of bf16, or of int8.
//
// A tile is 16 lines of 64 bytes: 32 bf16 or 64 int8 of one row each, or of 16 output features the 32-bit words (2 bf16,
// 4 int8) of 16 steps over k. One instruction multiplies a tile of rows by a tile of weights into 16 x 16 sums.
//
// 1. A bf16 weight is packed once: panels [ceil(N / 32)][ceil(K / 32)][2 tiles], zeros where N or K end. Panels of
//    int8 weights (`gemm_int8.h`) are made of the same words: a line of one is a line of two tiles side by side.
//    Either way a panel is one stream of memory.
// 2. Rows are laid out in tiles too (`line_rows.h`, a step being one tile depth of k), zeros past K, cut into tiles of
//    equal height: the unit's time is that of the lines a tile of rows has, not of those it could have.
// 3. Two tiles of rows meet the two tiles of a panel in four tiles of sums, which stay in the unit for all of K and
//    are handed to `Output` once. A tile of rows alone (up to 16 rows) is bound by memory.
//
// Bits: each y[m, n] adds up the products of one tile depth after another in k order, whatever the height of its tile
// and the number of rows; within a tile the order is the hardware's and depends on neither. Sums of int8 are exact:
// results are those of `gemm_int8`.
//
// Where there is no unit (`amx_unit.h`) no product of this file may be called.
#pragma once

#include <algorithm>

#include "amx_unit.h"
#include "gemm.h"
#include "gemm_int8.h"

namespace baton {

constexpr int64_t kAmxPanel = 32;                   // output features of a panel: two tiles
constexpr int64_t kAmxStepBytes = 2 * kTileBytes;   // of a panel per tile depth of k
constexpr int64_t kAmxRowBlockBytes = 1024 * 1024;  // tiles of rows that stay in L2 while panels pass
constexpr int64_t kAmxPrefetchBytes = 4096;
static_assert(!kHasAmx || kWordPanel == kAmxPanel);  // machines with AMX have AVX-512

// One tile of rows, or an even number of them.
inline RowCut amx_cut(int64_t num_rows) {
    return {num_rows, num_rows <= kTileLines ? 1 : 2 * ceil_div(num_rows, 2 * kTileLines)};
}

// One or two tiles of rows x one panel: sums[row * kAmxPanel + column].
void amx_tiles(bool pair, int64_t height, int64_t steps, const char* rows, const char* panel, Ahead ahead, float* sums);
void amx_tiles(bool pair, int64_t height, int64_t steps, const char* rows, const char* panel, Ahead ahead, int32_t* sums);

// A panel's tiles, and where it lies in the weight's stream of memory: `bytes` of it, `step_bytes` for a tile depth of k.
// Where one pass covers all rows, what is `ahead` bytes on is asked for.
struct AmxPanel {
    const char *tiles, *stream;
    int64_t bytes, step_bytes, ahead;
};

// Panels as they are packed, of `bytes` each.
class AmxPanels {
public:
    AmxPanels(const char* data, int64_t bytes) : data_(data), bytes_(bytes) {}

    AmxPanel operator()(int64_t index) const {
        const char* here = data_ + index * bytes_;
        return {here, here, bytes_, kAmxStepBytes, kAmxPrefetchBytes};
    }

private:
    const char* data_;
    int64_t bytes_;
};

// Of a bf16 weight that rows of bf16 meet.
inline AmxPanels bf16_panels(const LineRows& rows, const char* data) { return {data, rows.steps * kAmxStepBytes}; }

// Rows x panels [begin, end), as `panel_of` gives them one after the other; finish(panel) gives what takes (row, sums of
// the panel's columns).
template <typename Sum, typename PanelOf, typename Finish>
void amx_walk(const LineRows& rows, const PanelOf& panel_of, int64_t begin, int64_t end, const Finish& finish) {
    const RowCut& cut = rows.cut;
    if (cut.num_rows == 0 || begin >= end) return;
    const int64_t num_groups = ceil_div(cut.num_tiles, 2);  // pairs of tiles, or one tile alone
    const int64_t num_blocks = std::min(num_groups, ceil_div(cut.num_tiles * rows.tile_bytes(), kAmxRowBlockBytes));
    const AmxSession session(cut.height);
    alignas(64) Sum sums[2 * kTileLines * kAmxPanel];
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = num_groups * block / num_blocks, last = num_groups * (block + 1) / num_blocks;
        const int64_t passes = last - first;
        for (int64_t panel = begin; panel < end; ++panel) {
            const auto finish_row = finish(panel);
            const AmxPanel at = panel_of(panel);
            for (int64_t group = first; group < last; ++group) {
                // one pass reads its own stream ahead, several ask for a share of the next panel each
                const int64_t from = passes == 1 ? at.ahead : at.bytes + at.bytes * (group - first) / passes;
                const Ahead ahead{at.stream + from, at.step_bytes / passes};
                amx_tiles(cut.num_tiles > 1, cut.height, rows.steps, rows.tile(2 * group), at.tiles, ahead, sums);
                const int64_t top = 2 * group * cut.height, count = std::min(2 * cut.height, cut.num_rows - top);
                for (int64_t row = 0; row < count; ++row) finish_row(top + row, sums + row * kAmxPanel);
            }
        }
    }
}

// Rows x panels [begin, end) of a weight; `output` as in `gemm.h`.
template <typename PanelOf, typename Output>
void amx_gemm_bf16(const LineRows& rows, const PanelOf& panel_of, int64_t begin, int64_t end, const Output& output) {
    amx_walk<float>(rows, panel_of, begin, end, [&](int64_t panel) {
        return [&output, n = panel * kAmxPanel](int64_t row, const float* sums) {
            output.write(row, n, load(sums), load(sums + kWidth));
        };
    });
}
template <typename Output>
void amx_gemm_int8(const Int8Rows& rows, const Int8Weight& weight, int64_t begin, int64_t end, const Output& output) {
    const AmxPanels panels(reinterpret_cast<const char*>(weight.panels), weight.panel_bytes());
    amx_walk<int32_t>(rows.lines, panels, begin, end,
                      [&](int64_t panel) {
                          const int64_t n = panel * kAmxPanel;
                          return [&, n, columns = Int8Columns(weight, n)](int64_t row, const int32_t* sums) {
                              const float scale = rows.scales[row];
                              output.write(row, n, columns.low(sums, scale), columns.high(sums, scale));
                          };
                      });
}

// `baton_packed_bytes` of a bf16 weight, `baton_linear` of both kinds.
int64_t amx_packed_bytes(int64_t out_features, int64_t in_features);
void amx_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                int64_t num_threads);

}  // namespace baton
