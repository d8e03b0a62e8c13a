// Decoding and the tile products of `gemm_coded_amx.h`.
#include "gemm_coded_amx.h"

#include "amx_tiles.h"

#if defined(BATON_AMX)

namespace baton {
namespace {

constexpr int64_t kParts = 8, kPartColumns = kAmxPanel / kParts;

#if defined(BATON_AVX512) && defined(__AVX512BW__) && defined(__AVX512BF16__) && !defined(BATON_AMX_EMULATED)

// fp16 of a panel's columns to fp32.
inline void widen_halves(const char* source, float* target) {
    for (int64_t n = 0; n < kAmxPanel; n += kWidth)
        _mm512_store_ps(target + n, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 2 * n))));
}

// A block of all of a panel's columns to its two tiles; between(part) is called after each of kParts parts of it. Nothing is
// ever subnormal or NaN where scales are finite fp16, so the machine's own rounding is `round_bf16`.
template <WeightKind Kind, typename Between>
[[gnu::always_inline]] inline void decode_block(const char* block, char* tiles, const Between& between) {
    alignas(64) float scales[kAmxPanel], minima[kAmxPanel];
    widen_halves(block, scales);
    const auto put = [&](int64_t n, __m512i values) { _mm512_store_si512(tiles + n * kLineBytes, values); };
    if constexpr (Kind == WeightKind::kAmxNibbles) {
        widen_halves(block + 2 * kAmxPanel, minima);
        const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i low_bits = _mm512_set1_epi16(15), second_half = _mm512_set1_epi16(16);
        const auto values = [&](int64_t n) { return _mm512_fmadd_ps(numbers, _mm512_set1_ps(scales[n]), _mm512_set1_ps(minima[n])); };
#pragma GCC unroll 8
        for (int64_t n = 0; n < kAmxPanel; n += 4) {
            const __m512i codes = _mm512_loadu_si512(block + 4 * kAmxPanel + n / 4 * kLineBytes);
#pragma GCC unroll 2
            for (int i = 0; i < 4; i += 2) {  // two columns' 16 values each are one table
                const __m512i table = __m512i(_mm512_cvtne2ps_pbh(values(n + i + 1), values(n + i)));
                const __m512i first = i == 0 ? codes : _mm512_srli_epi16(codes, 8);
                const __m512i second = _mm512_srli_epi16(codes, i == 0 ? 4 : 12);
                put(n + i, _mm512_permutexvar_epi16(_mm512_and_si512(first, low_bits), table));
                put(n + i + 1,
                    _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(second, low_bits, second_half, 0xEA), table));
            }
            if ((n + 4) % kPartColumns == 0) between(n / kPartColumns);
        }
    } else {
        const char* codes = block + 2 * kAmxPanel;
#pragma GCC unroll 32
        for (int64_t n = 0; n < kAmxPanel; ++n, codes += kBlockSize) {
            const __m512 scale = _mm512_set1_ps(scales[n]);
            const int8_t* column = reinterpret_cast<const int8_t*>(codes);
            put(n, __m512i(_mm512_cvtne2ps_pbh(load(column + kWidth) * scale, load(column) * scale)));
            if ((n + 1) % kPartColumns == 0) between(n / kPartColumns);
        }
    }
}

#else

template <WeightKind Kind, typename Between>
inline void decode_block(const char* block, char* tiles, const Between& between) {
    for (int64_t n = 0; n < kAmxPanel; ++n) {
        for (int64_t k = 0; k < kBlockSize; k += kWidth) {
            Vec values;
            for (int64_t lane = 0; lane < kWidth; ++lane) values[lane] = value_of(Kind, block, n, k + lane);
            store(reinterpret_cast<bf16*>(tiles + n * kLineBytes) + k, values);
        }
        if ((n + 1) % kPartColumns == 0) between(n / kPartColumns);
    }
}

#endif

// kTileLines lines of 64 bytes from `from` on, words of 32 bits turned over.
inline void turn(const char* const* lines, char* target) {
    for (int64_t byte = 0; byte < kLineBytes; byte += 16) {
        UintVec words[4];
        load_words(lines, byte, words);
        std::memcpy(target + byte / 4 * kLineBytes, words, sizeof words);
    }
}

template <WeightKind Kind>
void decode_panel_turned(const CodedWeight& weight, const char* panel, char* words) {
    alignas(64) char tiles[kDecodedBlockBytes];
    for (int64_t b = 0; b < weight.num_blocks(); ++b, words += kDecodedBlockBytes) {
        decode_block<Kind>(panel + b * CodedWeight::block_bytes(Kind), tiles, [](int64_t) {});
        for (int64_t half = 0; half < kDecodedBlockBytes; half += kTileBytes) {
            const char* lines[kTileLines];
            for (int64_t n = 0; n < kTileLines; ++n) lines[n] = tiles + half + n * kLineBytes;
            turn(lines, words + half);
        }
    }
}

}  // namespace

void decode_amx_panel(const CodedWeight& weight, const char* panel, char* words) {
    (is_nibbles(weight.kind) ? decode_panel_turned<WeightKind::kAmxNibbles>
                             : decode_panel_turned<WeightKind::kAmxBytes>)(weight, panel, words);
}

TurnedRows TurnedRows::of(const LineRows& rows) {
    static thread_local Scratch memory;
    static thread_local int64_t last = 0;
    const RowCut& cut = rows.cut;
    if (cut.height == 1) return {rows.data, rows.tile_bytes(), kLineBytes, 4};
    const TurnedRows result{reinterpret_cast<const char*>(memory.floats(cut.num_tiles * rows.steps * kTileBytes / 4)),
                            rows.steps * kTileBytes, kTileBytes, kLineBytes};
    if (last == rows.serial && last != 0) return result;
    last = rows.serial;
    for (int64_t tile = 0; tile < cut.num_tiles; ++tile)
        for (int64_t step = 0; step < rows.steps; ++step) {
            const char* lines[kTileLines];
            const char* first = rows.tile(tile) + step * rows.stride();
            for (int64_t row = 0; row < kTileLines; ++row) lines[row] = first + (row < cut.height ? row : 0) * kLineBytes;
            turn(lines, const_cast<char*>(result.tile(tile)) + step * kTileBytes);
        }
    return result;
}

namespace {

// A part of the product of a block. Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights.
template <bool Pair>
[[gnu::always_inline]] inline void multiply_part(int64_t part, const char* rows, int64_t tile_bytes, int64_t line,
                                                 const char* weights) {
    asm volatile("" : : : "memory");  // some compilers do not know what a tile load reads
    if (part == 0) _tile_loadd(6, weights, kLineBytes);
    if (part == 1) _tile_loadd(4, rows, line);
    if (part == 2) _tile_dpbf16ps(0, 6, 4);
    if (part == 3) _tile_loadd(7, weights + kTileBytes, kLineBytes);
    if (part == 4) _tile_dpbf16ps(1, 7, 4);
    if constexpr (Pair) {
        if (part == 5) _tile_loadd(5, rows + tile_bytes, line);
        if (part == 6) _tile_dpbf16ps(2, 6, 5);
        if (part == 7) _tile_dpbf16ps(3, 7, 5);
    }
}

template <WeightKind Kind, bool Pair>
void multiply_panel(const CodedTiles& tiles, int64_t first_tile, float* sums) {
    constexpr int64_t late = 2, block_bytes = CodedWeight::block_bytes(Kind);  // late: blocks decoded before they are needed
    const TurnedRows& turned = tiles.rows;
    const int64_t num_blocks = tiles.weight.num_blocks();
    const char* rows = turned.tile(first_tile);
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Pair) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const auto block = [&](int64_t b) { return tiles.decoded + b % tiles.ring * kDecodedBlockBytes; };
    const auto multiply = [&](int64_t b, int64_t part) [[gnu::always_inline]] {
        multiply_part<Pair>(part, rows + b * turned.step_bytes, turned.tile_bytes, turned.line, block(b));
    };
    int64_t b = 0;
    if (tiles.panel != nullptr) {
        const auto decode = [&](const auto& between) [[gnu::always_inline]] {
            const char* codes = tiles.panel + b * block_bytes;
            for (int64_t i = 0; i < block_bytes; i += 64) prefetch(codes + kPrefetchBytes + i);
            decode_block<Kind>(codes, block(b), between);
        };
        for (; b < std::min(late, num_blocks); ++b) decode([](int64_t) {});
        for (; b < num_blocks; ++b) decode([&](int64_t part) [[gnu::always_inline]] { multiply(b - late, part); });
        b = std::max<int64_t>(0, num_blocks - late);
    }
    for (; b < num_blocks; ++b)
        for (int64_t part = 0; part < kParts; ++part) multiply(b, part);
    const int64_t line = turned.line == 4 ? 4 : kRowsPerTile * 4, tile = line * kTileLines / 4;
    _tile_stored(0, sums, line);
    _tile_stored(1, sums + tile, line);
    if constexpr (Pair) {
        _tile_stored(2, sums + 2 * tile, line);
        _tile_stored(3, sums + 3 * tile, line);
    }
}

}  // namespace

void CodedTiles::multiply(int64_t first_tile, bool pair, float* sums) const {
    if (is_nibbles(weight.kind))
        (pair ? multiply_panel<WeightKind::kAmxNibbles, true> : multiply_panel<WeightKind::kAmxNibbles, false>)(
            *this, first_tile, sums);
    else
        (pair ? multiply_panel<WeightKind::kAmxBytes, true> : multiply_panel<WeightKind::kAmxBytes, false>)(
            *this, first_tile, sums);
}

}  // namespace baton

#endif  // BATON_AMX
