// The tile of `gemm_dot.h`, packing, and products of single calls.
#include "gemm_dot.h"

#include "word_tile.h"

namespace baton {

#if defined(BATON_DOT)

void dot_tile(int64_t num_rows, const char* x, int64_t stride, int64_t pairs, const char* panel, Ahead ahead,
              float* sums) {
    with_rows(num_rows, [&]<int Rows>() { word_sums<DotPairs, Rows>(x, stride, pairs, panel, ahead, sums); });
}

namespace {

template <typename Y>
void linear(const float* x, int64_t num_rows, const void* packed, const float* bias, Y* y, int64_t num_threads) {
    static thread_local Scratch scratch;
    const PackedHeader& header = header_of(packed);
    const int64_t in_features = header.in_features;
    const LineRows rows = LineRows::in(scratch, word_cut(num_rows), 2 * in_features);
    for (int64_t m = 0; m < num_rows; ++m) narrow_row(x + m * in_features, in_features, m, rows);
    const Store<Y> output{y, bias, header.out_features};
    parallel_ranges(num_threads, ceil_div(header.out_features, kWordPanel), 2, [&](int64_t begin, int64_t end) {
        gemm_dot(rows, in_features, static_cast<const char*>(packed) + sizeof header, begin, end, output);
    });
}

}  // namespace

void dot_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                int64_t num_threads) {
    with_type(y, y_bf16, [&](auto* out) { linear(x, num_rows, packed, bias, out, num_threads); });
}

#endif  // BATON_DOT

int64_t dot_packed_bytes(int64_t out_features, int64_t in_features) {
    const int64_t panel_bytes = num_pairs(in_features) * 4 * kWordPanel;
    return int64_t(sizeof(PackedHeader)) + ceil_div(out_features, kWordPanel) * panel_bytes + kWordSlackBytes;
}

}  // namespace baton

using namespace baton;

extern "C" {

// Whether the compiler's target multiplies pairs of bf16.
int64_t baton_dot_is_there() { return kHasDot; }

int64_t baton_dot_packed_bytes(int64_t out_features, int64_t in_features) {
    return dot_packed_bytes(out_features, in_features);
}

// weight [out, in] bf16: column n of a panel is word n of its lines, each word two values of k.
void baton_dot_pack(const void* weight, int64_t out_features, int64_t in_features, void* packed) {
    std::memset(packed, 0, size_t(dot_packed_bytes(out_features, in_features)));
    const PackedHeader header{kPackedMagic, out_features, in_features, 2, kWordPanel, WeightKind::kDotBf16, 0, 0};
    std::memcpy(packed, &header, sizeof header);
    char* panels = static_cast<char*>(packed) + sizeof header;
    const int64_t panel_bytes = num_pairs(in_features) * 4 * kWordPanel;
    const bf16* row = static_cast<const bf16*>(weight);
    for (int64_t n = 0; n < out_features; ++n, row += in_features) {
        char* column = panels + n / kWordPanel * panel_bytes + n % kWordPanel * 4;
        for (int64_t k = 0; k < in_features; k += 2)
            std::memcpy(column + k / 2 * 4 * kWordPanel, row + k,
                        size_t(std::min<int64_t>(2, in_features - k)) * sizeof(bf16));
    }
}
}
