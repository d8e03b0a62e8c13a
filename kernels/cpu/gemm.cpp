// y[m, n] = sum_k x[m, k] * w[n, k] + b[n], fp32 sums, for any number of rows.
//
// 1. `baton_pack` lays w out once as a 64-byte header and the panels that `gemm.h` describes; bf16 columns n and
//    n + kWidth of a panel share a 32-bit word (`load_pair`).
// 2. Rows of x are widened to fp32 once per call.
// 3. Threads share out panels; the tiles of `gemm.h` do the rest.
//
// Weights of other kinds go their own ways from here (`WeightKind`).
#include "gemm.h"

#include "gemm_amx.h"
#include "gemm_coded.h"
#include "gemm_dot.h"
#include "gemm_int8.h"

namespace baton {
namespace {

// Rows rows of x x Panels panels, all sums in registers.
template <int Rows, int Panels, typename W>
int64_t sum_tile(const float* x, int64_t in_features, const W* panel, Ahead ahead, float* out) {
    Vec sums[Rows][2 * Panels];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * Panels; ++v) sums[r][v] = Vec{};
    const auto add = [&](int64_t k) {
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p) {
            Vec low, high;
            load_pair(panel + (p * in_features + k) * kPanel, low, high);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const Vec value = splat(x[r * in_features + k]);
                sums[r][2 * p] = accumulate(sums[r][2 * p], value, low);
                sums[r][2 * p + 1] = accumulate(sums[r][2 * p + 1], value, high);
            }
        }
    };
    constexpr int unroll = Panels == 1 ? 4 : 2;
    constexpr int64_t line_bytes = kPanel * int64_t(sizeof(W));
    constexpr int64_t num_lines = std::max<int64_t>(1, unroll * line_bytes / 64);
    const char* next = ahead.from;
    int64_t k = 0;
    for (; k + unroll <= in_features; k += unroll, next += unroll * ahead.step) {
        if (Rows >= kRideRows)
#pragma GCC unroll 4
            for (int u = 0; u < unroll; ++u) ahead.ride.ask(k + u);
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p)
#pragma GCC unroll 8
            for (int i = 0; i < num_lines; ++i)
                prefetch(next + p * in_features * line_bytes + i * (unroll * ahead.step / num_lines));
#pragma GCC unroll 4
        for (int u = 0; u < unroll; ++u) add(k + u);
    }
    for (; k < in_features; ++k) add(k);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * Panels; ++v) store(out + r * kTileFloats + v * kWidth, sums[r][v]);
    return Panels;
}

template <int Rows, typename W>
int64_t tile_panels(int64_t panels_left, const float* x, int64_t in_features, const W* panel, Ahead ahead, float* sums) {
    constexpr int most = Rows == 1 ? 4 : Rows <= 3 || (kWidth == 16 && Rows <= 6) ? 2 : 1;
    if (panels_left >= most) return sum_tile<Rows, most>(x, in_features, panel, ahead, sums);
    if constexpr (most > 2)
        if (panels_left >= 2) return sum_tile<Rows, 2>(x, in_features, panel, ahead, sums);
    return sum_tile<Rows, 1>(x, in_features, panel, ahead, sums);
}

}  // namespace

template <typename W>
int64_t tile(int64_t num_rows, int64_t panels_left, const float* x, int64_t in_features, const W* panel, Ahead ahead,
             float* sums) {
    switch (num_rows) {
#define BATON_ROWS(ROWS) \
    case ROWS: return tile_panels<ROWS>(panels_left, x, in_features, panel, ahead, sums);
        BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#if BATON_WIDTH == 16
        BATON_ROWS(7) BATON_ROWS(8) BATON_ROWS(9) BATON_ROWS(10) BATON_ROWS(11) BATON_ROWS(12)
#endif
#undef BATON_ROWS
    }
    __builtin_unreachable();  // tiles have 1 to kRowTile rows
}
template int64_t tile(int64_t, int64_t, const float*, int64_t, const float*, Ahead, float*);
template int64_t tile(int64_t, int64_t, const float*, int64_t, const bf16*, Ahead, float*);

namespace {

// Where column n of a panel stands in its line.
template <typename W>
int64_t place(int64_t n) {
    return sizeof(W) == 2 ? n % kWidth * 2 + n / kWidth : n;
}

template <typename W>
void pack(const W* weight, int64_t out_features, int64_t in_features, W* panels) {
    for (int64_t first = 0; first < out_features; first += kPanel) {
        W* panel = panels + first * in_features;
        int64_t columns = std::min(kPanel, out_features - first);
        std::memset(static_cast<void*>(panel), 0, size_t(in_features * kPanel) * sizeof(W));
        for (int64_t n = 0; n < columns; ++n)
            for (int64_t k = 0; k < in_features; ++k)
                panel[k * kPanel + place<W>(n)] = weight[(first + n) * in_features + k];
    }
}

template <typename W, typename Y>
void linear(const float* x, int64_t num_rows, const PackedHeader& header, const W* panels, const float* bias, Y* y,
            int64_t num_threads) {
    const Store<Y> output{y, bias, header.out_features};
    parallel_ranges(num_threads, ceil_div(header.out_features, kPanel), 2, [&](int64_t begin, int64_t end) {
        gemm(x, num_rows, header.in_features, panels, begin, end, output);
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
    return int64_t(sizeof(PackedHeader)) + ceil_div(out_features, kPanel) * kPanel * in_features * element_bytes;
}

void baton_pack(const void* weight, int64_t out_features, int64_t in_features, int64_t element_bytes, void* packed) {
    PackedHeader header{kPackedMagic, out_features, in_features, element_bytes, kPanel, WeightKind::kFloat, 0, 0};
    std::memcpy(packed, &header, sizeof header);
    void* panels = static_cast<char*>(packed) + sizeof header;
    if (element_bytes == 2)
        pack(static_cast<const bf16*>(weight), out_features, in_features, static_cast<bf16*>(panels));
    else
        pack(static_cast<const float*>(weight), out_features, in_features, static_cast<float*>(panels));
}

// Out features of a packed weight, or -1 if `packed` is not one made for these panels.
int64_t baton_out_features(const void* packed, int64_t packed_bytes, int64_t in_features) {
    PackedHeader header;
    if (packed_bytes < int64_t(sizeof header)) return -1;
    std::memcpy(&header, packed, sizeof header);
    if (header.magic != kPackedMagic || header.in_features != in_features) return -1;
    bool fits = false;
    switch (header.kind) {
    case WeightKind::kFloat:
        fits = header.panel == kPanel && (header.element_bytes == 2 || header.element_bytes == 4) &&
               packed_bytes == baton_packed_bytes(header.out_features, in_features, header.element_bytes);
        break;
    case WeightKind::kAmxBf16:
        fits = amx_is_lent() && header.panel == kAmxPanel &&
               packed_bytes == amx_packed_bytes(header.out_features, in_features);
        break;
    case WeightKind::kAmxInt8:
        fits = amx_is_lent() && header.panel == kWordPanel &&
               packed_bytes == int8_packed_bytes(header.out_features, in_features);
        break;
    case WeightKind::kInt8:
    case WeightKind::kInt8Weights:
        fits = header.panel == kWordPanel && packed_bytes == int8_packed_bytes(header.out_features, in_features);
        break;
    case WeightKind::kDotBf16:
        fits = kHasDot && header.panel == kWordPanel && packed_bytes == dot_packed_bytes(header.out_features, in_features);
        break;
    case WeightKind::kNibbles:
    case WeightKind::kBytes:
    case WeightKind::kAmxNibbles:
    case WeightKind::kAmxBytes:
        fits = (is_amx_coded(header.kind) ? amx_is_lent() : kHasDot) && header.panel == kWordPanel &&
               in_features % kBlockSize == 0 && coded_fits(header, packed_bytes);
        break;
    }
    return fits ? header.out_features : -1;
}

// The WeightKind of a packed weight that `baton_out_features` accepts.
int64_t baton_weight_kind(const void* packed) { return int64_t(header_of(packed).kind); }

// x [num_rows, in], bias [out] or null, y [num_rows, out]; `packed` as checked by `baton_out_features`.
void baton_linear(const void* x, int64_t x_bf16, int64_t num_rows, const void* packed, const void* bias,
                  int64_t bias_bf16, void* y, int64_t y_bf16, int64_t num_threads) {
    static thread_local Scratch x_scratch, bias_scratch;
    PackedHeader header;
    std::memcpy(&header, packed, sizeof header);
    const float* rows = widen_all(x, x_bf16, num_rows * header.in_features, x_scratch);
    const float* wide_bias = widen_all(bias, bias_bf16, header.out_features, bias_scratch);
    if constexpr (kHasAmx)
        if (header.kind == WeightKind::kAmxBf16 || header.kind == WeightKind::kAmxInt8)
            return amx_linear(rows, num_rows, packed, wide_bias, y, y_bf16, num_threads);
    if constexpr (kHasDot)
        if (header.kind == WeightKind::kDotBf16)
            return dot_linear(rows, num_rows, packed, wide_bias, y, y_bf16, num_threads);
    if (is_coded(header.kind)) return coded_linear(rows, num_rows, packed, wide_bias, y, y_bf16, num_threads);
    if (header.kind != WeightKind::kFloat)
        return int8_linear(rows, num_rows, packed, wide_bias, y, y_bf16, num_threads);
    const char* panels = static_cast<const char*>(packed) + sizeof header;
    const bf16* half = reinterpret_cast<const bf16*>(panels);
    const float* full = reinterpret_cast<const float*>(panels);
    with_type(y, y_bf16, [&](auto* out) {
        if (header.element_bytes == 2)
            linear(rows, num_rows, header, half, wide_bias, out, num_threads);
        else
            linear(rows, num_rows, header, full, wide_bias, out, num_threads);
    });
}
}
