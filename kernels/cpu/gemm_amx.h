// Products by the matrix unit (AMX) of Intel processors since Sapphire Rapids: rows and weights of bf16, or of int8.
//
// A tile is 16 lines of 64 bytes: 32 bf16 or 64 int8 of one row, or of 16 output features the pairs (quadruples) of
// 16 steps over k. One instruction multiplies a tile of rows by a tile of weights into a tile of 16 x 16 sums.
//
// 1. A weight is packed once: panels [ceil(N / kAmxPanel)][ceil(K / depth)][2 tiles], zeros where N or K end, so that
//    a panel is one stream of memory. Each kind has its own number in the header.
// 2. Rows are laid out in tiles too (`AmxRows`), zeros past K. They are cut into tiles of equal height, an even number
//    of them beyond one: heights are at most 16, and the unit's time is that of the rows a tile has.
// 3. A pair of row tiles meets the two weight tiles of a panel in four tiles of sums, which stay in the unit for all
//    of K and are handed to `Output` once. One tile of rows alone (up to 16 rows) is bound by memory.
//
// Bits: each y[m, n] adds the products of one tile depth after another, in k order, whatever the height of its tile
// and the number of rows: within a tile the order is the hardware's and depends on neither.
//
// Where the compiler or the target has no AMX, `kHasAmx` is false and nothing of this may be called.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm.h"

#if defined(BATON_AMX_EMULATED) || \
    (defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define BATON_AMX
#endif

namespace baton {

#if defined(BATON_AMX)
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;
#endif

constexpr int64_t kTileLines = 16, kTileLineBytes = 64, kTileBytes = kTileLines * kTileLineBytes;
constexpr int64_t kAmxPanel = 32;                     // output features of a panel: two tiles
constexpr int64_t kAmxPanelStep = 2 * kTileBytes;     // bytes of a panel for one tile depth of k
constexpr int64_t kAmxRowBlockBytes = 1024 * 1024;    // tiles of rows that stay in L2 while panels pass
constexpr int64_t kAmxPrefetchBytes = 4096;

// num_rows rows in tiles of `height` rows; the last rows of the last tile may be missing.
struct TileCut {
    int64_t num_rows, num_tiles, height;

    explicit TileCut(int64_t rows)
        : num_rows(rows),
          num_tiles(rows <= kTileLines ? 1 : 2 * ceil_div(rows, 2 * kTileLines)),
          height(ceil_div(rows, num_tiles)) {}
};

// Rows as the unit reads them: [num_tiles][steps][height][64 bytes], a step being one tile depth of k. Rows of
// padding hold anything: their sums are never looked at.
struct AmxRows {
    TileCut cut;
    int64_t steps;
    const char* data;

    static int64_t steps_of(int64_t in_features, int64_t element_bytes) {
        return ceil_div(in_features * element_bytes, kTileLineBytes);
    }
    static int64_t bytes(const TileCut& cut, int64_t steps) { return cut.num_tiles * cut.height * steps * kTileLineBytes; }

    // Where line `step` of row m lies.
    static int64_t offset(const TileCut& cut, int64_t steps, int64_t m, int64_t step) {
        return ((m / cut.height * steps + step) * cut.height + m % cut.height) * kTileLineBytes;
    }
};

// Rows [begin, end) of x [num_rows, in_features], rounded to bf16, to their places in `target` (`AmxRows::bytes`).
void amx_bf16_rows(const float* x, int64_t in_features, const TileCut& cut, int64_t begin, int64_t end, char* target);

// Bytes of a packed weight, header and all; whether one is what its header says and this build can multiply it.
int64_t amx_packed_bytes(int64_t out_features, int64_t in_features, int64_t element_bytes);
bool amx_fits(const PackedHeader& header, int64_t packed_bytes, int64_t in_features);

// y = x w + bias on several threads, for Y float or bf16.
template <typename Y>
void amx_linear(const float* x, int64_t num_rows, const PackedHeader& header, const char* panels, const float* bias,
                Y* y, int64_t num_threads);

// The unit on this thread, set up for tiles of a height; it is released at the end, so that the thread's state is
// small again whenever it waits.
class AmxSession {
public:
    explicit AmxSession(int64_t height);
    ~AmxSession();
    AmxSession(const AmxSession&) = delete;
    AmxSession& operator=(const AmxSession&) = delete;
};

// `num_tiles` (1 or 2) tiles of rows x one panel: sums[row * kAmxPanel + column], fp32 or int32. `ahead` counts from
// the panel's start, and per step.
void amx_tiles(WeightKind kind, int64_t num_tiles, int64_t height, int64_t steps, const char* rows, const char* panel,
               Ahead ahead, void* sums);

// Rows x panels [begin, end); `output.write(row, column, value)` as in `gemm.h`, with float sums or, for int8, int32.
inline Vec load_sums(const float* sums) { return load(sums); }
inline IntVec load_sums(const int32_t* sums) {
    IntVec result;
    std::memcpy(&result, sums, sizeof result);
    return result;
}

template <WeightKind Kind, typename Output>
void amx_gemm(const AmxRows& rows, const char* panels, int64_t begin, int64_t end, const Output& output) {
    using Sum = std::conditional_t<Kind == WeightKind::kAmxBf16, float, int32_t>;
    if (rows.cut.num_rows == 0 || begin >= end) return;
    const TileCut& cut = rows.cut;
    const int64_t tile_bytes = cut.height * rows.steps * kTileLineBytes, panel_bytes = rows.steps * kAmxPanelStep;
    const int64_t num_groups = ceil_div(cut.num_tiles, 2);  // pairs of tiles, or one tile alone
    const int64_t num_blocks = ceil_div(cut.num_tiles * tile_bytes, kAmxRowBlockBytes);
    const AmxSession session(cut.height);
    alignas(64) Sum sums[2 * kTileLines * kAmxPanel];
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = num_groups * block / num_blocks, last = num_groups * (block + 1) / num_blocks;
        for (int64_t panel = begin; panel < end; ++panel)
            for (int64_t group = first; group < last; ++group) {
                const int64_t passes = last - first, pass = group - first;
                const Ahead ahead = passes == 1 ? Ahead{kAmxPrefetchBytes, kAmxPanelStep}
                                                : Ahead{panel_bytes + panel_bytes * pass / passes, kAmxPanelStep / passes};
                amx_tiles(Kind, std::min<int64_t>(2, cut.num_tiles), cut.height, rows.steps,
                          rows.data + 2 * group * tile_bytes, panels + panel * panel_bytes, ahead, sums);
                const int64_t from = 2 * group * cut.height;
                const int64_t count = std::min(2 * cut.height, cut.num_rows - from);
                for (int64_t row = 0; row < count; ++row)
                    for (int64_t column = 0; column < kAmxPanel; column += kWidth)
                        output.write(from + row, panel * kAmxPanel + column, load_sums(sums + row * kAmxPanel + column));
            }
    }
}

}  // namespace baton
