// What a product of gates and ups does with its sums: gates are kept for the ups of the same columns, which meet them while
// they are in cache.
#pragma once

#include "line_rows.h"
#include "rowwise.h"
#include "simd.h"

namespace baton {

// Sums of some columns from `first` on, biased and rounded to T, kept for the `Ups` of the same columns.
template <typename T>
struct Gates {
    T* data;  // [rows, width]
    const float* bias;  // or null
    int64_t first, width;

    void write(int64_t row, int64_t column, Vec low, Vec high) const {
        if (bias != nullptr) add_two(bias + column, low, high);
        store_two(data + row * width + column - first, low, high);
    }
};

// silu(gate) * up, both rounded to T before, of some columns to `inner`; ups are `inner_size` columns after their gates.
template <typename T, typename Inner>
struct Ups {
    Gates<T> gates;
    int64_t inner_size;
    Inner inner;

    void write(int64_t row, int64_t column, Vec low, Vec high) const {
        if (gates.bias != nullptr) add_two(gates.bias + column, low, high);
        column -= inner_size;
        const T* gate = gates.data + row * gates.width + column - gates.first;
        round_two<T>(low, high);
        inner.write(row, column, silu_mul(load(gate), low), silu_mul(load(gate + kWidth), high));
    }
};

// Rounded to T, as fp32.
template <typename T>
struct WideInner {
    float* data;
    int64_t size;

    void write(int64_t row, int64_t column, Vec low, Vec high) const {
        round_two<T>(low, high);
        store_two(data + row * size + column, low, high);
    }
};

// Rounded to bf16, to the lines that the next product reads.
struct NarrowInner {
    LineRows rows;

    void write(int64_t row, int64_t column, Vec low, Vec high) const {
        constexpr int64_t columns = kLineBytes / 2;
        char* line = rows.row(row) + column / columns * rows.stride();
        store_two(reinterpret_cast<bf16*>(line) + column % columns, low, high);
    }
};

}  // namespace baton
