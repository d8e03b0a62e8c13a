// Packing, the tile products and the permission of `gemm_amx.h`.
#include "gemm_amx.h"

#include <atomic>
#include <cerrno>
#include <type_traits>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "amx_tiles.h"

namespace baton {

#if defined(BATON_AMX)

namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {};
    uint8_t lines[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights; tile numbers are part of the instructions. Rows are unsigned
// bytes and weights signed ones, if they are bytes.
#define BATON_TILE_DOT(SUMS, ROWS, WEIGHTS)         \
    do {                                            \
        if constexpr (kIsBf16)                      \
            _tile_dpbf16ps(SUMS, ROWS, WEIGHTS);    \
        else                                        \
            _tile_dpbusd(SUMS, ROWS, WEIGHTS);      \
    } while (false)

template <bool Pair, typename Sum>
void multiply(int64_t height, int64_t steps, const char* rows, const char* panel, Ahead ahead, Sum* sums) {
    constexpr bool kIsBf16 = std::is_same_v<Sum, float>;
    constexpr int64_t stride = kIsBf16 ? kLineBytes : 2 * kLineBytes;  // between lines of a weight's tile
    constexpr int64_t right = kIsBf16 ? kTileBytes : kLineBytes;           // from the left to the right tile
    const int64_t row_bytes = height * kLineBytes;
    const char *lower = rows + steps * row_bytes, *next = ahead.from;
    int64_t asked = 0, due = 0;
    asm volatile("" : : : "memory");  // some compilers do not know what a tile load reads
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Pair) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(6, panel, stride);
        _tile_loadd(4, rows, kLineBytes);
        BATON_TILE_DOT(0, 4, 6);
        _tile_loadd(7, panel + right, stride);
        BATON_TILE_DOT(1, 4, 7);
        if constexpr (Pair) {
            _tile_loadd(5, lower, kLineBytes);
            BATON_TILE_DOT(2, 5, 6);
            BATON_TILE_DOT(3, 5, 7);
            lower += row_bytes;
        }
        rows += row_bytes;
        panel += kAmxStepBytes;
        for (due += ahead.step; asked < due; asked += kLineBytes) {
            if (ahead.step == kAmxStepBytes)
                prefetch(next + asked);
            else
                prefetch_l2(next + asked);  // for a later pass: this one's lines stay in L1
        }
    }
    constexpr int64_t line = kAmxPanel * 4;
    Sum* below = sums + height * kAmxPanel;
    _tile_stored(0, sums, line);
    _tile_stored(1, sums + kTileLines, line);
    if constexpr (Pair) {
        _tile_stored(2, below, line);
        _tile_stored(3, below + kTileLines, line);
    }
}
#undef BATON_TILE_DOT

}  // namespace

AmxSession::AmxSession(const Heights& heights) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.line_bytes[tile] = uint16_t(kLineBytes);
        config.lines[tile] = uint8_t(heights[size_t(tile)]);
    }
    asm volatile("" : : "r"(&config) : "memory");  // some compilers think that a part of it is read
    _tile_loadconfig(&config);
}

AmxSession::~AmxSession() { _tile_release(); }

void amx_tiles(bool pair, int64_t height, int64_t steps, const char* rows, const char* panel, Ahead ahead, float* sums) {
    (pair ? multiply<true, float> : multiply<false, float>)(height, steps, rows, panel, ahead, sums);
}

void amx_tiles(bool pair, int64_t height, int64_t steps, const char* rows, const char* panel, Ahead ahead, int32_t* sums) {
    (pair ? multiply<true, int32_t> : multiply<false, int32_t>)(height, steps, rows, panel, ahead, sums);
}

namespace {

template <typename Y>
void linear(const float* x, int64_t num_rows, const void* packed, const float* bias, Y* y, int64_t num_threads) {
    static thread_local Scratch lines, scales;
    const PackedHeader& header = header_of(packed);
    const bool is_bf16 = header.kind == WeightKind::kAmxBf16;
    const int64_t in_features = header.in_features;
    const Int8Rows rows{LineRows::in(lines, amx_cut(num_rows), (is_bf16 ? 2 : 1) * in_features), scales.floats(num_rows)};
    for (int64_t m = 0; m < num_rows; ++m) {
        if (is_bf16)
            narrow_row(x + m * in_features, in_features, m, rows.lines);
        else
            rows.quantize(x + m * in_features, in_features, m);
    }
    const Store<Y> output{y, bias, header.out_features};
    parallel_ranges(num_threads, ceil_div(header.out_features, kAmxPanel), 1, [&](int64_t begin, int64_t end) {
        if (is_bf16)
            amx_gemm_bf16(rows.lines, bf16_panels(rows.lines, static_cast<const char*>(packed) + sizeof header), begin,
                          end, output);
        else
            amx_gemm_int8(rows, Int8Weight(packed), begin, end, output);
    });
}

}  // namespace

void amx_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                int64_t num_threads) {
    with_type(y, y_bf16, [&](auto* out) { linear(x, num_rows, packed, bias, out, num_threads); });
}

#endif  // BATON_AMX

namespace {
std::atomic<bool> lent{false};  // what the kernel answered; it does not change its mind
}

bool amx_is_lent() { return lent.load(std::memory_order_relaxed); }

int64_t amx_packed_bytes(int64_t out_features, int64_t in_features) {
    const int64_t panel_bytes = LineRows::steps_of(2 * in_features) * kAmxStepBytes;
    return int64_t(sizeof(PackedHeader)) + ceil_div(out_features, kAmxPanel) * panel_bytes;
}

}  // namespace baton

using namespace baton;

extern "C" {

// Asks the kernel for the unit's registers, for every thread of this process, now and later; asking again is free.
// 0: granted; -1: not compiled in; else the error number of the refusal.
int64_t baton_amx_acquire() {
#if defined(BATON_AMX_EMULATED)
    amx_emulated::permitted = true;
    lent = true;
    return 0;
#elif defined(BATON_AMX)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return errno;
    lent = true;
    return 0;
#else
    return -1;
#endif
}

int64_t baton_amx_packed_bytes(int64_t out_features, int64_t in_features) {
    return amx_packed_bytes(out_features, in_features);
}

// weight [out, in] bf16: column n of a tile is word n of its lines, each word two values of k.
void baton_amx_pack(const void* weight, int64_t out_features, int64_t in_features, void* packed) {
    std::memset(packed, 0, size_t(amx_packed_bytes(out_features, in_features)));
    const PackedHeader header{kPackedMagic, out_features, in_features, 2, kAmxPanel, WeightKind::kAmxBf16, 0, 0};
    std::memcpy(packed, &header, sizeof header);
    char* panels = static_cast<char*>(packed) + sizeof header;
    const int64_t panel_bytes = LineRows::steps_of(2 * in_features) * kAmxStepBytes;
    const bf16* row = static_cast<const bf16*>(weight);
    for (int64_t n = 0; n < out_features; ++n, row += in_features) {
        char* column = panels + n / kAmxPanel * panel_bytes + n % kAmxPanel / kTileLines * kTileBytes + n % kTileLines * 4;
        for (int64_t k = 0; k < in_features; k += 2)
            std::memcpy(column + k / 32 * kAmxStepBytes + k % 32 / 2 * kLineBytes, row + k,
                        size_t(std::min<int64_t>(2, in_features - k)) * sizeof(bf16));
    }
}
}
