// One product of tiles on the matrix unit: one or two tiles of rows x the two tiles of a panel, over steps of k.
//
// The unit takes what the processor hands it some steps later, so other work between two steps costs it nothing:
// `between(step)` is called after each. What is added to, and where sums go, is memory: `gemm_amx.h` says why.
#pragma once

#include <type_traits>

#include "amx_tiles.h"
#include "gemm.h"
#include "line_rows.h"

namespace baton {

constexpr int64_t kAmxPanel = 32;                  // output features of a panel: two tiles
constexpr int64_t kAmxStepBytes = 2 * kTileBytes;  // of a panel per tile depth of k
constexpr int64_t kAmxFarBytes = 12 * 1024;  // what a pass asks for goes to L2 so much sooner than to L1
constexpr int64_t kAmxSums = 2 * kTileLines * kAmxPanel;

// What meets: `steps` lines of one or two tiles of rows of `height`, `row_steps` lines being a whole tile's, and as much
// of a panel.
struct TileProduct {
    int64_t height, row_steps, steps;
    const char *rows, *panel;
    Ahead ahead;
    bool is_first;  // sums begin at zero, else with what `sums` has
};

#if defined(BATON_AMX)

// Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights; tile numbers are part of the instructions. Rows are unsigned
// bytes and weights signed ones, if they are bytes.
#define BATON_TILE_DOT(SUMS, ROWS, WEIGHTS)         \
    do {                                            \
        if constexpr (kIsBf16)                      \
            _tile_dpbf16ps(SUMS, ROWS, WEIGHTS);    \
        else                                        \
            _tile_dpbusd(SUMS, ROWS, WEIGHTS);      \
    } while (false)
// Rows that pass a panel once leave it the first cache.
#define BATON_TILE_ROWS(TILE, ROWS)                          \
    do {                                                     \
        if constexpr (Passing)                               \
            _tile_stream_loadd(TILE, ROWS, kLineBytes);      \
        else                                                 \
            _tile_loadd(TILE, ROWS, kLineBytes);             \
    } while (false)

// sums[row * kAmxPanel + column] of one tile of rows, or of a pair of them.
template <bool Pair, bool Passing, typename Sum, typename Between>
inline void multiply_tiles(const TileProduct& of, Sum* sums, const Between& between) {
    constexpr bool kIsBf16 = std::is_same_v<Sum, float>;
    constexpr int64_t stride = kIsBf16 ? kLineBytes : 2 * kLineBytes;  // between lines of a weight's tile
    constexpr int64_t right = kIsBf16 ? kTileBytes : kLineBytes;           // from the left to the right tile
    constexpr int64_t line = kAmxPanel * 4;
    const int64_t row_bytes = of.height * kLineBytes;
    const char *rows = of.rows, *lower = rows + of.row_steps * row_bytes, *panel = of.panel, *next = of.ahead.from;
    Sum* const below = sums + of.height * kAmxPanel;
    int64_t asked = 0, due = 0;
    const bool is_only_pass = of.ahead.step == kAmxStepBytes;
    asm volatile("" : : : "memory");  // some compilers do not know what a tile load reads
    if (of.is_first) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (Pair) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums, line);
        _tile_loadd(1, sums + kTileLines, line);
        if constexpr (Pair) {
            _tile_loadd(2, below, line);
            _tile_loadd(3, below + kTileLines, line);
        }
    }
    for (int64_t step = 0; step < of.steps; ++step) {
        _tile_loadd(6, panel, stride);
        BATON_TILE_ROWS(4, rows);
        _tile_loadd(7, panel + right, stride);
        if constexpr (Pair) BATON_TILE_ROWS(5, lower);
        BATON_TILE_DOT(0, 4, 6);
        BATON_TILE_DOT(1, 4, 7);
        if constexpr (Pair) {
            BATON_TILE_DOT(2, 5, 6);
            BATON_TILE_DOT(3, 5, 7);
            lower += row_bytes;
        }
        rows += row_bytes;
        panel += kAmxStepBytes;
        for (due += of.ahead.step; asked < due; asked += kLineBytes) {
            // for a later pass to L2 alone: this one's lines stay in L1
            prefetch_l2(next + asked + (is_only_pass ? kAmxFarBytes : 0));
            if (is_only_pass) prefetch(next + asked);
        }
        between(step);
    }
    _tile_stored(0, sums, line);
    _tile_stored(1, sums + kTileLines, line);
    if constexpr (Pair) {
        _tile_stored(2, below, line);
        _tile_stored(3, below + kTileLines, line);
    }
}
#undef BATON_TILE_DOT
#undef BATON_TILE_ROWS

#else

template <bool Pair, bool Passing, typename Sum, typename Between>
inline void multiply_tiles(const TileProduct&, Sum*, const Between&) {}

#endif

}  // namespace baton
