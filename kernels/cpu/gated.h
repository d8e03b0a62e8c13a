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

    void write(int64_t row, int64_t column, Vec low, Vec high) const {
        if (bias != nullptr) add_two(bias + column, low, high);
        store_two(data + row * width + column - first, low, high);
    }
};

// inner[row, column] = silu(gate) * up, both rounded to T before; ups are `inner_size` columns after their gates.
template <typename T>
struct Ups {
    const T* gates;
    const float* bias;  // or null
    int64_t first, width, inner_size;
    float* inner;

    void write(int64_t row, int64_t column, Vec low, Vec high) const {
        if (bias != nullptr) add_two(bias + column, low, high);
        column -= inner_size;
        const T* gate = gates + row * width + column - first;
        store_two(inner + row * inner_size + column, silu_mul<T>(load(gate), round_to<T>(low)),
                  silu_mul<T>(load(gate + kWidth), round_to<T>(high)));
    }
};

}  // namespace baton
