// The tile of `gemm_words.h`: some rows of words against some panels, all sums in registers. A `Dot` says what words are:
// `Dot::Sums` is a vector of int32 for bytes and of fp32 for pairs of bf16, `Dot::add(sums, x, w)` adds each lane's
// products to it. Included by the one source of each kind.
#pragma once

#include "words.h"
#include "gemm_words.h"

namespace baton {

// Keeps the compiler from computing several rows at once and spilling the sums for it.
template <typename T>
inline void keep_in_register([[maybe_unused]] T& value) {
#if defined(BATON_AVX512)
    asm volatile("" : "+v"(value));
#elif defined(BATON_AVX2)
    asm volatile("" : "+x"(value));
#endif
}

template <typename Dot, int Rows, int Panels, typename Sum>
int64_t word_sums(const char* x, int64_t words, const char* panel, Ahead ahead, Sum* out) {
    using Sums = typename Dot::Sums;
    static_assert(sizeof(Sums) == kWidth * sizeof(Sum));
    constexpr int64_t line_bytes = 4 * kWordPanel;
    Sums sums[Rows][2 * Panels];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * Panels; ++v) sums[r][v] = Sums{};
    const char* next = panel + ahead.offset;
    for (int64_t k = 0; k < words; ++k, next += ahead.step) {
        if (Rows >= kRideRows) ahead.ride.ask(k);
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p) {
            prefetch(next + p * words * line_bytes);
            if (line_bytes > 64 && ahead.step > 64) prefetch(next + p * words * line_bytes + 64);
            const char* line = panel + (p * words + k) * line_bytes;
            const IntVec low = load_words(line), high = load_words(line + 4 * kWidth);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const IntVec value = splat_word(x + (r * words + k) * 4);
                sums[r][2 * p] = Dot::add(sums[r][2 * p], value, low);
                sums[r][2 * p + 1] = Dot::add(sums[r][2 * p + 1], value, high);
                if (Rows > 2) keep_in_register(sums[r][2 * p]), keep_in_register(sums[r][2 * p + 1]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * Panels; ++v)
            std::memcpy(out + r * kWordTileColumns + v * kWidth, &sums[r][v], sizeof(Sums));
    return Panels;
}

// Few rows take several panels, so that sums enough are under way.
template <int Rows>
constexpr int kMostPanels = Rows == 1 ? 4 : Rows == 2 || (kWidth == 16 && Rows <= 4) ? 2 : 1;

template <int Rows, typename Tile>
int64_t with_panels(int64_t panels_left, const Tile& tile) {
    constexpr int most = kMostPanels<Rows>;
    if (panels_left >= most) return tile.template operator()<Rows, most>();
    if constexpr (most == 4)
        if (panels_left >= 2) return tile.template operator()<Rows, 2>();
    return tile.template operator()<Rows, 1>();
}

// tile<Rows, Panels>() for a number of rows up to kWordRowTile; returns its panels.
template <typename Tile>
int64_t with_rows(int64_t num_rows, int64_t panels_left, const Tile& tile) {
    switch (num_rows) {
#define BATON_ROWS(ROWS) \
    case ROWS: return with_panels<ROWS>(panels_left, tile);
        BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#if BATON_WIDTH == 16
        BATON_ROWS(7) BATON_ROWS(8) BATON_ROWS(9) BATON_ROWS(10) BATON_ROWS(11) BATON_ROWS(12)
#endif
#undef BATON_ROWS
    }
    __builtin_unreachable();  // tiles have 1 to kWordRowTile rows
}

}  // namespace baton
