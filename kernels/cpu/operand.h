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
    Int8Rows laid_out{};  // as the weights' kind takes them: bf16 have no scales
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
        if constexpr (kHasAmx) amx_gemm_bf16(rows.laid_out.lines, data, begin, end, output);
        break;
    case WeightKind::kAmxInt8:
        if constexpr (kHasAmx) amx_gemm_int8(rows.laid_out, Int8Weight(packed), begin, end, output);
        break;
    case WeightKind::kInt8:
        gemm_int8(rows.laid_out, Int8Weight(packed), begin, end, output, rows.ride);
        break;
    case WeightKind::kInt8Weights:
        gemm_widened(rows.x, rows.num_rows, Int8Weight(packed), begin, end, output, rows.ride);
        break;
    case WeightKind::kDotBf16:
        if constexpr (kHasDot)
            gemm_dot(rows.laid_out.lines, rows.in_features, data, begin, end, output, rows.ride);
        break;
    }
}

// The memory of a pass's operands. One operand at a time: preparing the next one overwrites it.
class Operands {
public:
    // For at most `num_rows` rows of at most `in_features`.
    Operands(Team& team, Scratch& memory, int64_t num_rows, int64_t in_features)
        : team_(team), own_bytes_(bytes_of(kOwnRows, in_features)),
          memory_(reinterpret_cast<char*>(memory.floats(
              std::max(bytes_of(std::max<int64_t>(num_rows, 1), in_features), team.size() * own_bytes_) / 4))) {}

    // By every rank, with the same rows; x is read by whoever prepared it only, unless weights take it as it is.
    Operand prepare(int64_t rank, const float* x, const void* packed, int64_t num_rows, int64_t in_features) {
        Operand result{x, num_rows, in_features};
        const WeightKind kind = header_of(packed).kind;
        if (num_rows == 0 || kind == WeightKind::kFloat || kind == WeightKind::kInt8Weights) return result;
        const bool alone = num_rows <= kOwnRows;
        const bool is_int8 = kind == WeightKind::kInt8 || kind == WeightKind::kAmxInt8;
        const bool is_amx = kind == WeightKind::kAmxBf16 || kind == WeightKind::kAmxInt8;
        char* memory = memory_ + (alone ? rank * own_bytes_ : 0);
        const RowCut cut = is_amx ? amx_cut(num_rows) : word_cut(num_rows);
        const int64_t steps = LineRows::steps_of((is_int8 ? 1 : 2) * in_features);
        result.laid_out = {{cut, steps, memory + scale_bytes(num_rows)}, reinterpret_cast<float*>(memory)};
        const Share share(num_rows, alone ? 0 : rank, alone ? 1 : team_.size());
        const auto prepare_rows = [&](int64_t begin, int64_t end) {
            for (int64_t m = begin; m < end; ++m) {
                if (is_int8)
                    result.laid_out.quantize(x + m * in_features, in_features, m);
                else
                    narrow_row(x + m * in_features, in_features, m, result.laid_out.lines);
            }
        };
        if (alone) {
            prepare_rows(share.begin, share.end);
        } else {
            team_.divide(rank, share.begin, share.end, 1, kOwnRows, prepare_rows);
            team_.barrier();
        }
        return result;
    }

private:
    static int64_t scale_bytes(int64_t num_rows) { return ceil_div(num_rows * 4, kLineBytes) * kLineBytes; }

    // Of a row's scales and lines, however its kind cuts them.
    static int64_t bytes_of(int64_t num_rows, int64_t in_features) {
        const int64_t steps = LineRows::steps_of(2 * in_features);
        int64_t most = LineRows::bytes(word_cut(num_rows), steps);
        if constexpr (kHasAmx) most = std::max(most, LineRows::bytes(amx_cut(num_rows), steps));
        return scale_bytes(num_rows) + most;
    }

    Team& team_;
    const int64_t own_bytes_;
    char* const memory_;  // of `alone`'s rows, one part for each rank
};

}  // namespace baton
