// Rows of fp32 times a packed weight: the tiles that `gemm.cpp` and `forward.cpp` share.
//
// A packed weight is panels [ceil(N / kPanel)][K][kPanel] of its own dtype: a step over k reads one contiguous line
// per panel. A tile of up to kRowTile rows x some panels lives in registers for the whole k loop and is handed once
// to whoever asked (`Output`). bf16 weights are widened on their way to the registers: two operations for
// 2 * kWidth weights, which fit beside the multiply-adds.
//
// Each y[m, n] is one chain of fused multiply-adds in k order from 0, whatever the tile it fell in: bits depend
// neither on the number of rows, nor on a row's place, nor on which panels a thread was given.
//
// Memory is asked for ahead. Where one tile covers all rows, every panel's own stream is a fixed distance ahead.
// Where several tiles pass over one panel, each asks for its share of the next one, so that the memory is busy while
// the multiply-adds are.
#pragma once

#include "kv_ahead.h"
#include "simd.h"
#include "threads.h"

namespace baton {

constexpr int64_t kPanel = 2 * kWidth;               // output features side by side in a panel
constexpr int64_t kRowTile = kWidth == 16 ? 12 : 6;  // rows x 2 accumulators fill the registers
constexpr int64_t kRowBlockBytes = 192 * 1024;       // fp32 rows that stay in L2 while panels pass
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kRideRows = kRowTile / 2;          // a tile of fewer rows waits for memory and asks for nothing else

// The line asked for while a tile reads a panel's line at k: from + k * step. And what else is asked for.
struct Ahead {
    const char* from;
    int64_t step;
    Ride ride{};
};

// A tile: num_rows rows of x (at most kRowTile, in_features apart) against as many of the `panels_left` panels from
// `panel` on as keep every multiply-add pipe busy; returns how many. sums[row * kTileFloats + column] takes the sums.
// In `gemm.cpp`, for float and bf16.
constexpr int64_t kTileFloats = 4 * kPanel;

template <typename W>
int64_t tile(int64_t num_rows, int64_t panels_left, const float* x, int64_t in_features, const W* panel, Ahead ahead,
             float* sums);

// Rows [row_begin, row_end) x panels [begin, end), rows cut into tiles of about equal height.
template <typename W, typename Output>
class RowBlock {
public:
    RowBlock(const float* x, int64_t in_features, const W* panels, const Output& output)
        : x_(x), in_features_(in_features), panels_(panels), output_(output) {}

    void run(int64_t row_begin, int64_t row_end, int64_t begin, int64_t end, const KvRide& ride) const {
        const int64_t num_rows = row_end - row_begin, num_tiles = ceil_div(num_rows, kRowTile);
        KvRide::Cursor cursor(ride, begin, num_tiles);
        alignas(64) float sums[kRowTile * kTileFloats];
        constexpr int64_t line_bytes = kPanel * int64_t(sizeof(W));
        for (int64_t panel = begin; panel < end;) {
            int64_t taken = 0;
            for (int64_t t = 0; t < num_tiles; ++t) {
                const int64_t from = row_begin + num_rows * t / num_tiles;
                const int64_t to = row_begin + num_rows * (t + 1) / num_tiles;
                const W* weights = panels_ + panel * in_features_ * kPanel;
                const char* here = reinterpret_cast<const char*>(weights);
                Ahead ahead = num_tiles == 1
                                  ? Ahead{here + kPrefetchBytes, line_bytes}
                                  : Ahead{here + in_features_ * line_bytes * (num_tiles + t) / num_tiles,
                                          line_bytes / num_tiles};
                ahead.ride = cursor.next();
                taken = tile(to - from, num_tiles == 1 ? end - panel : 1, x_ + from * in_features_, in_features_,
                             weights, ahead, sums);
                for (int64_t row = from; row < to; ++row)
                    for (int64_t column = 0; column < taken * kPanel; column += kPanel) {
                        const float* line = sums + (row - from) * kTileFloats + column;
                        output_.write(row, panel * kPanel + column, load(line), load(line + kWidth));
                    }
            }
            panel += taken;
        }
    }

private:
    const float* x_;
    int64_t in_features_;
    const W* panels_;
    const Output& output_;
};

// x [num_rows, in_features] fp32 x panels [begin, end); `output.write(row, column, low, high)` takes a panel's columns of
// a row of y, perhaps some past the last one.
template <typename W, typename Output>
void gemm(const float* x, int64_t num_rows, int64_t in_features, const W* panels, int64_t begin, int64_t end,
          const Output& output, const KvRide& ride = {}) {
    const int64_t block = std::max(2 * kRowTile, kRowBlockBytes / 4 / std::max<int64_t>(in_features, 1));
    const int64_t num_blocks = ceil_div(num_rows, block);
    for (int64_t b = 0; b < num_blocks; ++b)
        RowBlock<W, Output>(x, in_features, panels, output)
            .run(num_rows * b / num_blocks, num_rows * (b + 1) / num_blocks, begin, end, b == 0 ? ride : KvRide());
}

// y = sum + bias, rounded to Y.
template <typename Y>
struct Store {
    Y* data;
    const float* bias;  // or null
    int64_t out_features;

    void write(int64_t row, int64_t column, Vec low, Vec high) const {
        const int64_t count = out_features - column;
        if (bias != nullptr) add_two(bias + column, count, low, high);
        store_two(data + row * out_features + column, low, high, count);
    }
};

// call(y) for results of their own type.
template <typename Call>
void with_type(void* y, bool is_bf16, const Call& call) {
    if (is_bf16)
        call(static_cast<bf16*>(y));
    else
        call(static_cast<float*>(y));
}

// x += (sum + bias rounded to X): a residual. Each element has one writer.
template <typename X>
struct AddTo {
    X* data;
    const float* bias;  // or null
    int64_t out_features;

    void write(int64_t row, int64_t column, Vec low, Vec high) const {
        const int64_t count = out_features - column;
        if (bias != nullptr) add_two(bias + column, count, low, high);
        round_two<X>(low, high);
        X* target = data + row * out_features + column;
        add_two(target, count, low, high);
        store_two(target, low, high, count);
    }
};

// How a packed weight is to be multiplied: `Pass::multiply` and `baton_linear` have one case for each.
enum class WeightKind : int64_t {
    kFloat = 0,        // panels of fp32 or bf16, as above
    kInt8 = 1,         // int8 panels (`gemm_int8.h`), rows quantized to int8 too
    kInt8Weights = 2,  // the same panels, widened; rows stay fp32
    kAmxBf16 = 3,      // tiles for the matrix unit (`gemm_amx.h`), rows rounded to bf16
    kAmxInt8 = 4,      // the bytes and results of kInt8, multiplied by the matrix unit
    kDotBf16 = 5,      // pairs of bf16 (`gemm_dot.h`), rows rounded to bf16
    kNibbles = 6,      // what kDotBf16 multiplies, kept as codes of 4 bits (`gemm_coded.h`)
    kBytes = 7,        // the same, of 8 bits
    kAmxNibbles = 8,   // what kAmxBf16 multiplies, kept as codes of 4 bits
    kAmxBytes = 9,     // the same, of 8 bits
};

// What `baton_pack` writes before the panels.
struct PackedHeader {
    uint64_t magic;
    int64_t out_features, in_features, element_bytes, panel;
    WeightKind kind;
    int64_t expanded;  // of coded kinds: where their decoded panels begin, or 0
    int64_t reserved;
};
static_assert(sizeof(PackedHeader) == 64);
constexpr uint64_t kPackedMagic = 0x324c454e41504e42ull;  // "BNPANEL2"

inline const PackedHeader& header_of(const void* packed) { return *static_cast<const PackedHeader*>(packed); }

}  // namespace baton
