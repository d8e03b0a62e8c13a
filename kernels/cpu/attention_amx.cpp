// The tile products of `attention_amx.h`.
//
// Tile numbers are part of the instructions: 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns. Of few rows 0 and 1 are the
// sums that 4 takes part in, all as high as there are rows; 2 and 3 are of keys, which are rows of whole tiles.
#include "attention_amx.h"

#include "amx_tiles.h"

namespace baton {

#if defined(BATON_AMX)

namespace {

inline void stored_before() { asm volatile("" : : : "memory"); }  // some compilers do not know what a tile load reads

template <bool Pair>
void multiply(const TileRows& rows, const char* panel, int64_t steps, float* out, int64_t out_bytes) {
    const char *upper = rows.data, *lower = rows.data + kTileLines * rows.stride;
    stored_before();
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Pair) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; ++step, upper += kLine, lower += kLine, panel += kPairTileBytes) {
        _tile_loadd(6, panel, kPairLineBytes);
        _tile_loadd(4, upper, rows.stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + kLine, kPairLineBytes);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (Pair) {
            _tile_loadd(5, lower, rows.stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    char* const sums = reinterpret_cast<char*>(out);
    _tile_stored(0, sums, out_bytes);
    _tile_stored(1, sums + kLine, out_bytes);
    if constexpr (Pair) {
        _tile_stored(2, sums + kTileLines * out_bytes, out_bytes);
        _tile_stored(3, sums + kTileLines * out_bytes + kLine, out_bytes);
    }
}

}  // namespace

void tile_sums(bool pair, const TileRows& rows, const char* panel, int64_t steps, float* out, int64_t out_bytes) {
    (pair ? multiply<true> : multiply<false>)(rows, panel, steps, out, out_bytes);
}

void few_scores(const TileRows (&keys)[2], const char* queries, int64_t steps, float* scores) {
    stored_before();
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(6, queries + step * kTileBytes, kLine);
        _tile_loadd(5, keys[0].data + step * kLine, keys[0].stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(5, keys[1].data + step * kLine, keys[1].stride);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(2, scores, kLine);
    _tile_stored(3, scores + kTileLines * kTileLines, kLine);
}

void few_values(const TileRows& rows, const char* panels, int64_t groups, bool begins, float* sums, int64_t sum_bytes) {
    stored_before();
    _tile_loadd(4, rows.data, rows.stride);
    for (int64_t group = 0; group < groups; ++group, panels += kPairTileBytes, sums += kGroup) {
        if (begins) {
            _tile_zero(0);
            _tile_zero(1);
        } else {
            _tile_loadd(0, sums, sum_bytes);
            _tile_loadd(1, sums + kTileLines, sum_bytes);
        }
        _tile_loadd(6, panels, kPairLineBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panels + kLine, kPairLineBytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stored(0, sums, sum_bytes);
        _tile_stored(1, sums + kTileLines, sum_bytes);
    }
}

#endif  // BATON_AMX

}  // namespace baton
