// The rows of a product in the form that its weights take, and the product itself, whatever the weights' kind.
//
// 1. A pass asks its `Operands` for an `Operand`: rows as they are for weights of the model's type and for widened
//    ones; quantized for int8; rounded to bf16 for the matrix unit, for products of pairs and for coded weights;
//    these in lines (`line_rows.h`).
// 2. Few rows are prepared by every rank for itself, sooner than ranks could meet; many by all ranks together, who
//    meet once. Rows that are made for one product only are prepared one by one, while they are in cache.
// 3. `multiply` takes any panels of the weight.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "gemm_amx.h"
#include "gemm_coded.h"
#include "gemm_coded_amx.h"
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

inline bool is_int8(WeightKind kind) { return kind == WeightKind::kInt8 || kind == WeightKind::kAmxInt8; }
inline bool is_amx(WeightKind kind) {
    return kind == WeightKind::kAmxBf16 || kind == WeightKind::kAmxInt8 || is_amx_coded(kind);
}
inline bool reads_floats(WeightKind kind) { return kind == WeightKind::kFloat || kind == WeightKind::kInt8Weights; }
inline bool reads_bf16(WeightKind kind) {
    return kind == WeightKind::kAmxBf16 || kind == WeightKind::kDotBf16 || is_coded(kind);
}
// The most that a tile takes.
inline int64_t panels_at_once(WeightKind kind) { return kind == WeightKind::kFloat ? 4 : 1; }

struct Operand {
    WeightKind kind;
    const float* x;  // [num_rows, in_features] of kinds that read floats
    int64_t num_rows, in_features;
    Int8Rows laid_out{};  // of other kinds: bf16 have no scales
    KvRide ride{};

    // Row m, for kinds that do not read floats.
    void take(const float* row, int64_t m) const {
        if (is_int8(kind))
            laid_out.quantize(row, in_features, m);
        else
            narrow_row(row, in_features, m, laid_out.lines);
    }
};

// Rows x panels [begin, end) of a packed weight, of type T if it is not of a kind of its own; `output` as in `gemm.h`. Panel
// `next` is what this thread multiplies then, if it is known.
template <typename T, typename Output>
void multiply(const Operand& rows, const void* packed, int64_t begin, int64_t end, const Output& output, int64_t next) {
    const char* data = static_cast<const char*>(packed) + sizeof(PackedHeader);
    switch (rows.kind) {
    case WeightKind::kFloat:
        gemm(rows.x, rows.num_rows, rows.in_features, reinterpret_cast<const T*>(data), begin, end, output,
             rows.ride);
        break;
    case WeightKind::kAmxBf16:
        if constexpr (kHasAmx)
            amx_gemm_bf16(rows.laid_out.lines, bf16_panels(rows.laid_out.lines, data), begin, end, output, next);
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
    case WeightKind::kNibbles:
    case WeightKind::kBytes:
        if constexpr (kHasDot) gemm_coded(rows.laid_out.lines, CodedWeight(packed), begin, end, output, rows.ride);
        break;
    case WeightKind::kAmxNibbles:
    case WeightKind::kAmxBytes:
        if constexpr (kHasAmx) amx_gemm_coded(rows.laid_out.lines, CodedWeight(packed), begin, end, output);
        break;
    }
}

// The memory of a pass's operands. One operand at a time: preparing the next one overwrites it, but for the one that
// `place` gave.
class Operands {
public:
    // For at most `num_rows` rows of at most `in_features`.
    Operands(Team& team, Scratch& memory, Scratch& placed, int64_t num_rows, int64_t in_features)
        : team_(team), own_bytes_(bytes_of(kOwnRows, in_features)),
          memory_(bytes(memory, std::max(bytes_of(num_rows, in_features), team.size() * own_bytes_))),
          placed_(bytes(placed, kHasDot || kHasAmx ? bytes_of(num_rows, in_features) : 0)),
          serials_(size_t(team.size()), new_serials(kMostOperands)) {}

    // By every rank, with the same rows; x is read by whoever prepared it only, unless weights take it as it is.
    Operand prepare(int64_t rank, const float* x, const void* packed, int64_t num_rows, int64_t in_features) {
        const WeightKind kind = header_of(packed).kind;
        if (reads_floats(kind)) return {kind, x, num_rows, in_features};
        const Operand result = laid_out(rank, kind, num_rows, in_features, memory_of(rank, num_rows));
        each(rank, num_rows, [&](int64_t m) { result.take(x + m * in_features, m); });
        return result;
    }

    // By every rank: make(m, row) writes row m as fp32.
    template <typename Make>
    Operand make(int64_t rank, const void* packed, int64_t num_rows, int64_t in_features, const Make& make) {
        const Operand result = laid_out(rank, header_of(packed).kind, num_rows, in_features, memory_of(rank, num_rows));
        each(rank, num_rows, [&](int64_t m) {
            static thread_local Scratch memory;
            if (reads_floats(result.kind)) return make(m, const_cast<float*>(result.x) + m * in_features);
            float* row = memory.floats(in_features);
            make(m, row);
            result.take(row, m);
        });
        return result;
    }

    // By every rank: where the caller writes the rows, for all ranks.
    Operand place(int64_t rank, const void* packed, int64_t num_rows, int64_t in_features) {
        return laid_out(rank, header_of(packed).kind, num_rows, in_features, placed_);
    }

private:
    static constexpr int64_t kMostOperands = 1 << 20;  // of a pass

    static char* bytes(Scratch& scratch, int64_t count) { return reinterpret_cast<char*>(scratch.floats(count / 4)); }

    static int64_t scale_bytes(int64_t num_rows) { return ceil_div(num_rows * 4, kLineBytes) * kLineBytes; }

    // Whatever the kind.
    static int64_t bytes_of(int64_t num_rows, int64_t in_features) {
        const int64_t steps = LineRows::steps_of(2 * in_features);
        int64_t lines = LineRows::bytes(word_cut(num_rows), steps);
        if constexpr (kHasAmx) lines = std::max(lines, LineRows::bytes(amx_cut(num_rows), steps));
        return std::max(scale_bytes(num_rows) + lines, scale_bytes(num_rows * in_features));
    }

    static bool alone(int64_t num_rows) { return num_rows <= kOwnRows; }
    char* memory_of(int64_t rank, int64_t num_rows) const { return memory_ + (alone(num_rows) ? rank * own_bytes_ : 0); }

    Operand laid_out(int64_t rank, WeightKind kind, int64_t num_rows, int64_t in_features, char* memory) {
        float* floats = reinterpret_cast<float*>(memory);
        Operand result{kind, floats, num_rows, in_features};
        if (reads_floats(kind)) return result;
        const RowCut cut = is_amx(kind) ? amx_cut(num_rows) : word_cut(num_rows);
        const int64_t steps = LineRows::steps_of((is_int8(kind) ? 1 : 2) * in_features);
        result.laid_out = {{cut, steps, memory + scale_bytes(num_rows), serials_[size_t(rank)]++}, floats};
        return result;
    }

    template <typename Row>
    void each(int64_t rank, int64_t num_rows, const Row& row) {
        const auto rows = [&](int64_t begin, int64_t end) {
            for (int64_t m = begin; m < end; ++m) row(m);
        };
        if (alone(num_rows)) return rows(0, num_rows);
        const Share share(num_rows, rank, team_.size());
        team_.divide(rank, share.begin, share.end, 1, kOwnRows, rows);
        team_.barrier(rank);
    }

    Team& team_;
    const int64_t own_bytes_;
    char *const memory_, *const placed_;  // memory_: of few rows a part for each rank
    std::vector<int64_t> serials_;        // of each rank's next operand: all ranks have the same ones
};

}  // namespace baton
