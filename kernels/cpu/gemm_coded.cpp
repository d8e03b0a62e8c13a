// Decoding, tiles, packing and single calls of `gemm_coded.h`.
#include "gemm_coded.h"

#include "gemm_coded_amx.h"
#include "word_tile.h"

namespace baton {
namespace {

// Codes of a block. A half is kWidth columns; its words (a word: two values of k of one column) are made from two vectors
// of fp32, the first kWidth / 2 columns' and the rest's, each with both values of a column side by side.
//
// 4 bits: [half][8 words of k][first or rest][lane], 32 bits of one lane: bits 4i to 4i + 3 are its code in word i.
// 8 bits: [half][16 words of k][first or rest][lane], a signed byte.
//
// The matrix unit's: of 4 bits [8][32 of k] words of 16 bits, of four columns each, the first one's the lowest; of 8 bits
// [32 columns][32 of k] bytes.
constexpr int64_t kGroup = kWidth / 2, kBlockWords = kBlockSize / 2, kNibbleWords = 8;

// Where the code of column `n` of a panel at `k` of a block lies: the byte, and for 4 bits the shift in it.
struct Place {
    int64_t byte;
    int shift;
};
Place place_of(WeightKind kind, int64_t n, int64_t k) {
    if (kind == WeightKind::kAmxNibbles) return {n / 4 * kLineBytes + 2 * k + n % 4 / 2, int(n % 2) * 4};
    if (kind == WeightKind::kAmxBytes) return {n * kBlockSize + k, 0};
    const int64_t half = n / kWidth, group = n % kWidth / kGroup, lane = n % kGroup * 2 + k % 2, word = k / 2;
    if (!is_nibbles(kind)) return {((half * kBlockWords + word) * 2 + group) * kWidth + lane, 0};
    const int64_t vector = (half * (kBlockWords / kNibbleWords) + word / kNibbleWords) * 2 + group, i = word % kNibbleWords;
    return {(vector * kWidth + lane) * 4 + i / 2, int(i % 2) * 4};
}

// Exact: every fp16 is an fp32.
inline float widen_half(const char* source) {
    uint16_t bits;
    std::memcpy(&bits, source, sizeof bits);
    const int32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 0 ? float(fraction) * 0x1p-24f
                                          : float(fraction + 1024) * 0x1p-25f * float(int64_t(1) << exponent);
    return bits & 0x8000 ? -magnitude : magnitude;
}

}  // namespace

float value_of(WeightKind kind, const char* block, int64_t n, int64_t k) {
    const Place place = place_of(kind, n, k);
    const char* codes = block + (is_nibbles(kind) ? 4 : 2) * kWordPanel;
    const int code = is_nibbles(kind) ? uint8_t(codes[place.byte]) >> place.shift & 15 : int8_t(codes[place.byte]);
    const float minimum = is_nibbles(kind) ? widen_half(block + 2 * (kWordPanel + n)) : 0.0f;
    return float(code) * widen_half(block + 2 * n) + minimum;
}

namespace {

#if defined(BATON_DOT) && defined(BATON_AVX512) && !defined(BATON_DOT_EMULATED)

// Values of kGroup columns, two per column, as lanes of the two vectors that a half's words are made from.
struct Halves {
    Vec first, rest;

    // fp16 of kWidth columns.
    explicit Halves(const char* source) {
        const Vec all = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
        const __m512i lane = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        first = _mm512_permutexvar_ps(lane, all);
        rest = _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(int(kGroup))), all);
    }
};

// Neither is ever subnormal or NaN where scales are finite fp16, so the machine's own rounding is `round_bf16`.
inline IntVec words_of(Vec first, Vec rest) {
    const auto both = _mm512_cvtne2ps_pbh(rest, first);
    IntVec words;
    std::memcpy(&words, &both, sizeof words);
    return words;
}

// take(word of k, words of the first half's columns, of the second's) for all of a block, in the order of k.
template <WeightKind Kind, typename Take>
[[gnu::always_inline]] inline void decode_block(const char* block, const Take& take) {
    const Halves low_scale(block), high_scale(block + 2 * kWidth);
    if constexpr (Kind == WeightKind::kNibbles) {
        const Halves low_minimum(block + 4 * kWidth), high_minimum(block + 6 * kWidth);
        const Vec numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const char* codes = block + 4 * kWordPanel;
        const auto values = [&](int64_t vector, int i, Vec scale, Vec minimum) [[gnu::always_inline]] {
            const __m512i lanes = __m512i(load_words(codes + vector * 4 * kWidth));
            // only the lowest four bits choose
            return fma(_mm512_permutexvar_ps(i == 0 ? lanes : _mm512_srli_epi32(lanes, 4 * i), numbers), scale, minimum);
        };
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part)
#pragma GCC unroll 8
            for (int i = 0; i < kNibbleWords; ++i)
                take(part * kNibbleWords + i,
                     words_of(values(2 * part, i, low_scale.first, low_minimum.first),
                              values(2 * part + 1, i, low_scale.rest, low_minimum.rest)),
                     words_of(values(2 * part + 4, i, high_scale.first, high_minimum.first),
                              values(2 * part + 5, i, high_scale.rest, high_minimum.rest)));
    } else {
        const int8_t* codes = reinterpret_cast<const int8_t*>(block + 2 * kWordPanel);
        const int8_t* high_codes = codes + kBlockSize * kWidth;
#pragma GCC unroll 2
        for (int word = 0; word < kBlockWords; ++word, codes += 2 * kWidth, high_codes += 2 * kWidth)
            take(word, words_of(load(codes) * low_scale.first, load(codes + kWidth) * low_scale.rest),
                 words_of(load(high_codes) * high_scale.first, load(high_codes + kWidth) * high_scale.rest));
    }
}

#else

template <WeightKind Kind, typename Take>
inline void decode_block(const char* block, const Take& take) {
    const auto words = [&](int64_t first, int64_t word) {
        Vec values[2];
        for (int64_t lane = 0; lane < kWidth; ++lane)
            for (int64_t odd = 0; odd < 2; ++odd) values[odd][lane] = value_of(Kind, block, first + lane, 2 * word + odd);
        return IntVec(round_bf16(values[0]) >> 16 | (round_bf16(values[1]) & 0xffff0000));
    };
    for (int word = 0; word < kBlockWords; ++word) take(word, words(0, word), words(kWidth, word));
}

#endif

// Lines of words, a half's beside the other's.
template <WeightKind Kind>
void decode(const char* panel, int64_t num_blocks, char* words) {
    for (int64_t b = 0; b < num_blocks; ++b, words += kBlockWords * 4 * kWordPanel)
        decode_block<Kind>(panel + b * CodedWeight::block_bytes(Kind),
                           [&](int64_t word, IntVec low, IntVec high) [[gnu::always_inline]] {
                               std::memcpy(words + word * 4 * kWordPanel, &low, sizeof low);
                               std::memcpy(words + word * 4 * kWordPanel + sizeof low, &high, sizeof high);
                           });
}

#if defined(BATON_DOT)

template <WeightKind Kind, int Rows>
void coded_sums(const char* x, int64_t stride, int64_t num_blocks, const char* panel, const Ride& ride, float* out) {
    const int64_t block_bytes = CodedWeight::block_bytes(Kind), rides = ceil_div(ride.num_lines, num_blocks);
    RowSums<DotPairs, Rows> sums;
    for (int64_t b = 0; b < num_blocks; ++b, x += stride, panel += block_bytes) {
        for (int64_t i = 0; i < block_bytes; i += 64) prefetch(panel + kPrefetchBytes + i);
        if (Rows >= kCodedRideRows)
            for (int64_t i = b * rides; i < (b + 1) * rides; ++i) ride.ask(i);
        IntVec last_low, last_high;
        decode_block<Kind>(panel, [&](int64_t word, IntVec low, IntVec high) [[gnu::always_inline]] {
            low = kept(low), high = kept(high);
            if (word > 0) sums.add(x + 4 * (word - 1), last_low, last_high);
            last_low = low, last_high = high;
        });
        sums.add(x + 4 * (kBlockWords - 1), last_low, last_high);
    }
    sums.store_to(out);
}

#endif  // BATON_DOT

template <typename Y>
void linear(const float* x, int64_t num_rows, const void* packed, const float* bias, Y* y, int64_t num_threads) {
    static thread_local Scratch scratch;
    const PackedHeader& header = header_of(packed);
    const bool on_unit = is_amx_coded(header.kind);
    const RowCut cut = on_unit ? amx_cut(num_rows) : word_cut(num_rows);
    LineRows rows = LineRows::in(scratch, cut, 2 * header.in_features);
    rows.serial = new_serials(1);
    for (int64_t m = 0; m < num_rows; ++m) narrow_row(x + m * header.in_features, header.in_features, m, rows);
    const Store<Y> output{y, bias, header.out_features};
    parallel_ranges(num_threads, ceil_div(header.out_features, kWordPanel), 2, [&](int64_t begin, int64_t end) {
        const CodedWeight weight(packed);
        if constexpr (kHasAmx)
            if (on_unit) return amx_gemm_coded(rows, weight, begin, end, output);
        if constexpr (kHasDot) gemm_coded(rows, weight, begin, end, output);
    });
}

}  // namespace

char* decoded_words(const CodedWeight& weight) {
    static thread_local Scratch memory;
    return reinterpret_cast<char*>(memory.floats(weight.stream().words * kWordPanel));
}

void decode_panel(const CodedWeight& weight, const char* panel, char* words) {
    if constexpr (kHasAmx)
        if (is_amx_coded(weight.kind)) return decode_amx_panel(weight, panel, words);
    const auto decode_kind = is_nibbles(weight.kind) ? decode<WeightKind::kNibbles> : decode<WeightKind::kBytes>;
    decode_kind(panel, weight.num_blocks(), words);
}

#if defined(BATON_DOT)

void coded_tile(int64_t num_rows, const char* x, int64_t stride, const CodedWeight& weight, const char* panel,
                const Ride& ride, float* sums) {
    const int64_t blocks = weight.num_blocks();
    const bool nibbles = is_nibbles(weight.kind);
    switch (num_rows) {
#define BATON_ROWS(ROWS)                                                                           \
    case ROWS:                                                                                     \
        return nibbles ? coded_sums<WeightKind::kNibbles, ROWS>(x, stride, blocks, panel, ride, sums)    \
                       : coded_sums<WeightKind::kBytes, ROWS>(x, stride, blocks, panel, ride, sums);
        BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6) BATON_ROWS(7) BATON_ROWS(8)
#undef BATON_ROWS
    }
    __builtin_unreachable();  // 1 to kFusedRows rows
}

#endif  // BATON_DOT

void coded_linear(const float* x, int64_t num_rows, const void* packed, const float* bias, void* y, bool y_bf16,
                  int64_t num_threads) {
    with_type(y, y_bf16, [&](auto* out) { linear(x, num_rows, packed, bias, out, num_threads); });
}

namespace {

// Of the header and the codes: where decoded panels may begin.
int64_t codes_end(WeightKind kind, int64_t out_features, int64_t in_features) {
    const int64_t blocks = ceil_div(out_features, kWordPanel) * (in_features / kBlockSize);
    return int64_t(sizeof(PackedHeader)) + blocks * CodedWeight::block_bytes(kind) + kPrefetchBytes;
}

}  // namespace

bool coded_fits(const PackedHeader& header, int64_t packed_bytes) {
    const int64_t end = codes_end(header.kind, header.out_features, header.in_features);
    return (header.expanded == 0 || header.expanded == end) &&
           packed_bytes ==
               coded_packed_bytes(header.kind, header.out_features, header.in_features, header.expanded != 0);
}

int64_t coded_packed_bytes(WeightKind kind, int64_t out_features, int64_t in_features, bool is_expanded) {
    return codes_end(kind, out_features, in_features) + (is_expanded ? dot_packed_bytes(out_features, in_features) : 0);
}

}  // namespace baton

using namespace baton;

extern "C" {

int64_t baton_coded_packed_bytes(int64_t kind, int64_t out_features, int64_t in_features, int64_t is_expanded) {
    return coded_packed_bytes(WeightKind(kind), out_features, in_features, is_expanded);
}

// codes [out, in]: 0 to 15 of kNibbles, int8 of kBytes; scales, minima [out, in / 32] fp16, minima null of kBytes; `in` whole
// blocks. `is_expanded`: with decoded panels. Columns that fill up the last panel are zeros.
void baton_coded_pack(int64_t kind, const uint8_t* codes, const uint16_t* scales, const uint16_t* minima,
                      int64_t out_features, int64_t in_features, int64_t is_expanded, void* packed) {
    const WeightKind coded = WeightKind(kind);
    std::memset(packed, 0, size_t(coded_packed_bytes(coded, out_features, in_features, is_expanded)));
    const int64_t end = codes_end(coded, out_features, in_features);
    const PackedHeader header{kPackedMagic, out_features, in_features, 2, kWordPanel, coded, is_expanded ? end : 0, 0};
    std::memcpy(packed, &header, sizeof header);
    const CodedWeight weight(packed);
    const int64_t num_blocks = weight.num_blocks(), block_bytes = CodedWeight::block_bytes(coded);
    char* panels = const_cast<char*>(weight.panels);
    for (int64_t n = 0; n < out_features; ++n)
        for (int64_t b = 0; b < num_blocks; ++b) {
            char* block = panels + (n / kWordPanel * num_blocks + b) * block_bytes;
            const int64_t column = n % kWordPanel, index = n * num_blocks + b;
            std::memcpy(block + 2 * column, scales + index, 2);
            if (minima != nullptr) std::memcpy(block + 2 * (kWordPanel + column), minima + index, 2);
            char* target = block + (minima != nullptr ? 4 : 2) * kWordPanel;
            for (int64_t k = 0; k < kBlockSize; ++k) {
                const Place place = place_of(coded, column, k);
                target[place.byte] = char(uint8_t(target[place.byte]) | codes[index * kBlockSize + k] << place.shift);
            }
        }
    if (!is_expanded) return;
    const PanelStream stream = weight.stream();
    char* expanded = const_cast<char*>(weight.expanded);
    for (int64_t p = 0; p < ceil_div(out_features, kWordPanel); ++p, expanded += stream.words * 4 * kWordPanel)
        decode_panel(weight, stream.panel(p), expanded);
}
}
