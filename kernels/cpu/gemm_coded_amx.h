// Products of the matrix unit (`gemm_amx.h`) with weights kept as codes (`gemm_coded.h`).
//
// Weights are the left operand here: a line of a tile is 32 values of k of one output feature, which is a block of the
// file. So 32 values at a time are looked up in the 16 that a block's codes of 4 bits stand for, and nothing is turned
// over but what is small: rows, once per product and thread, and sums.
//
// 1. Rows in lines become tiles of [16 pairs of k][rows] (`TurnedRows`).
// 2. A panel's blocks are decoded to tiles in L1, and the unit multiplies those that were decoded a little earlier: both go
//    on at once, and one or two tiles of rows cost no more than decoding does. For more rows the panel stays decoded.
// 3. Sums, [feature][row], are turned over on their way to `Output`.
// 4. Where many rows wait for the unit and there are decoded panels, these are multiplied (`gemm_amx.h`).
//
// Bits: factors of a product change places, and the order of sums is that of `gemm_amx.h`, so results are the same.
#pragma once

#include "attention_panels.h"
#include "gemm_amx.h"
#include "gemm_coded.h"

namespace baton {

constexpr int64_t kAmxCodedRows = 128;  // more meet decoded panels, where there are any
constexpr int64_t kRowsPerTile = 16;
constexpr int64_t kDecodedBlockBytes = 2 * kTileBytes;

// Rows as the unit's right operand: per tile of rows and step of k, 16 lines `line` bytes apart, of a word (two values of k)
// of each row.
struct TurnedRows {
    const char* data;
    int64_t tile_bytes, step_bytes, line;

    // In this thread's memory, where they stay until other rows come. A row alone is what it was.
    static TurnedRows of(const LineRows& rows);

    const char* tile(int64_t index) const { return data + index * tile_bytes; }
};

// One tile of rows or two x a panel: sums [tile of rows][2][16 features][16 rows], or [2][16 features] of one row. `ring`: so
// many blocks fit `decoded`; with a `panel` they are decoded on the way, else they are there.
struct CodedTiles {
    const CodedWeight& weight;
    const TurnedRows& rows;
    const char* panel;
    char* decoded;
    int64_t ring;

    void multiply(int64_t first_tile, bool pair, float* sums) const;
};

// Sums of a tile of rows to `output`, 4 rows at a time.
template <typename Output>
void write_turned(const RowCut& cut, int64_t tile, int64_t panel, const float* sums, const Output& output) {
    const int64_t column = panel * kAmxPanel, first = cut.first(tile), count = cut.rows(tile);
    if (cut.height == 1) return output.write(first, column, load(sums), load(sums + kTileLines));
    constexpr int64_t half = kTileLines * kRowsPerTile;
    const char* features[2 * kTileLines];
    for (int64_t n = 0; n < 2 * kTileLines; ++n)
        features[n] = reinterpret_cast<const char*>(sums + n / kTileLines * half + n % kTileLines * kRowsPerTile);
    for (int64_t row = 0; row < count; row += 4) {
        UintVec low[4], high[4];
        load_words(features, row * 4, low);
        load_words(features + kTileLines, row * 4, high);
        for (int64_t i = 0; i < std::min<int64_t>(4, count - row); ++i)
            output.write(first + row + i, column, Vec(low[i]), Vec(high[i]));
    }
}

template <typename Output>
void amx_gemm_coded(const LineRows& rows, const CodedWeight& weight, int64_t begin, int64_t end, const Output& output) {
    const RowCut& cut = rows.cut;
    if (cut.num_rows == 0 || begin >= end) return;
    if (cut.num_rows > kAmxCodedRows && weight.expanded != nullptr)
        return amx_gemm_bf16(rows, bf16_panels(rows, weight.expanded), begin, end, output);
    constexpr int64_t kRing = 4, tile_floats = 2 * kTileLines * kRowsPerTile;
    const bool pairs = cut.num_tiles > 1, once = cut.num_tiles <= 2;
    const TurnedRows turned = TurnedRows::of(rows);
    const PanelStream stream = weight.stream();
    const AmxSession session(AmxTile(kTileLines, 4 * cut.height));
    alignas(64) float sums[2 * tile_floats];
    for (int64_t panel = begin; panel < end; ++panel)
        for (int64_t tile = 0; tile < cut.num_tiles; tile += 2) {
            const CodedTiles tiles{weight, turned, tile == 0 ? stream.panel(panel) : nullptr, decoded_words(weight),
                                   once ? kRing : weight.num_blocks()};
            tiles.multiply(tile, pairs, sums);
            for (int64_t i = 0; i < (pairs ? 2 : 1); ++i) write_turned(cut, tile + i, panel, sums + i * tile_floats, output);
        }
}

}  // namespace baton
