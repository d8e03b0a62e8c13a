// The tile products of `attention_amx_bytes.h`. Tiles 0 and 1 are sums of high bytes, 2 and 3 of low ones; 4 and 5 are rows,
// 6 and 7 columns.
#include "attention_amx_bytes.h"

#include "amx_tiles.h"

namespace baton {

#if defined(BATON_AMX)

namespace {

template <bool Signed>
void multiply(const ByteRows& rows, const char* panels, int64_t panel_bytes, int64_t steps, ByteSums& sums) {
    asm volatile("" : : : "memory");  // some compilers do not know what a tile load reads
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const char* row = rows.high;
    for (int64_t step = 0; step < steps; ++step, row += kTileDepth, panels += kTileBytes) {
        _tile_loadd(4, row, rows.stride);
        _tile_loadd(6, panels, kTileDepth);
        _tile_loadd(5, row + rows.low, rows.stride);
        _tile_loadd(7, panels + panel_bytes, kTileDepth);
        if constexpr (Signed) {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(3, 5, 7);
        } else {
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(3, 5, 7);
        }
    }
    _tile_stored(0, &sums.parts[0][0][0], sizeof sums.parts[0][0]);
    _tile_stored(2, &sums.parts[1][0][0], sizeof sums.parts[0][0]);
    _tile_stored(1, &sums.parts[0][0][kTileLines], sizeof sums.parts[0][0]);
    _tile_stored(3, &sums.parts[1][0][kTileLines], sizeof sums.parts[0][0]);
    asm volatile("" : : : "memory");
}

}  // namespace

void multiply_signed(const ByteRows& rows, const char* panels, int64_t panel_bytes, int64_t steps, ByteSums& sums) {
    multiply<true>(rows, panels, panel_bytes, steps, sums);
}

void multiply_unsigned(const ByteRows& rows, const char* panels, int64_t panel_bytes, int64_t steps, ByteSums& sums) {
    multiply<false>(rows, panels, panel_bytes, steps, sums);
}

#endif  // BATON_AMX

}  // namespace baton
