// The rows of a product in the form that its weights take, and the product itself, whatever the weights' kind.
//
// 1. A pass asks its `Operands` for an `Operand`: rows as they are for weights of the model's type and for widened
//    ones; quantized for int8; laid out in tiles for the matrix unit; rounded to bf16 for products of pairs.
// 2. Few rows are prepared by every rank for itself, sooner than ranks could meet; many by all ranks together, who
//    meet once.
// 3. `multiply` takes any panels of the weight.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "gemm_amx.h"
#include "gemm_dot.h"
#include "gemm_int8.h"
#include "team.h"
#include "threads.h"

namespace baton {

constexpr int64_t kOwnRows = 4;  // a barrier costs about as much as so many rows normed or quantized

// [begin, end) of rank's share of `count`, in steps of `unit`.
struct Share {
    int64_t begin, end;

    Share(int64_t count, int64_t rank, int64_t size, int64_t unit = 1) {
        const int64_t units = ceil_div(count, unit);
        begin = std::min(count, units * rank / size * unit);
        end = std::min(count, units * (rank + 1) / size * unit);
    }
};

struct Operand {
    const float* x;  // [num_rows, in_features]
    int64_t num_rows, in_features;
    Int8Rows int8{nullptr, 0};
    AmxRows tiles{TileCut(1), 0, nullptr};
    DotRows pairs{nullptr};
    KvRide ride{};
};

// Rows x panels [begin, end) of a packed weight, of type T if it is not of a kind of its own; `output` as in `gemm.h`.
template <typename T, typename Output>
void multiply(const Operand& rows, const void* packed, int64_t begin, int64_t end, const Output& output) {
    const char* data = static_cast<const char*>(packed) + sizeof(PackedHeader);
    switch (header_of(packed).kind) {
    case WeightKind::kFloat:
        gemm(rows.x, rows.num_rows, rows.in_features, reinterpret_cast<const T*>(data), begin, end, output,
             rows.ride);
        break;
    case WeightKind::kAmxBf16:
        if constexpr (kHasAmx) amx_gemm_bf16(rows.tiles, data, begin, end, output);
        break;
    case WeightKind::kAmxInt8:
        if constexpr (kHasAmx) amx_gemm_int8(rows.tiles, rows.int8.scales, Int8Weight(packed), begin, end, output);
        break;
    case WeightKind::kInt8:
        gemm_int8(rows.int8, rows.num_rows, Int8Weight(packed), begin, end, output, rows.ride);
        break;
    case WeightKind::kInt8Weights:
        gemm_widened(rows.x, rows.num_rows, Int8Weight(packed), begin, end, output, rows.ride);
        break;
    case WeightKind::kDotBf16:
        if constexpr (kHasDot)
            gemm_dot(rows.pairs, rows.num_rows, rows.in_features, data, begin, end, output, rows.ride);
        break;
    }
}

// The memory of a pass's operands. One operand at a time: preparing the next one overwrites it.
class Operands {
public:
    // For at most `num_rows` rows of at most `in_features`.
    Operands(Team& team, Scratch& int8_memory, Scratch& bf16_memory, int64_t num_rows, int64_t in_features)
        : team_(team), int8_(int8_memory.floats(
                           Int8Rows::floats(std::max(num_rows, team.size() * kOwnRows), in_features))) {
        int64_t bytes = 0;
        if constexpr (kHasAmx) {
            const int64_t steps = AmxRows::steps_of(2 * in_features);
            const int64_t many = AmxRows::bytes(TileCut(std::max<int64_t>(num_rows, 1)), steps);
            bytes = std::max(many, AmxRows::bytes(TileCut(kOwnRows), steps) * team.size());
        }
        if constexpr (kHasDot)
            bytes = std::max(bytes, DotRows::bytes(std::max(num_rows, team.size() * kOwnRows), in_features));
        laid_out_ = reinterpret_cast<char*>(bf16_memory.floats(ceil_div(bytes, 4)));
    }

    // By every rank, with the same rows; x is read by whoever prepared it only, unless weights take it as it is.
    Operand prepare(int64_t rank, const float* x, const void* packed, int64_t num_rows, int64_t in_features) {
        Operand result{x, num_rows, in_features};
        const WeightKind kind = header_of(packed).kind;
        if (num_rows == 0 || kind == WeightKind::kFloat || kind == WeightKind::kInt8Weights) return result;
        const bool alone = num_rows <= kOwnRows;
        const bool is_tiled = kind == WeightKind::kAmxBf16 || kind == WeightKind::kAmxInt8;
        const bool is_int8 = kind == WeightKind::kInt8 || kind == WeightKind::kAmxInt8;
        if (is_int8) result.int8 = {int8_ + (alone ? rank * Int8Rows::floats(kOwnRows, in_features) : 0), num_rows};
        char* laid_out = nullptr;
        if (is_tiled) {
            const TileCut cut(num_rows);
            const int64_t steps = AmxRows::steps_of((is_int8 ? 1 : 2) * in_features);
            laid_out = laid_out_ + (alone ? rank * AmxRows::bytes(cut, steps) : 0);
            result.tiles = {cut, steps, laid_out};
        } else if (!is_int8) {
            laid_out = laid_out_ + (alone ? rank * DotRows::bytes(kOwnRows, in_features) : 0);
            result.pairs = {laid_out};
        }
        const Share share(num_rows, alone ? 0 : rank, alone ? 1 : team_.size());
        const auto prepare_rows = [&](int64_t begin, int64_t end) {
            for (int64_t m = begin; m < end; ++m) {
                const float* row = x + m * in_features;
                if (is_int8) quantize_row(row, in_features, m, result.int8);
                if constexpr (kHasAmx) {
                    if (is_tiled && is_int8) amx_int8_row(result.int8, in_features, m, result.tiles.cut, laid_out);
                    if (is_tiled && !is_int8) amx_bf16_row(row, in_features, m, result.tiles.cut, laid_out);
                }
                if constexpr (kHasDot)
                    if (!is_tiled && !is_int8) dot_row(row, in_features, m, laid_out);
            }
        };
        if (alone) {
            prepare_rows(share.begin, share.end);
        } else {
            team_.divide(rank, share.begin, share.end, 1, kOwnRows, prepare_rows);
            team_.barrier(rank);
        }
        return result;
    }

private:
    Team& team_;
    float* int8_;
    char* laid_out_;  // rows of bf16 products, and of int8 in tiles
};

}  // namespace baton
