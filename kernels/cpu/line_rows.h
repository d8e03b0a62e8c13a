// Rows of small numbers as products read them: in lines of 64 bytes, 32 bf16 or 64 bytes of one row each, cut into tiles of
// some rows whose lines of the same part of k lie side by side.
//
// [tiles][steps][height][64 bytes], a step being one line's worth of k: a tile is one stream of memory, and the same
// distance from each of its rows to the next. Rows past the last one hold anything; their results are never looked at.
#pragma once

#include "simd.h"
#include "threads.h"

namespace baton {

constexpr int64_t kLineBytes = 64;

// Rows in tiles of `height`, the last ones perhaps missing.
struct RowCut {
    int64_t num_rows = 0, num_tiles = 0, height = 0;

    RowCut() = default;
    RowCut(int64_t rows, int64_t tiles) : num_rows(rows), num_tiles(tiles), height(ceil_div(rows, tiles)) {}

    int64_t first(int64_t tile) const { return tile * height; }
    int64_t rows(int64_t tile) const { return std::min(height, num_rows - first(tile)); }
};

struct LineRows {
    RowCut cut;
    int64_t steps = 0;  // of 64 bytes
    char* data = nullptr;
    int64_t serial = 0;  // for who keeps them in another form: differs wherever what is written does, or is 0

    static int64_t steps_of(int64_t row_bytes) { return ceil_div(row_bytes, kLineBytes); }
    static int64_t bytes(const RowCut& cut, int64_t steps) { return cut.num_tiles * cut.height * steps * kLineBytes; }

    static LineRows in(Scratch& memory, const RowCut& cut, int64_t row_bytes) {
        const int64_t steps = steps_of(row_bytes);
        return {cut, steps, reinterpret_cast<char*>(memory.floats(bytes(cut, steps) / 4))};
    }

    int64_t tile_bytes() const { return steps * stride(); }
    const char* tile(int64_t index) const { return data + index * tile_bytes(); }
    // From a row's line to its next one.
    int64_t stride() const { return cut.height * kLineBytes; }
    // The first line of row m.
    char* row(int64_t m) const {
        const uint32_t height = uint32_t(cut.height), at = uint32_t(m);  // divided sooner
        return data + at / height * tile_bytes() + at % height * kLineBytes;
    }
};

// So many numbers that nobody else in this process has; the first one.
int64_t new_serials(int64_t count);

// x [in_features] rounded to bf16 to row m of `rows`, zeros to the end of its last line.
void narrow_row(const float* x, int64_t in_features, int64_t m, const LineRows& rows);

// x [in_features] ~ scale * q to row m of `rows` as bytes q + 128, zeros to the end of its last line; returns the scale.
// scale = max |x| / 127, q = x * (127 / max |x|) to the nearest integer, ties to even. A row whose largest magnitude is below
// 1e-30 becomes q = 0 of scale 0; one with a NaN or an infinity q = 0 of scale NaN, so that all of its results are NaN and
// no other row's are.
float quantize_row(const float* x, int64_t in_features, int64_t m, const LineRows& rows);

}  // namespace baton
