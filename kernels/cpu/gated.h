// What a product of gates and ups does with its sums: gates are kept for the ups of the same columns, which meet them while
// they are in cache.
#pragma once

#include "rowwise.h"
#include "simd.h"

namespace baton {

// Sums of some columns from `first` on, biased and rounded to T, kept for the `Ups` of the same columns.
template <typename T>
struct Gates {
    T* data;  // [rows, width]
    const float* bias;  // or null
    int64_t first, width;

    void write(int64_t row, int64_t column, Vec value) const {
        if (bias != nullptr) value += load(bias + column);
        store(data + row * width + column - first, value);
    }
};

// inner[row, column] = silu(gate) * up, both rounded to T before; ups are `inner_size` columns after their gates.
template <typename T>
struct Ups {
    const T* gates;
    const float* bias;  // or null
    int64_t first, width, inner_size;
    float* inner;

    void write(int64_t row, int64_t column, Vec value) const {
        if (bias != nullptr) value += load(bias + column);
        column -= inner_size;
        const Vec gate = load(gates + row * width + column - first);
        store(inner + row * inner_size + column, silu_mul<T>(gate, round_to<T>(value)));
    }
};

}  // namespace baton
