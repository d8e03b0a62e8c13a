// The product of `gemm_dot.h` for bf16 weights that are kept as they lie in a GGUF file: whole numbers of 4 or 8 bits and,
// for each 32 values of k of a column (a block), a scale and a minimum of fp16. A value is
//
//     w = bf16(fp32(code * scale + minimum))
//
// rounded once each time: code * scale is exact in fp32. That is what reading the file as bf16 gives, so results are those
// of `gemm_dot.h` bit for bit, while a product reads 5 or 8.5 bits per weight from memory instead of 16.
//
// Panels are [blocks][scales][minima, of 4 bits only][codes], all of kWordPanel columns; codes come as decoding wants them
// (`decode_block`). A block's 32 values of k are one line of a row (`line_rows.h`).
//
// Few rows are multiplied while weights are decoded, in registers. For more, which wait for arithmetic, decoding costs what
// five of them do: a weight may have its decoded panels behind its codes, for these. Else a panel is decoded once into cache,
// and all tiles of rows pass over it, from whichever cache these are in: a tile's row is read at two bytes a cycle.
//
// The matrix unit has kinds of its own (`gemm_coded_amx.h`), with codes in an order of their own.
//
// Products only where `kHasDot`.
#pragma once

#include "gemm_dot.h"

namespace baton {

constexpr int64_t kBlockSize = 32;   // values of k
constexpr int64_t kFusedRows = 8;  // at most so many are multiplied while weights are decoded
constexpr int64_t kCodedRideRows = 4;  // of them; fewer leave memory no time for anything else

constexpr bool is_nibbles(WeightKind kind) { return kind == WeightKind::kNibbles || kind == WeightKind::kAmxNibbles; }
inline bool is_amx_coded(WeightKind kind) { return kind == WeightKind::kAmxNibbles || kind == WeightKind::kAmxBytes; }
inline bool is_coded(WeightKind kind) { return is_nibbles(kind) || kind == WeightKind::kBytes || is_amx_coded(kind); }

// The parts of a packed weight of a coded kind.
struct CodedWeight {
    WeightKind kind;
    int64_t in_features;
    const char *panels, *expanded;  // expanded: decoded, or null

    explicit CodedWeight(const void* packed)
        : kind(header_of(packed).kind), in_features(header_of(packed).in_features),
          panels(static_cast<const char*>(packed) + sizeof(PackedHeader)),
          expanded(header_of(packed).expanded > 0 ? static_cast<const char*>(packed) + header_of(packed).expanded : nullptr) {}

    static constexpr int64_t block_bytes(WeightKind kind) { return (is_nibbles(kind) ? 20 : 34) * kWordPanel; }

    int64_t num_blocks() const { return in_features / kBlockSize; }
    // In words of a column, as decoded; a panel is asked for while the one before is multiplied.
    PanelStream stream() const {
        const int64_t words = in_features / 2, panel_bytes = num_blocks() * block_bytes(kind);
        return {panels, words, panel_bytes / words, panel_bytes};
    }
};

// `num_rows` rows (at most kFusedRows) against a panel: sums[row * kWordPanel + column]. `x` as `LineRows::tile`.
void coded_tile(int64_t num_rows, const char* x, int64_t stride, const CodedWeight& weight, const char* panel,
                const Ride& ride, float* sums);

// This thread's memory for a decoded panel.
char* decoded_words(const CodedWeight& weight);

// Of column `n` of a panel's block at `k` of it, not rounded yet.
float value_of(WeightKind kind, const char* block, int64_t n, int64_t k);

// A panel as `dot_tile` reads it, to `words`, or as the unit does (`gemm_amx.h`).
void decode_panel(const CodedWeight& weight, const char* panel, char* words);
void decode_amx_panel(const CodedWeight& weight, const char* panel, char* words);

// Rows (`narrow_row`) x panels [begin, end); `output` as in `gemm.h`.
template <typename Output>
void gemm_coded(const LineRows& x, const CodedWeight& weight, int64_t begin, int64_t end, const Output& output,
                const KvRide& ride = {}) {
    const RowCut& cut = x.cut;
    if (cut.num_rows == 0) return;
    if (cut.num_rows > kFusedRows && weight.expanded != nullptr)
        return gemm_dot(x, weight.in_features, weight.expanded, begin, end, output, ride);
    alignas(64) float sums[kWordRowTile * kWordPanel];
    const PanelStream stream = weight.stream();
    if (cut.num_rows <= kFusedRows && cut.num_tiles == 1) {
        KvRide::Cursor cursor(ride, begin, 1);
        for (int64_t panel = begin; panel < end; ++panel) {
            coded_tile(cut.num_rows, x.tile(0), x.stride(), weight, stream.panel(panel), cursor.next(), sums);
            write_sums(cut, 0, panel, sums, output);
        }
        return;
    }
    char* const words = decoded_words(weight);
    walk_words(cut, kOneBlock, stream, begin, end, ride, [&](int64_t tile, int64_t panel, Ahead ahead) {
        if (tile == 0) decode_panel(weight, stream.panel(panel), words);
        dot_tile(cut.rows(tile), x.tile(tile), x.stride(), stream.words, words, ahead, sums);
        write_sums(cut, tile, panel, sums, output);
    });
}

// Whether a packed weight of these kinds has the size that its header says.
bool coded_fits(const PackedHeader& header, int64_t packed_bytes);

// `baton_packed_bytes`, `baton_linear` of these kinds.
int64_t coded_packed_bytes(WeightKind kind, int64_t out_features, int64_t in_features, bool is_expanded);
void coded_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                  int64_t num_threads);

}  // namespace baton
