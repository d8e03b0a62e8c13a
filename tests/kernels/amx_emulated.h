// AMX in plain C++: the tile intrinsics that `amx_tiles.h` and `gemm_amx.cpp` use, for machines that have none.
//
// Numerics are those of the operation sections of Intel's manual (SDM vol. 2, TDPBF16PS, TDPBSSD, TDPBUSD): per output two
// chains of fused multiply-adds, one for the even elements of the pairs and one for the odd, both from 0 in k order;
// their sum is added to the tile. Every result is rounded to nearest even; subnormal inputs count as zero, subnormal
// results become zero. What would fault on a machine (no permission, no configuration, sizes that do not fit, a tile
// that is source and target) ends the process with one line.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// All else around it is compiled fast (`tests/support/isa_emulation.py`); this is where its tests spend their time.
#pragma GCC push_options
#pragma GCC optimize("O1")

namespace amx_emulated {

struct Tile {
    int64_t rows = 0, row_bytes = 0;
    alignas(64) unsigned char data[16][64] = {};
};
struct TileFile {
    bool configured = false;
    Tile tiles[8];
};
inline thread_local TileFile file;
inline std::atomic<bool> permitted{false};

[[noreturn]] inline void fault(const char* what) {
    std::fprintf(stderr, "AMX emulation: %s\n", what);
    std::abort();
}

inline Tile& tile(int index) {
    if (!file.configured) fault("a tile instruction without a configuration");
    if (index < 0 || index > 7 || file.tiles[index].rows == 0) fault("a tile that is not configured");
    return file.tiles[index];
}

[[gnu::always_inline]] inline float flushed(float value) {
    return __builtin_fabsf(value) < 0x1p-126f ? __builtin_copysignf(0.0f, value) : value;
}

// sum + a * b of values that are no subnormals. Whether the result is one is seen before subnormals round more coarsely: what
// becomes the smallest normal number by that alone is zero.
[[gnu::always_inline]] inline float multiply_add(float a, float b, float sum) {
    const float result = __builtin_fmaf(a, b, sum);
    if (__builtin_fabsf(result) != 0x1p-126f) return flushed(result);
    const float finer = __builtin_fmaf(a * 0x1p24f, b, sum * 0x1p24f);  // infinite where the result is exact
    return __builtin_fabsf(finer) < 0x1p-102f ? __builtin_copysignf(0.0f, result) : result;
}

[[gnu::always_inline]] inline float from_bf16(uint16_t bits) { return flushed(__builtin_bit_cast(float, uint32_t(bits) << 16)); }

// `row(target row, row of A, B)` for tiles whose sizes fit.
template <typename Row>
inline void multiply(int target, int left, int right, const Row& row) {
    if (target == left || target == right || left == right) fault("a tile used twice in one product");
    Tile &c = tile(target), &a = tile(left), &b = tile(right);
    if (c.rows != a.rows || c.row_bytes != b.row_bytes || b.rows != a.row_bytes / 4)
        fault("tiles whose sizes do not fit");
    for (int64_t m = 0; m < c.rows; ++m) row(c.data[m], a.data[m], b);
}

template <typename Left, typename Right>
inline void multiply_bytes(int target, int left, int right) {
    multiply(target, left, right, [](unsigned char* sums, const unsigned char* a, const Tile& b) {
        int32_t line[16];
        std::memcpy(line, sums, sizeof line);
        for (int64_t k = 0; k < b.rows; ++k)
            for (int64_t n = 0; n < b.row_bytes / 4; ++n)
                for (int64_t i = 0; i < 4; ++i)  // wraps around, as the instruction does
                    line[n] = int32_t(uint32_t(line[n]) +
                                      uint32_t(int32_t(Left(a[4 * k + i])) * int32_t(Right(b.data[k][4 * n + i]))));
        std::memcpy(sums, line, size_t(b.row_bytes));
    });
}

inline void load_config(const void* memory) {
    unsigned char config[64];
    std::memcpy(config, memory, sizeof config);
    if (!permitted) fault("no permission was requested");
    if (config[0] != 1 || config[1] != 0) fault("not palette 1 from row 0");
    for (int i = 2; i < 16; ++i)
        if (config[i] != 0) fault("a reserved byte of the configuration is set");
    file.configured = true;
    for (int i = 0; i < 8; ++i) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, config + 16 + 2 * i, 2);
        const int rows = config[48 + i];
        if (rows > 16 || row_bytes > 64 || row_bytes % 4 != 0 || (rows == 0) != (row_bytes == 0))
            fault("a tile of an impossible size");
        file.tiles[i] = Tile{};
        file.tiles[i].rows = rows;
        file.tiles[i].row_bytes = row_bytes;
    }
    for (int i = 32; i < 48; ++i)
        if (config[i] != 0) fault("a reserved byte of the configuration is set");
    for (int i = 56; i < 64; ++i)
        if (config[i] != 0) fault("a reserved byte of the configuration is set");
}

inline void release() { file = TileFile{}; }

inline void zero(int index) {
    std::memset(tile(index).data, 0, sizeof Tile::data);
}

inline void load(int index, const void* base, int64_t stride) {
    Tile& tile = amx_emulated::tile(index);
    std::memset(tile.data, 0, sizeof tile.data);
    for (int64_t row = 0; row < tile.rows; ++row)
        std::memcpy(tile.data[row], static_cast<const char*>(base) + row * stride, size_t(tile.row_bytes));
}

inline void store(int index, void* base, int64_t stride) {
    const Tile& tile = amx_emulated::tile(index);
    for (int64_t row = 0; row < tile.rows; ++row)
        std::memcpy(static_cast<char*>(base) + row * stride, tile.data[row], size_t(tile.row_bytes));
}

inline void dot_bf16(int target, int left, int right) {
    multiply(target, left, right, [](unsigned char* sums, const unsigned char* a, const Tile& b) {
        float even[16] = {}, odd[16] = {}, line[16];
        std::memcpy(line, sums, sizeof line);
        for (int64_t k = 0; k < b.rows; ++k) {
            uint16_t pair[2], columns[32];
            std::memcpy(pair, a + 4 * k, sizeof pair);
            std::memcpy(columns, b.data[k], sizeof columns);
            const float first = from_bf16(pair[0]), second = from_bf16(pair[1]);
            for (int n = 0; n < 16; ++n) {
                even[n] = multiply_add(first, from_bf16(columns[2 * n]), even[n]);
                odd[n] = multiply_add(second, from_bf16(columns[2 * n + 1]), odd[n]);
            }
        }
        for (int n = 0; n < 16; ++n) line[n] = flushed(flushed(line[n]) + flushed(even[n] + odd[n]));
        std::memcpy(sums, line, size_t(b.row_bytes));
    });
}

inline void dot_int8(int target, int left, int right) {
    multiply_bytes<uint8_t, int8_t>(target, left, right);
}

inline void dot_signed(int target, int left, int right) {
    multiply_bytes<int8_t, int8_t>(target, left, right);
}

}  // namespace amx_emulated

#pragma GCC pop_options

// The compiler's own header may have these names already, as functions or as macros.
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#undef _tile_dpbssd
#define _tile_loadconfig amx_emulated::load_config
#define _tile_release amx_emulated::release
#define _tile_zero amx_emulated::zero
#define _tile_loadd amx_emulated::load
#define _tile_stream_loadd amx_emulated::load
#define _tile_stored amx_emulated::store
#define _tile_dpbf16ps amx_emulated::dot_bf16
#define _tile_dpbusd amx_emulated::dot_int8
#define _tile_dpbssd amx_emulated::dot_signed
