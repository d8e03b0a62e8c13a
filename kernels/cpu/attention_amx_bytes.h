// The arithmetic of attention over int8 keys and values by the matrix unit (`amx_unit.h`), on a tile of 16 query rows at a
// time: that of `attention_bytes.h`, whose sums are exact integers, so its bits.
//
// 1. A row's n are two rows of bytes, high and low, hence two tiles of rows. They meet panels of columns, two at a time:
//    four tiles of sums, high ones and low ones, and 128 high + low is what they are of.
// 2. A panel of keys has 16 of them as columns, turned over as they lie: a line has four bytes of each.
// 3. A panel of values has 16 elements as columns, four values interleaved, hence in `interleave_quad`'s order.
//
// Rows that fill up a tile may be anything: what they sum up to is not looked at.
#pragma once

#include "amx_unit.h"
#include "attention_bytes.h"

namespace baton {

constexpr int64_t kTileDepth = 64;                             // bytes of a row of a tile
constexpr int64_t kTileColumns = 2 * kTileLines;               // of two panels
constexpr int64_t kValuePanelBytes = kPartition * kTileLines;  // of a partition
static_assert(!kHasAmx || (kTileColumns == kGroup && kTileDepth == kQuadGroup));

// A tile of rows, `stride` bytes apart: high bytes, and low ones so many bytes after them.
struct ByteRows {
    const char* high;
    int64_t low, stride;
};

// Sums of 16 rows and two panels of columns, of high bytes and of low ones.
struct ByteSums {
    alignas(64) int32_t parts[2][kTileLines][kTileColumns];

    IntVec of(int64_t row, int64_t column) const {
        return (load_words(&parts[0][row][column]) << 7) + load_words(&parts[1][row][column]);
    }
};

// Rows times two panels, `panel_bytes` apart, `steps` tile depths of them; signed bytes or unsigned ones times signed ones.
void multiply_signed(const ByteRows& rows, const char* panels, int64_t panel_bytes, int64_t steps, ByteSums& sums);
void multiply_unsigned(const ByteRows& rows, const char* panels, int64_t panel_bytes, int64_t steps, ByteSums& sums);

// 16 keys to a panel [dim / 4][16 keys][4].
inline void pack_key_bytes(const char* const* keys, int64_t dim, char* panel) {
    for (int64_t d = 0; d < dim; d += 16) {
        UintVec words[4];
        load_words(keys, d, words);
        for (int w = 0; w < 4; ++w, panel += sizeof words[w]) std::memcpy(panel, &words[w], sizeof words[w]);
    }
}

// Values 4 quad to 4 quad + 3 of a partition to their lines in the panels, [dim / 16][quads][16 elements][4].
inline void pack_value_bytes(const char* const* values, int64_t quad, int64_t dim, char* panels) {
    char* line = panels + quad * kTileDepth;
    for (int64_t d = 0; d < dim; d += kQuadGroup) {
        IntVec words[4];
        interleave_quad(values, d, words);
        for (int i = 0; i < 4; ++i, line += kValuePanelBytes) std::memcpy(line, &words[i], sizeof words[i]);
    }
}

// As `score_shorts`, of `count` rows of one tile.
inline void score_byte_tiles(const float* q, int64_t count, int64_t dim, const char* panels, int64_t num_keys,
                             const float* factors, float* scores) {
    const ByteRows rows{reinterpret_cast<const char*>(q), dim, dim * 4};
    ByteSums sums;
    for (int64_t j = 0; j < num_keys; j += kTileColumns) {
        multiply_signed(rows, panels + j * dim, kTileLines * dim, dim / kTileDepth, sums);
        const Vec low = load(factors + j), high = load(factors + j + kWidth);
        for (int64_t r = 0; r < count; ++r) {
            const float scale = *IntegerQuery(q + r * dim, dim).scale;
            float* const target = scores + r * kPartition + j;
            store(target, __builtin_convertvector(sums.of(r, 0), Vec) * (low * scale));
            store(target + kWidth, __builtin_convertvector(sums.of(r, kWidth), Vec) * (high * scale));
        }
    }
}

// A partition's values to what rows [first, count) of a tile have, whose weights are in `scores`; of `num_keys` of them.
inline void add_value_byte_tiles(float* scores, int64_t first, int64_t count, int64_t dim, const char* panels,
                                 int64_t num_keys, float* accumulator) {
    const ByteRows rows{reinterpret_cast<const char*>(scores), kPartition, kPartition * 4};
    ByteSums sums;
    for (int64_t d = 0; d < dim; d += kTileColumns, panels += 2 * kValuePanelBytes) {
        multiply_unsigned(rows, panels, kValuePanelBytes, ceil_div(num_keys, kTileDepth), sums);
        for (int64_t r = first; r < count; ++r) {
            const IntegerWeights weights(scores + r * kPartition);
            for (int64_t i = 0; i < kTileColumns; i += kWidth) {
                float* const target = accumulator + r * dim + d + i;
                store(target, load(target) * *weights.rescale +
                                  __builtin_convertvector(sums.of(r, i), Vec) * *weights.scale);
            }
        }
    }
}

}  // namespace baton
