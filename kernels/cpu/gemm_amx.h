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
// 3. Two tiles of rows meet the two tiles of a panel in four tiles of sums, which stay in the unit for all of K, or
//    a part of it, and are handed to `Output` once. A tile of rows alone (up to 16 rows) is bound by memory; a row of
//    bf16 alone does without the unit (`gemm_amx_row.h`).
// 4. Of the four tiles that such a product loads in a step two come from the first cache, else the unit waits for the
//    second: a panel stays there while rows pass it, loaded as a stream. A panel too deep for that is multiplied in parts,
//    their sums kept between them.
// 5. `Output` gets rows of a product while the next one's tiles are multiplied.
//
// Bits: each y[m, n] adds up the products of one tile depth after another in k order, whatever the height of its tile
// and the number of rows; within a tile the order is the hardware's and depends on neither. Sums of int8 are exact:
// results are those of `gemm_int8`.
//
// Where there is no unit (`amx_unit.h`) no product of this file may be called.
#pragma once

#include <algorithm>
#include <optional>

#include "gemm_amx_row.h"
#include "gemm_amx_tiles.h"
#include "gemm_int8.h"

namespace baton {

constexpr int64_t kAmxRowBlockBytes = 1024 * 1024;  // tiles of rows that stay in L2 while panels pass
constexpr int64_t kAmxPrefetchBytes = 4096;
constexpr int64_t kAmxDepth = 18;  // steps of a panel that stay in L1 while rows pass, beside what products write
static_assert(!kHasAmx || kWordPanel == kAmxPanel);  // machines with AMX have AVX-512

// One tile of rows, or an even number of them.
inline RowCut amx_cut(int64_t num_rows) {
    return {num_rows, num_rows <= kTileLines ? 1 : 2 * ceil_div(num_rows, 2 * kTileLines)};
}

// A panel's tiles, and where it lies in the weight's stream of memory: `bytes` of it, `step_bytes` for a tile depth of k.
// Where one pass covers all rows, what is `ahead` bytes on is asked for, and to L2 what is kAmxFarBytes further.
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

// What is left to do with the sums of a product: rows of results, some after each step of the next one.
template <typename Sum, typename FinishRow>
class AmxResults {
public:
    AmxResults(const FinishRow& finish_row, int64_t top, int64_t count, const Sum* sums)
        : finish_row_(finish_row), row_(top), end_(top + count), sums_(sums) {}

    int64_t left() const { return end_ - row_; }

    void finish(int64_t count) {
        for (const int64_t end = std::min(end_, row_ + count); row_ < end; ++row_, sums_ += kAmxPanel) finish_row_(row_, sums_);
    }

private:
    FinishRow finish_row_;
    int64_t row_, end_;
    const Sum* sums_;
};

// This thread's memory for the sums of `count` pairs of tiles.
float* amx_sums(int64_t count);

// Rows x panels [begin, end), as `panel_of` gives them one after the other; finish(panel) gives what takes (row, sums of
// the panel's columns).
template <typename Sum, typename PanelOf, typename Finish>
void amx_walk(const LineRows& rows, const PanelOf& panel_of, int64_t begin, int64_t end, const Finish& finish) {
    const RowCut& cut = rows.cut;
    if (cut.num_rows == 0 || begin >= end) return;
    const int64_t num_groups = ceil_div(cut.num_tiles, 2);  // pairs of tiles, or one tile alone
    const int64_t num_blocks = std::min(num_groups, ceil_div(cut.num_tiles * rows.tile_bytes(), kAmxRowBlockBytes));
    const AmxSession session(cut.height);
    using FinishRow = decltype(finish(begin));
    std::optional<AmxResults<Sum, FinishRow>> results;  // of the product before
    const auto multiply = [&](const TileProduct& of, bool is_passing, Sum* sums) {
        const int64_t share = results ? ceil_div(results->left(), of.steps) : 0;
        const auto between = [&](int64_t) {
            if (share > 0) results->finish(share);
        };
        if (cut.num_tiles == 1)
            multiply_tiles<false, false>(of, sums, between);
        else if (is_passing)
            multiply_tiles<true, true>(of, sums, between);
        else
            multiply_tiles<true, false>(of, sums, between);
        results.reset();
    };
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = num_groups * block / num_blocks, last = num_groups * (block + 1) / num_blocks;
        const int64_t passes = last - first;
        const int64_t num_parts = passes == 1 ? 1 : ceil_div(rows.steps, kAmxDepth);
        // those of parts wait for the next one; else two take turns, one's results being made of the other
        Sum* const memory = reinterpret_cast<Sum*>(amx_sums(num_parts == 1 ? 2 : passes));
        int64_t turn = 0;
        for (int64_t panel = begin; panel < end; ++panel) {
            const auto finish_row = finish(panel);
            const AmxPanel at = panel_of(panel);
            for (int64_t part = 0; part < num_parts; ++part) {
                const int64_t from = rows.steps * part / num_parts, to = rows.steps * (part + 1) / num_parts;
                for (int64_t group = first; group < last; ++group) {
                    // one pass reads its own stream ahead, several ask for a share of the next panel each
                    const int64_t pass = group - first, steps = to - from;
                    const Ahead ahead = passes == 1 ? Ahead{at.stream + at.ahead, at.step_bytes}
                                                    : Ahead{at.stream + at.bytes + from * at.step_bytes +
                                                                steps * at.step_bytes * pass / passes,
                                                            at.step_bytes / passes};
                    Sum* const sums = memory + (num_parts == 1 ? turn : pass) * kAmxSums;
                    multiply({cut.height, rows.steps, steps, rows.tile(2 * group) + from * rows.stride(),
                              at.tiles + from * kAmxStepBytes, ahead, part == 0},
                             passes > 1, sums);
                    turn ^= 1;
                    if (part < num_parts - 1) continue;
                    const int64_t top = 2 * group * cut.height;
                    results.emplace(finish_row, top, std::min(2 * cut.height, cut.num_rows - top), sums);
                }
            }
        }
        if (results) results->finish(results->left());
        results.reset();
    }
}

// A row alone, as `amx_gemm_bf16`. Apart, so that the compiler does for more rows what it would do without it.
template <typename PanelOf, typename Output>
[[gnu::noinline]] void amx_gemm_row(const LineRows& row, const PanelOf& panel_of, int64_t begin, int64_t end,
                                    const Output& output, int64_t next) {
    alignas(64) float sums[kAmxPanel];
    for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t then = panel + 1 < end ? panel + 1 : next;
        amx_row_sums(row, panel_of(panel).tiles, then < 0 ? nullptr : panel_of(then).tiles, sums);
        output.write(0, panel * kAmxPanel, load(sums), load(sums + kWidth));
    }
}

// Rows x panels [begin, end) of a weight, then perhaps panel `next` (else negative); `output` as in `gemm.h`.
template <typename PanelOf, typename Output>
void amx_gemm_bf16(const LineRows& rows, const PanelOf& panel_of, int64_t begin, int64_t end, const Output& output,
                   int64_t next = -1) {
    if (rows.cut.num_rows == 1) return amx_gemm_row(rows, panel_of, begin, end, output, next);
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
