// Rows of the KV pool: what one KV head keeps of one token, as `kernels.ops` lays it out.
//
// A row holds elements of the model's type, copied, or int8 values with an fp32 scale behind them. Quantizing looks
// at the row alone, so a row's bytes depend on its token's own values only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace baton {

constexpr int64_t kScaleBytes = 4;  // kernels.ops.KV_SCALE_BYTES

// Where rows lie in a pool [num_blocks, num_layers, 2, block_size, num_kv_heads, row].
struct KvShape {
    int64_t num_layers, block_size, num_kv_heads, head_dim, row_bytes;
    bool is_int8;

    KvShape(int64_t num_layers, int64_t block_size, int64_t num_kv_heads, int64_t head_dim, bool is_int8,
            bool is_bf16)
        : num_layers(num_layers), block_size(block_size), num_kv_heads(num_kv_heads), head_dim(head_dim),
          row_bytes(is_int8 ? head_dim + kScaleBytes : head_dim * (is_bf16 ? 2 : 4)), is_int8(is_int8) {}

    int64_t token_bytes() const { return num_kv_heads * row_bytes; }
    // Of the first head's key (`which` 0) or value (1) of a slot's token.
    int64_t offset(int64_t slot, int64_t layer, int64_t which) const {
        return offset(slot / block_size, slot % block_size, layer, which);
    }
    // The same of a block's token.
    int64_t offset(int64_t block, int64_t token, int64_t layer, int64_t which) const {
        return (((block * num_layers + layer) * 2 + which) * block_size + token) * token_bytes();
    }
};

// values = round_to_even(row / scale), scale = max(absmax / 127, 2^-126); if an element is not finite: 0 and NaN.
template <typename T>
inline void quantize_row(const T* row, int64_t head_dim, char* target) {
    Vec largest = {};
    IntVec finite = ~IntVec{};
    for (int64_t d = 0; d < head_dim; d += kWidth) {
        const Vec size = Vec(UintVec(load_partial(row + d, head_dim - d)) & 0x7fffffff);
        largest = max(size, largest);
        finite &= size < splat(kInfinity);
    }
    bool all_finite = true;
    for (int64_t lane = 0; lane < kWidth; ++lane) all_finite &= finite[lane] != 0;
    const float smallest = std::numeric_limits<float>::min();
    const float scale = all_finite ? std::max(max_lanes(largest) / 127.0f, smallest)
                                   : std::numeric_limits<float>::quiet_NaN();
    const Vec magic = splat(kMagic);
    for (int64_t d = 0; d < head_dim; d += kWidth) {
        IntVec values = IntVec(load_partial(row + d, head_dim - d) / scale + magic) - IntVec(magic);
        values = all_finite ? values : IntVec{};
        typedef int8_t ByteVec __attribute__((vector_size(kWidth)));
        const ByteVec bytes = __builtin_convertvector(values, ByteVec);
        std::memcpy(target + d, &bytes, size_t(std::min(kWidth, head_dim - d)));
    }
    std::memcpy(target + head_dim, &scale, sizeof scale);
}

// One head's key or value to its place in the pool.
template <typename T>
inline void write_row(const T* row, const KvShape& kv, char* target) {
    if (kv.is_int8)
        quantize_row(row, kv.head_dim, target);
    else
        std::memcpy(target, row, size_t(kv.row_bytes));
}

}  // namespace baton
