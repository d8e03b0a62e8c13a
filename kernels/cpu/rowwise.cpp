// The operations of `rowwise.h` and the KV write over all rows of a batch.
//
// Threads share out rows. Pointers are typed by `is_bf16`; strides are in elements.
#include "kv_rows.h"
#include "rowwise.h"
#include "threads.h"

namespace baton {
namespace {

constexpr int64_t kGrainElements = 16 * 1024;  // less work than this is not worth waking a thread

int64_t grain(int64_t row_elements) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(row_elements, 1)); }

template <typename T>
void rms_norm(const T* x, const T* weight, float eps, int64_t num_rows, int64_t size, T* y, int64_t num_threads) {
    parallel_ranges(num_threads, num_rows, grain(size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) rms_norm_row(x + row * size, weight, eps, size, y + row * size);
    });
}

template <typename T>
void rotary(const T* x, int64_t row_stride, const int64_t* positions, const float* cos, const float* sin,
            int64_t num_rows, int64_t num_heads, int64_t head_dim, T* y, int64_t num_threads) {
    const int64_t half = head_dim / 2;
    parallel_ranges(num_threads, num_rows, grain(num_heads * head_dim), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row)
            for (int64_t head = 0; head < num_heads; ++head)
                rotate_head(x + row * row_stride + head * head_dim, cos + positions[row] * half,
                            sin + positions[row] * half, head_dim, y + (row * num_heads + head) * head_dim);
    });
}

template <typename T>
void silu_mul(const T* gate_up, int64_t num_rows, int64_t size, T* y, int64_t num_threads) {
    parallel_ranges(num_threads, num_rows, grain(size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row)
            silu_mul_row(gate_up + row * 2 * size, gate_up + (row * 2 + 1) * size, size, y + row * size);
    });
}

// Tokens' keys and values [num_tokens, kv_heads, head_dim] to their slots, which are distinct.
template <typename T>
void write_kv(const T* k, const T* v, int64_t k_row_stride, int64_t v_row_stride, char* pool, const KvShape& kv,
              int64_t layer, const int64_t* slots, int64_t num_tokens, int64_t num_threads) {
    parallel_ranges(num_threads, num_tokens, grain(kv.token_bytes()), [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
            for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
                const int64_t place = head * kv.row_bytes, source = head * kv.head_dim;
                write_row(k + token * k_row_stride + source, kv, pool + kv.offset(slots[token], layer, 0) + place);
                write_row(v + token * v_row_stride + source, kv, pool + kv.offset(slots[token], layer, 1) + place);
            }
    });
}

// Index of the first value outside [0, limit), or -1.
int64_t first_outside(const int64_t* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < 0 || values[i] >= limit) return i;
    return -1;
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

void baton_rms_norm(const void* x, const void* weight, float eps, int64_t num_rows, int64_t size, void* y,
                    int64_t is_bf16, int64_t num_threads) {
    if (is_bf16)
        rms_norm(static_cast<const bf16*>(x), static_cast<const bf16*>(weight), eps, num_rows, size,
                 static_cast<bf16*>(y), num_threads);
    else
        rms_norm(static_cast<const float*>(x), static_cast<const float*>(weight), eps, num_rows, size,
                 static_cast<float*>(y), num_threads);
}

// Returns -1, or the index of a position outside [0, max_positions); nothing is written then.
int64_t baton_rotary(const void* x, int64_t row_stride, const int64_t* positions, const float* cos, const float* sin,
                     int64_t max_positions, int64_t num_rows, int64_t num_heads, int64_t head_dim, void* y,
                     int64_t is_bf16, int64_t num_threads) {
    int64_t bad = first_outside(positions, num_rows, max_positions);
    if (bad >= 0) return bad;
    if (is_bf16)
        rotary(static_cast<const bf16*>(x), row_stride, positions, cos, sin, num_rows, num_heads, head_dim,
               static_cast<bf16*>(y), num_threads);
    else
        rotary(static_cast<const float*>(x), row_stride, positions, cos, sin, num_rows, num_heads, head_dim,
               static_cast<float*>(y), num_threads);
    return -1;
}

void baton_silu_mul(const void* gate_up, int64_t num_rows, int64_t size, void* y, int64_t is_bf16,
                    int64_t num_threads) {
    if (is_bf16)
        silu_mul(static_cast<const bf16*>(gate_up), num_rows, size, static_cast<bf16*>(y), num_threads);
    else
        silu_mul(static_cast<const float*>(gate_up), num_rows, size, static_cast<float*>(y), num_threads);
}

// Returns -1, or the index of a slot outside the pool; nothing is written then.
int64_t baton_write_kv(const void* k, const void* v, int64_t k_row_stride, int64_t v_row_stride, void* pool,
                       int64_t layer, const int64_t* slots, int64_t num_tokens, int64_t num_blocks, int64_t num_layers,
                       int64_t block_size, int64_t num_kv_heads, int64_t head_dim, int64_t is_bf16, int64_t is_int8,
                       int64_t num_threads) {
    int64_t bad = first_outside(slots, num_tokens, num_blocks * block_size);
    if (bad >= 0) return bad;
    const KvShape kv(num_layers, block_size, num_kv_heads, head_dim, is_int8, is_bf16);
    if (is_bf16)
        write_kv(static_cast<const bf16*>(k), static_cast<const bf16*>(v), k_row_stride, v_row_stride,
                 static_cast<char*>(pool), kv, layer, slots, num_tokens, num_threads);
    else
        write_kv(static_cast<const float*>(k), static_cast<const float*>(v), k_row_stride, v_row_stride,
                 static_cast<char*>(pool), kv, layer, slots, num_tokens, num_threads);
    return -1;
}
}
