// The tile of `gemm_words.h`: some rows of words against a panel, all sums in registers. A `Dot` says what words are:
// `Dot::Sums` is a vector of int32 for bytes and of fp32 for pairs of bf16, `Dot::add(sums, x, w)` adds each lane's
// products to it. Included by the one source of each kind.
//
// Rows are read at fixed distances from one address that moves (`line_rows.h`), so one register is enough for all of them.
// Addresses of their own would fill the general registers, and the compiler would keep the rest in vector registers, which
// cost the multiply-adds a tenth of their time.
#pragma once

#include "words.h"
#include "gemm_words.h"

namespace baton {

// Keeps the compiler from computing several rows at once and spilling the sums for it.
template <typename T>
inline T kept(T value) {
#if defined(BATON_AVX512)
    asm volatile("" : "+v"(value));
#elif defined(BATON_AVX2)
    asm volatile("" : "+x"(value));
#endif
    return value;
}

struct DotPairs {
    using Sums = Vec;

    static Vec add(Vec sum, IntVec x, IntVec w) { return add_pairs(sum, x, w); }
};

// The sums of some rows with the two vectors of a panel's line. One row and the rest, not an array: what loops index, the
// compiler may leave in memory.
template <typename Dot, int Rows>
struct RowSums {
    typename Dot::Sums low{}, high{};
    RowSums<Dot, Rows - 1> rest;

    [[gnu::always_inline]] void add(const char* word, IntVec low_weights, IntVec high_weights) {
        const IntVec value = splat_word(word);
        low = kept(Dot::add(low, value, low_weights));
        high = kept(Dot::add(high, value, high_weights));
        rest.add(word + kLineBytes, low_weights, high_weights);
    }

    template <typename Sum>
    [[gnu::always_inline]] void store_to(Sum* target) const {
        static_assert(sizeof low == kWidth * sizeof(Sum));
        std::memcpy(target, &low, sizeof low);
        std::memcpy(target + kWidth, &high, sizeof high);
        rest.store_to(target + kWordPanel);
    }
};
template <typename Dot>
struct RowSums<Dot, 0> {
    void add(const char*, IntVec, IntVec) {}
    template <typename Sum>
    void store_to(Sum*) const {}
};

// `x` as `LineRows::tile`, `stride` bytes between the lines of a step.
template <typename Dot, int Rows, typename Sum>
void word_sums(const char* x, int64_t stride, int64_t words, const char* panel, Ahead ahead, Sum* out) {
    constexpr int64_t panel_line = 4 * kWordPanel, line_words = kLineBytes / 4;
    RowSums<Dot, Rows> sums;
    const char* next = ahead.from;
    const bool whole_lines = panel_line > 64 && ahead.step > 64;
    for (int64_t k = 0; k < words; x += stride) {
        const char* word = x;
        for (const int64_t end = std::min(k + line_words, words); k < end; ++k) {
            if (Rows >= kRideRows) ahead.ride.ask(k);
            prefetch(next);
            if (whole_lines) prefetch(next + 64);
            sums.add(word, load_words(panel), load_words(panel + 4 * kWidth));
            word += 4, panel += panel_line, next += ahead.step;
        }
    }
    sums.store_to(out);
}

// tile<Rows>() for a number of rows up to kWordRowTile.
template <typename Tile>
void with_rows(int64_t num_rows, const Tile& tile) {
    switch (num_rows) {
#define BATON_ROWS(ROWS) \
    case ROWS: return tile.template operator()<ROWS>();
        BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#if BATON_WIDTH == 16
        BATON_ROWS(7) BATON_ROWS(8) BATON_ROWS(9) BATON_ROWS(10) BATON_ROWS(11) BATON_ROWS(12)
#endif
#undef BATON_ROWS
    }
    __builtin_unreachable();  // tiles have 1 to kWordRowTile rows
}

}  // namespace baton
