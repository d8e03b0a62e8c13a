// y[m, n] = sum_k x[m, k] * w[n, k] + b[n], fp32 sums, for any number of rows.
//
// 1. `baton_pack` lays w out once as a 64-byte header and panels [ceil(N / kPanel)][K][kPanel] of the weight's
//    own dtype: a step over k reads one contiguous line per panel.
// 2. Rows of x are widened to fp32 once per call.
// 3. A tile of up to kRowTile rows x some panels lives in registers for the whole k loop and is rounded once.
//    bf16 weights are widened on their way to the registers, which costs next to nothing beside the sums.
//
// Each y[m, n] is one chain of fused multiply-adds in k order, whatever the tile it fell in: bits do not
// depend on M, on the row's position, or on threads, which share out panels only.
//
// A matrix-unit kernel (AMX) would be one more tile function with its own panel layout and layout name.
#include "simd.h"
#include "threads.h"

namespace baton {
namespace {

constexpr int64_t kPanel = 2 * kWidth;                     // output features side by side in a panel
constexpr int64_t kRowTile = kWidth == 16 ? 12 : 6;        // rows x 2 accumulators fill the registers
constexpr int64_t kRowBlockBytes = 192 * 1024;             // fp32 rows that stay in L2 while panels pass
constexpr int64_t kPrefetchBytes = 1024;
constexpr uint64_t kMagic = 0x314c454e41504e42ull;         // "BNPANEL1"

struct Header {
    uint64_t magic;
    int64_t out_features, in_features, element_bytes, panel;
    int64_t reserved[3];
};
static_assert(sizeof(Header) == 64);

template <typename W>
void pack(const W* weight, int64_t out_features, int64_t in_features, W* panels) {
    for (int64_t first = 0; first < out_features; first += kPanel) {
        W* panel = panels + first * in_features;
        int64_t columns = std::min(kPanel, out_features - first);
        std::memset(static_cast<void*>(panel), 0, size_t(in_features * kPanel) * sizeof(W));
        for (int64_t n = 0; n < columns; ++n)
            for (int64_t k = 0; k < in_features; ++k)
                panel[k * kPanel + n] = weight[(first + n) * in_features + k];
    }
}

template <typename Y>
struct Output {
    Y* data;
    const float* bias;  // or null
    int64_t out_features;

    void write(int64_t row, int64_t column, Vec value) const {
        int64_t count = out_features - column;
        if (count <= 0) return;
        if (bias != nullptr) value += load_partial(bias + column, count);
        store_partial(data + row * out_features + column, value, count);
    }
};

// Rows [row, row + Rows) x Panels panels from `panel` on, which starts at output feature `column`.
template <int Rows, int Panels, typename W, typename Y>
void tile(const float* x, int64_t in_features, int64_t row, const W* panel, int64_t column, const Output<Y>& y) {
    const float* rows = x + row * in_features;
    Vec sums[Rows][2 * Panels];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * Panels; ++v) sums[r][v] = Vec{};
    for (int64_t k = 0; k < in_features; ++k) {
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p) {
            const W* weights = panel + (p * in_features + k) * kPanel;
            __builtin_prefetch(reinterpret_cast<const char*>(weights) + kPrefetchBytes);
            Vec low = load(weights), high = load(weights + kWidth);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                Vec value = splat(rows[r * in_features + k]);
                sums[r][2 * p] = fma(value, low, sums[r][2 * p]);
                sums[r][2 * p + 1] = fma(value, high, sums[r][2 * p + 1]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * Panels; ++v) y.write(row + r, column + v * kWidth, sums[r][v]);
}

// Rows rows against as many of the `panels_left` panels as keep every multiply-add pipe busy; returns how many.
template <int Rows, typename W, typename Y>
int64_t tile_panels(int64_t panels_left, const float* x, int64_t in_features, int64_t row, const W* panel,
                    int64_t column, const Output<Y>& y) {
    constexpr int together = Rows == 1 ? 4 : Rows == 2 || (kWidth == 16 && Rows <= 4) ? 2 : 1;
    if (panels_left >= together) {
        tile<Rows, together>(x, in_features, row, panel, column, y);
        return together;
    }
    tile<Rows, 1>(x, in_features, row, panel, column, y);
    return 1;
}

template <typename W, typename Y>
int64_t tile_rows(int64_t rows, int64_t panels_left, const float* x, int64_t in_features, int64_t row, const W* panel,
                  int64_t column, const Output<Y>& y) {
    switch (rows) {
#define BATON_ROWS(ROWS) \
    case ROWS: return tile_panels<ROWS>(panels_left, x, in_features, row, panel, column, y);
        BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#if BATON_WIDTH == 16
        BATON_ROWS(7) BATON_ROWS(8) BATON_ROWS(9) BATON_ROWS(10) BATON_ROWS(11) BATON_ROWS(12)
#endif
#undef BATON_ROWS
    }
    __builtin_unreachable();  // tiles have 1 to kRowTile rows
}

// Rows of a block, cut into tiles of about equal height, against panels [begin, end): each panel is read once.
template <typename W, typename Y>
void row_block(const float* x, int64_t in_features, int64_t row_begin, int64_t row_end, const W* panels,
               int64_t begin, int64_t end, const Output<Y>& y) {
    const int64_t num_rows = row_end - row_begin, num_tiles = ceil_div(num_rows, kRowTile);
    for (int64_t p = begin; p < end;) {
        const int64_t panels_left = num_tiles == 1 ? end - p : 1;
        int64_t taken = 0;
        for (int64_t t = 0; t < num_tiles; ++t) {
            const int64_t from = num_rows * t / num_tiles, to = num_rows * (t + 1) / num_tiles;
            taken = tile_rows(to - from, panels_left, x, in_features, row_begin + from,
                              panels + p * in_features * kPanel, p * kPanel, y);
        }
        p += taken;
    }
}

template <typename W, typename Y>
void linear(const float* x, int64_t num_rows, const Header& header, const W* panels, const float* bias, Y* y,
            int64_t num_threads) {
    const int64_t in_features = header.in_features;
    const Output<Y> output{y, bias, header.out_features};
    const int64_t block = std::max(2 * kRowTile, kRowBlockBytes / 4 / std::max<int64_t>(in_features, 1));
    const int64_t num_blocks = ceil_div(num_rows, block);
    parallel_ranges(num_threads, ceil_div(header.out_features, kPanel), 2, [&](int64_t begin, int64_t end) {
        for (int64_t b = 0; b < num_blocks; ++b)
            row_block(x, in_features, num_rows * b / num_blocks, num_rows * (b + 1) / num_blocks, panels, begin, end,
                      output);
    });
}

const float* widen_all(const void* source, bool is_bf16, int64_t count, Scratch& scratch) {
    if (source == nullptr || !is_bf16) return static_cast<const float*>(source);
    const bf16* narrow = static_cast<const bf16*>(source);
    float* wide = scratch.floats(count);
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store(wide + i, load(narrow + i));
    for (; i < count; ++i) wide[i] = widen(narrow[i]);
    return wide;
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

int64_t baton_panel_width() { return kPanel; }

int64_t baton_packed_bytes(int64_t out_features, int64_t in_features, int64_t element_bytes) {
    return int64_t(sizeof(Header)) + ceil_div(out_features, kPanel) * kPanel * in_features * element_bytes;
}

void baton_pack(const void* weight, int64_t out_features, int64_t in_features, int64_t element_bytes, void* packed) {
    Header header{kMagic, out_features, in_features, element_bytes, kPanel, {}};
    std::memcpy(packed, &header, sizeof header);
    void* panels = static_cast<char*>(packed) + sizeof header;
    if (element_bytes == 2)
        pack(static_cast<const bf16*>(weight), out_features, in_features, static_cast<bf16*>(panels));
    else
        pack(static_cast<const float*>(weight), out_features, in_features, static_cast<float*>(panels));
}

// Out features of a packed weight, or -1 if `packed` is not one made for these panels.
int64_t baton_out_features(const void* packed, int64_t packed_bytes, int64_t in_features) {
    Header header;
    if (packed_bytes < int64_t(sizeof header)) return -1;
    std::memcpy(&header, packed, sizeof header);
    bool fits = header.magic == kMagic && header.panel == kPanel && header.in_features == in_features &&
                (header.element_bytes == 2 || header.element_bytes == 4) &&
                packed_bytes == baton_packed_bytes(header.out_features, in_features, header.element_bytes);
    return fits ? header.out_features : -1;
}

// x [num_rows, in], bias [out] or null, y [num_rows, out]; `packed` as checked by `baton_out_features`.
void baton_linear(const void* x, int64_t x_bf16, int64_t num_rows, const void* packed, const void* bias,
                  int64_t bias_bf16, void* y, int64_t y_bf16, int64_t num_threads) {
    static thread_local Scratch x_scratch, bias_scratch;
    Header header;
    std::memcpy(&header, packed, sizeof header);
    const float* rows = widen_all(x, x_bf16, num_rows * header.in_features, x_scratch);
    const float* wide_bias = widen_all(bias, bias_bf16, header.out_features, bias_scratch);
    const char* panels = static_cast<const char*>(packed) + sizeof header;
    const bf16* half = reinterpret_cast<const bf16*>(panels);
    const float* full = reinterpret_cast<const float*>(panels);
    if (header.element_bytes == 2 && y_bf16)
        linear(rows, num_rows, header, half, wide_bias, static_cast<bf16*>(y), num_threads);
    else if (header.element_bytes == 2)
        linear(rows, num_rows, header, half, wide_bias, static_cast<float*>(y), num_threads);
    else if (y_bf16)
        linear(rows, num_rows, header, full, wide_bias, static_cast<bf16*>(y), num_threads);
    else
        linear(rows, num_rows, header, full, wide_bias, static_cast<float*>(y), num_threads);
}
}
