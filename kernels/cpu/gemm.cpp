// y[m, n] = sum_k x[m, k] * w[n, k] + b[n], fp32 sums, for any number of rows.
//
// 1. `baton_pack` lays w out once as a 64-byte header and panels [ceil(N / kPanel)][K][kPanel] of the weight's
//    own dtype: a step over k reads one contiguous line per panel.
// 2. Rows of x are widened to fp32 once per call.
// 3. A tile of up to kRowTile rows x some panels lives in registers for the whole k loop and is rounded once.
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
    Vec sums[Rows][2 * Panels] = {};
    for (int64_t k = 0; k < in_features; ++k) {
        for (int p = 0; p < Panels; ++p) {
            const W* weights = panel + (p * in_features + k) * kPanel;
            if (sizeof(W) == 2) __builtin_prefetch(reinterpret_cast<const char*>(weights) + kPrefetchBytes);
            Vec low = load(weights), high = load(weights + kWidth);
            for (int r = 0; r < Rows; ++r) {
                Vec value = splat(rows[r * in_features + k]);
                sums[r][2 * p] = fma(value, low, sums[r][2 * p]);
                sums[r][2 * p + 1] = fma(value, high, sums[r][2 * p + 1]);
            }
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < 2 * Panels; ++v) y.write(row + r, column + v * kWidth, sums[r][v]);
}

template <int Panels, typename W, typename Y>
void tile_rows(int64_t num_rows, const float* x, int64_t in_features, int64_t row, const W* panel, int64_t column,
               const Output<Y>& y) {
    switch (num_rows) {
#define BATON_TILE(ROWS) \
    case ROWS: return tile<ROWS, Panels>(x, in_features, row, panel, column, y);
        BATON_TILE(1) BATON_TILE(2) BATON_TILE(3) BATON_TILE(4) BATON_TILE(5) BATON_TILE(6)
#if defined(__AVX512F__)
        BATON_TILE(7) BATON_TILE(8) BATON_TILE(9) BATON_TILE(10) BATON_TILE(11) BATON_TILE(12)
#endif
#undef BATON_TILE
    }
}

// Panels taken together so that few rows still keep every multiply-add pipe busy.
constexpr int64_t panels_together(int64_t num_rows) { return num_rows == 1 ? 4 : num_rows <= kRowTile / 2 ? 2 : 1; }

// All rows of a block against panels [begin, end).
template <typename W, typename Y>
void row_block(const float* x, int64_t in_features, int64_t row_begin, int64_t row_end, const W* panels,
               int64_t begin, int64_t end, const Output<Y>& y) {
    int64_t num_rows = row_end - row_begin, num_tiles = ceil_div(num_rows, kRowTile);
    if (num_tiles <= 2) {  // decode: the weights are read from memory once, as they are
        int64_t together = panels_together(ceil_div(num_rows, num_tiles));
        for (int64_t p = begin; p < end;) {
            int64_t count = end - p >= together ? together : end - p >= 2 && together > 1 ? 2 : 1;
            const W* panel = panels + p * in_features * kPanel;
            for (int64_t t = 0; t < num_tiles; ++t) {
                int64_t from = row_begin + num_rows * t / num_tiles;
                int64_t rows = row_begin + num_rows * (t + 1) / num_tiles - from;
                if (count == 4)
                    tile<1, 4>(x, in_features, from, panel, p * kPanel, y);
                else if (count == 2)
                    switch (rows) {
                        case 1: tile<1, 2>(x, in_features, from, panel, p * kPanel, y); break;
                        case 2: tile<2, 2>(x, in_features, from, panel, p * kPanel, y); break;
                        case 3: tile<3, 2>(x, in_features, from, panel, p * kPanel, y); break;
#if defined(__AVX512F__)
                        case 4: tile<4, 2>(x, in_features, from, panel, p * kPanel, y); break;
                        case 5: tile<5, 2>(x, in_features, from, panel, p * kPanel, y); break;
                        case 6: tile<6, 2>(x, in_features, from, panel, p * kPanel, y); break;
#endif
                    }
                else
                    tile_rows<1>(rows, x, in_features, from, panel, p * kPanel, y);
            }
            p += count;
        }
        return;
    }
    static thread_local Scratch scratch;  // prefill: each panel is widened once for all the block's rows
    for (int64_t p = begin; p < end; ++p) {
        const W* panel = panels + p * in_features * kPanel;
        float* wide = scratch.floats(in_features * kPanel);
        for (int64_t i = 0; i < in_features * kPanel; i += kWidth) store(wide + i, load(panel + i));
        for (int64_t t = 0; t < num_tiles; ++t) {
            int64_t from = row_begin + num_rows * t / num_tiles;
            int64_t rows = row_begin + num_rows * (t + 1) / num_tiles - from;
            tile_rows<1>(rows, x, in_features, from, wide, p * kPanel, y);
        }
    }
}

template <typename W, typename Y>
void linear(const float* x, int64_t num_rows, const Header& header, const W* panels, const float* bias, Y* y,
            int64_t num_threads) {
    int64_t in_features = header.in_features;
    Output<Y> output{y, bias, header.out_features};
    int64_t block = std::max(2 * kRowTile, kRowBlockBytes / 4 / std::max<int64_t>(in_features, 1));
    int64_t num_blocks = ceil_div(num_rows, block);
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
