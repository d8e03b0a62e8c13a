// Packing, the tile products and the permission of `gemm_amx.h`.
#include "gemm_amx.h"

#include <cerrno>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(BATON_AMX_EMULATED)
#include "amx_emulated.h"
#elif defined(BATON_AMX)
#include <immintrin.h>
#endif

namespace baton {

#if defined(BATON_AMX)

namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {};
    uint8_t lines[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// To L2: what a later pass reads from there must not push this pass's lines out of L1.
inline void prefetch_l2(const char* address) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*address));
#else
    __builtin_prefetch(address, 0, 2);
#endif
}

// Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights. Tile numbers are part of the instructions.
#define BATON_DOT(SUMS, ROWS, WEIGHTS)                    \
    do {                                                  \
        if constexpr (Kind == WeightKind::kAmxBf16)       \
            _tile_dpbf16ps(SUMS, ROWS, WEIGHTS);          \
        else                                              \
            _tile_dpbusd(SUMS, ROWS, WEIGHTS);            \
    } while (false)

template <WeightKind Kind, bool Pair>
void multiply(int64_t height, int64_t steps, const char* rows, const char* panel, Ahead ahead, char* sums) {
    const char *second = rows + height * steps * kTileLineBytes, *next = panel + ahead.offset;
    int64_t asked = 0, due = 0;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Pair) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(6, panel, kTileLineBytes);
        _tile_loadd(4, rows, kTileLineBytes);
        BATON_DOT(0, 4, 6);
        _tile_loadd(7, panel + kTileBytes, kTileLineBytes);
        BATON_DOT(1, 4, 7);
        if constexpr (Pair) {
            _tile_loadd(5, second, kTileLineBytes);
            BATON_DOT(2, 5, 6);
            BATON_DOT(3, 5, 7);
            second += height * kTileLineBytes;
        }
        rows += height * kTileLineBytes;
        panel += kAmxPanelStep;
        for (due += ahead.step; asked < due; asked += kTileLineBytes) {
            if (ahead.step == kAmxPanelStep)
                prefetch(next + asked);
            else
                prefetch_l2(next + asked);
        }
    }
    constexpr int64_t line = kAmxPanel * 4;
    _tile_stored(0, sums, line);
    _tile_stored(1, sums + line / 2, line);
    if constexpr (Pair) {
        _tile_stored(2, sums + height * line, line);
        _tile_stored(3, sums + height * line + line / 2, line);
    }
}
#undef BATON_DOT

}  // namespace

AmxSession::AmxSession(int64_t height) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.line_bytes[tile] = uint16_t(kTileLineBytes);
        config.lines[tile] = uint8_t(tile < 6 ? height : kTileLines);
    }
    asm volatile("" : : "r"(&config) : "memory");  // some compilers think that the instruction reads a few bytes only
    _tile_loadconfig(&config);
}

AmxSession::~AmxSession() { _tile_release(); }

void amx_tiles(WeightKind kind, int64_t num_tiles, int64_t height, int64_t steps, const char* rows, const char* panel,
               Ahead ahead, void* sums) {
    asm volatile("" : : : "memory");  // nor do they know what a tile load reads
    char* target = static_cast<char*>(sums);
    if (kind == WeightKind::kAmxBf16 && num_tiles == 2)
        multiply<WeightKind::kAmxBf16, true>(height, steps, rows, panel, ahead, target);
    else if (kind == WeightKind::kAmxBf16)
        multiply<WeightKind::kAmxBf16, false>(height, steps, rows, panel, ahead, target);
    else if (num_tiles == 2)
        multiply<WeightKind::kAmxInt8, true>(height, steps, rows, panel, ahead, target);
    else
        multiply<WeightKind::kAmxInt8, false>(height, steps, rows, panel, ahead, target);
}

#endif  // BATON_AMX

void amx_bf16_rows(const float* x, int64_t in_features, const TileCut& cut, int64_t begin, int64_t end, char* target) {
    const int64_t steps = AmxRows::steps_of(in_features, 2);
    constexpr int64_t depth = kTileLineBytes / 2;
    for (int64_t m = begin; m < end; ++m)
        for (int64_t step = 0; step < steps; ++step) {
            bf16* line = reinterpret_cast<bf16*>(target + AmxRows::offset(cut, steps, m, step));
            const float* source = x + m * in_features + step * depth;
            const int64_t count = std::min(depth, in_features - step * depth);
            for (int64_t k = 0; k < depth; k += kWidth)
                store(line + k, k < count ? load_partial(source + k, count - k) : Vec{});
        }
}


int64_t amx_packed_bytes(int64_t out_features, int64_t in_features, int64_t element_bytes) {
    return int64_t(sizeof(PackedHeader)) +
           ceil_div(out_features, kAmxPanel) * AmxRows::steps_of(in_features, element_bytes) * kAmxPanelStep;
}

// Where weight [n, k] lies in its tiles: line by line the groups of elements that share a 32-bit word of rows.
void amx_pack(const void* weight, int64_t out_features, int64_t in_features, int64_t element_bytes, char* panels) {
    const int64_t steps = AmxRows::steps_of(in_features, element_bytes), group = 4 / element_bytes;
    const int64_t depth = kTileLines * group;
    std::memset(panels, 0, size_t(ceil_div(out_features, kAmxPanel) * steps * kAmxPanelStep));
    const char* source = static_cast<const char*>(weight);
    for (int64_t n = 0; n < out_features; ++n) {
        char* column = panels + n / kAmxPanel * steps * kAmxPanelStep + n % kAmxPanel / kTileLines * kTileBytes +
                       n % kTileLines * 4;
        for (int64_t k = 0; k < in_features; k += group) {
            const int64_t count = std::min(group, in_features - k);
            std::memcpy(column + k / depth * kAmxPanelStep + k % depth / group * kTileLineBytes, source,
                        size_t(count * element_bytes));
            source += count * element_bytes;
        }
    }
}

bool amx_fits(const PackedHeader& header, int64_t packed_bytes, int64_t in_features) {
    const int64_t element_bytes = header.kind == WeightKind::kAmxBf16 ? 2 : 1;
    return kHasAmx && header.panel == kAmxPanel && header.in_features == in_features &&
           header.element_bytes == element_bytes &&
           packed_bytes == amx_packed_bytes(header.out_features, in_features, element_bytes);
}

#if defined(BATON_AMX)
template <typename Y>
void amx_linear(const float* x, int64_t num_rows, const PackedHeader& header, const char* panels, const float* bias,
                Y* y, int64_t num_threads) {
    static thread_local Scratch scratch;
    const TileCut cut(num_rows);
    const int64_t steps = AmxRows::steps_of(header.in_features, 2);
    char* tiles = reinterpret_cast<char*>(scratch.floats(AmxRows::bytes(cut, steps) / 4));
    amx_bf16_rows(x, header.in_features, cut, 0, num_rows, tiles);
    const AmxRows rows{cut, steps, tiles};
    const Store<Y> output{y, bias, header.out_features};
    parallel_ranges(num_threads, ceil_div(header.out_features, kAmxPanel), 1, [&](int64_t begin, int64_t end) {
        amx_gemm<WeightKind::kAmxBf16>(rows, panels, begin, end, output);
    });
}
template void amx_linear(const float*, int64_t, const PackedHeader&, const char*, const float*, float*, int64_t);
template void amx_linear(const float*, int64_t, const PackedHeader&, const char*, const float*, bf16*, int64_t);
#endif

}  // namespace baton

using namespace baton;

extern "C" {

// Asks the kernel for the unit's registers, for every thread of this process, now and later; asking again is free.
// 0: granted; -1: not compiled in; else the error number of the refusal.
int64_t baton_amx_acquire() {
#if defined(BATON_AMX_EMULATED)
    amx_emulated::permitted = true;
    return 0;
#elif defined(BATON_AMX)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
#else
    return -1;
#endif
}

int64_t baton_amx_packed_bytes(int64_t out_features, int64_t in_features, int64_t element_bytes) {
    return amx_packed_bytes(out_features, in_features, element_bytes);
}

void baton_amx_pack(const void* weight, int64_t out_features, int64_t in_features, int64_t element_bytes,
                    void* packed) {
    const WeightKind kind = element_bytes == 2 ? WeightKind::kAmxBf16 : WeightKind::kAmxInt8;
    const PackedHeader header{kPackedMagic, out_features, in_features, element_bytes, kAmxPanel, kind, {}};
    std::memcpy(packed, &header, sizeof header);
    amx_pack(weight, out_features, in_features, element_bytes, static_cast<char*>(packed) + sizeof header);
}
}
