// The arithmetic of attention over int8 keys and values where the machine sums products of bytes and of int16
// (`words.h`), on a few query rows at a time.
//
// 1. A query becomes integers: n = round(q / s), s = max |q| / 16256, so that  q . k = s * sum n k.
// 2. A row's weights become integers, a partition at a time: with W = weight times its value's scale, n = round(W / s),
//    s = max W / 32640. A weight of 0 takes nothing from its value.
// 3. Where many rows share keys and values, these become int16, and `attention_pairs.h` does the rest, or they meet bytes in
//    the matrix unit (`attention_amx_bytes.h`). Few rows take them as they lie, four bytes at a time. Bytes of a row's n are
//    two, n = 128 high + low; where one side must be unsigned, keys are (k + 128, hence 128 sum n too much), or weights,
//    which are. Interleaving four values leaves elements in an order of its own within each group of kQuadGroup
//    (`load_quads_in_order` undoes it), which sums keep until the end.
//
// Sums are exact integers, below 2^31 for rows of up to 1,024 elements: the same in every order and on both ways. What is
// rounded is what the row alone says: its query to 1 / 32,512 of its largest element, its weights to 1 / 65,280.
#pragma once

#include "attention.h"
#include "attention_pairs.h"
#include "attention_quarters.h"
#include "attention_tiles.h"
#include "attention_weights.h"

namespace baton {

constexpr int64_t kQuadGroup = 4 * kWidth;
constexpr int kMostByteRows = 3;  // of a tile: each is two rows of bytes

// The lowest bits of each lane.
template <typename Narrow>
inline void narrow(IntVec lanes, char* target) {
#if defined(BATON_AVX512)
    if constexpr (sizeof(Narrow) == 1) {
        const __m128i some = _mm512_cvtepi32_epi8(__m512i(lanes));
        std::memcpy(target, &some, sizeof some);
    } else {
        const __m256i some = _mm512_cvtepi32_epi16(__m512i(lanes));
        std::memcpy(target, &some, sizeof some);
    }
#else
    for (int64_t lane = 0; lane < kWidth; ++lane) {
        const Narrow some = Narrow(uint32_t(lanes[lane]));
        std::memcpy(target + lane * int64_t(sizeof some), &some, sizeof some);
    }
#endif
}

// Elements from d on of [dim] int16, or of [2, dim] bytes, high and low of n = 128 high + low: signed ones where n is, so
// that low is within [-64, 63], or within [0, 127]. The lowest 16 bits of each lane are n's.
template <bool Signed>
inline void store_integers(IntVec n, char* target, int64_t d, int64_t dim, bool as_bytes) {
    if (as_bytes) {
        const IntVec high = (Signed ? n + 64 : n) >> 7;
        narrow<int8_t>(high, target + d), narrow<int8_t>(Signed ? n - (high << 7) : n & 127, target + dim + d);
    } else {
        narrow<int16_t>(n, target + d * 2);
    }
}

// A query in `dim` floats of memory: its n, then what turns sums into scores.
struct IntegerQuery {
    char* n;          // [dim] int16, or [2, dim] bytes: high, low
    float* scale;
    int32_t* offset;  // 128 times the sum of all n

    IntegerQuery(const float* memory, int64_t dim)
        : n(reinterpret_cast<char*>(const_cast<float*>(memory))), scale(reinterpret_cast<float*>(n + 2 * dim)),
          offset(reinterpret_cast<int32_t*>(scale + 1)) {}

    // A query with an element that is not finite is zeros of scale NaN.
    void take(const bf16* source, int64_t head_dim, int64_t dim, bool as_bytes) const {
        Vec largest = {}, check = {};
        for (int64_t d = 0; d < head_dim; d += kWidth) {
            const Vec some = load_partial(source + d, head_dim - d);
            largest = max(Vec(UintVec(some) & 0x7fffffff), largest);
            check += some * 0.0f;  // NaN from what is not finite
        }
        const bool is_finite = sum_lanes(check) == 0.0f;
        const float most = is_finite ? std::max(max_lanes(largest), 1e-33f) : kInfinity;
        const Vec inverse = splat(16256.0f / most), magic = splat(kMagic);
        Vec sum = {};  // exact: below 2^24
        if (head_dim < dim || !is_finite) std::memset(n, 0, size_t(2 * dim));
        for (int64_t d = 0; is_finite && d < head_dim; d += kWidth) {
            const Vec shifted = fma(load_partial(source + d, head_dim - d), inverse, magic);
            store_integers<true>(IntVec(shifted), n, d, dim, as_bytes);
            sum += shifted - magic;
        }
        *offset = int32_t(sum_lanes(sum)) * 128;
        *scale = is_finite ? most / 16256.0f : std::numeric_limits<float>::quiet_NaN();
    }
};

// As `score_panel`, for keys of int16.
template <int Rows>
BATON_NOINLINE void score_shorts(const float* q, int64_t dim, const char* panel, int64_t num_keys, const float* factors,
                                 float* scores) {
    score_panel<ShortPair, Rows>(
        reinterpret_cast<const char*>(q), dim * 4, dim, panel, num_keys,
        [&](int r, int64_t j, IntVec sum) {
            return __builtin_convertvector(sum, Vec) * (load(factors + j) * *IntegerQuery(q + r * dim, dim).scale);
        },
        scores);
}

// scores[r][j] = (q[r] . keys[j]) * factors[j] for kWidth keys, read where they lie; rows of q are `dim` floats apart.
template <int Rows>
BATON_NOINLINE void score_bytes_in_place(const float* q, int64_t dim, const char* const* keys, const float* factors,
                                         float* scores) {
    IntVec high[Rows][4], low[Rows][4];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) high[r][i] = low[r][i] = IntVec{};
    const char* const bytes = reinterpret_cast<const char*>(q);
    for (int64_t d = 0; d < dim; d += kQuarterBytes) {
        IntVec unsigned_keys[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) unsigned_keys[i] = IntVec(load_quarters(keys + i, d) ^ 0x80808080);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            const IntVec upper = splat_quarter(bytes + r * 4 * dim + d), lower = splat_quarter(bytes + (r * 4 + 1) * dim + d);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                high[r][i] = add_quads(high[r][i], unsigned_keys[i], upper);
                low[r][i] = add_quads(low[r][i], unsigned_keys[i], lower);
            }
        }
    }
    const Vec factor = load(factors);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
        const IntegerQuery query(q + r * dim, dim);
        IntVec sums[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[i] = (high[r][i] << 7) + low[r][i];
        const IntVec sum = add_chains(sums) - *query.offset;
        store(scores + r * kPartition, __builtin_convertvector(sum, Vec) * (factor * *query.scale));
    }
}

// A row's weights of a partition in the memory of its scores: their n, then what turns sums into results, and the factor
// for what was accumulated before.
struct IntegerWeights {
    char* n;  // [kPartition] int16, or [2, kPartition] bytes: high, low
    float *scale, *rescale;

    explicit IntegerWeights(float* scores)
        : n(reinterpret_cast<char*>(scores)), scale(reinterpret_cast<float*>(n + 2 * kPartition)),
          rescale(scale + 1) {}

    // As `softmax_row`, from the scores of up to kMostWeighed rows and their values' scales, each step for all of them.
    // Where a scale is no number (`AllNumbers` false), a weight of 0 takes nothing from it, and other weights are zeros of
    // scale NaN.
    template <bool AllNumbers, typename Visible>
    static void take(float* scores, int64_t num_rows, const Visible& visible, const float* value_scales, bool as_bytes,
                     float* running_max, float* running_sum) {
        alignas(64) float weights[kMostWeighed][kPartition];
        alignas(64) float maxima[kMostWeighed] = {}, rescale[kMostWeighed], sums[kMostWeighed] = {}, check[kMostWeighed] = {};
        alignas(64) float largest[kMostWeighed] = {}, inverse[kMostWeighed], before[kMostWeighed] = {};
        int64_t ends[kMostWeighed];
        for (int64_t r = 0; r < num_rows; ++r) {
            ends[r] = num_weighed(visible(r)), before[r] = running_max[r];
            maxima[r] = highest_score(scores + r * kPartition, visible(r));
        }
        for (int64_t r = 0; r < kMostWeighed; r += kWidth) {
            const Vec old = load(before + r), now = max(load(maxima + r), old);
            store(maxima + r, now), store(rescale + r, weight_of<void>(old - now));
        }
        for (int64_t r = 0; r < num_rows; ++r) {
            const Vec new_max = splat(maxima[r]);
            Vec most = {}, total = {}, numbers = {};
            for (int64_t j = 0; j < ends[r]; j += kWidth) {
                const Vec weight = weight_of<void>(load(scores + r * kPartition + j) - new_max);
                total += weight;
                Vec scaled = weight * load(value_scales + j);
                if (!AllNumbers) scaled = weight == 0.0f ? Vec{} : scaled, numbers += scaled;
                most = max(scaled, most);
                store(weights[r] + j, scaled);
            }
            sums[r] = sum_lanes(total), largest[r] = max_lanes(most);
            check[r] = AllNumbers ? sums[r] : sum_lanes(numbers);
        }
        for (int64_t r = 0; r < kMostWeighed; r += kWidth) {
            const Vec most = max(splat(1e-33f), load(largest + r));
            store(largest + r, most * (1.0f / 32640.0f)), store(inverse + r, 32640.0f / most);
        }
        for (int64_t r = 0; r < num_rows; ++r) {
            const IntegerWeights target(scores + r * kPartition);
            const bool is_number = check[r] == check[r];
            const Vec factor = splat(inverse[r]), magic = splat(kMagic);
            std::memset(target.n, 0, size_t(2 * kPartition));
            for (int64_t j = 0; is_number && j < ends[r]; j += kWidth)
                store_integers<false>(IntVec(fma(load(weights[r] + j), factor, magic)), target.n, j, kPartition, as_bytes);
            *target.scale = is_number ? largest[r] : std::numeric_limits<float>::quiet_NaN();
            *target.rescale = rescale[r];
            running_max[r] = maxima[r], running_sum[r] = running_sum[r] * rescale[r] + sums[r];
        }
    }
};

// kQuadGroup elements from element d on of four values as words, in four vectors and an order of their own.
inline void interleave_quad(const char* const* rows, int64_t d, IntVec (&words)[4]) {
    Bytes row[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) std::memcpy(&row[i], rows[i] + d, sizeof row[i]);
    const Halves ab_low = Halves(mix_low(row[0], row[1])), cd_low = Halves(mix_low(row[2], row[3]));
    const Halves ab_high = Halves(mix_high(row[0], row[1])), cd_high = Halves(mix_high(row[2], row[3]));
    words[0] = IntVec(mix_low(ab_low, cd_low)), words[1] = IntVec(mix_high(ab_low, cd_low));
    words[2] = IntVec(mix_low(ab_high, cd_high)), words[3] = IntVec(mix_high(ab_high, cd_high));
}

// A group's sums as `interleave_quad` has left them, in the order of elements.
inline void load_quads_in_order(const float* sums, Vec (&ordered)[4]) {
#if defined(BATON_AVX512)  // in registers: memory would wait for four short writes at each read
    const __m512 a = load(sums), b = load(sums + 16), c = load(sums + 32), d = load(sums + 48);
    const __m512 ab_low = _mm512_shuffle_f32x4(a, b, 0x44), ab_high = _mm512_shuffle_f32x4(a, b, 0xee);
    const __m512 cd_low = _mm512_shuffle_f32x4(c, d, 0x44), cd_high = _mm512_shuffle_f32x4(c, d, 0xee);
    ordered[0] = _mm512_shuffle_f32x4(ab_low, cd_low, 0x88), ordered[1] = _mm512_shuffle_f32x4(ab_low, cd_low, 0xdd);
    ordered[2] = _mm512_shuffle_f32x4(ab_high, cd_high, 0x88), ordered[3] = _mm512_shuffle_f32x4(ab_high, cd_high, 0xdd);
#else
    float* const target = reinterpret_cast<float*>(ordered);
    for (int64_t quarter = 0; quarter < kWidth / 4; ++quarter)
        for (int64_t i = 0; i < 4; ++i) std::memcpy(target + quarter * 16 + i * 4, sums + i * kWidth + quarter * 4, 16);
#endif
}

// out[r] += sum of quads of weights times quads of values, integers; values are read where they lie. Weights are of rows
// kPartition floats apart, from the first quad's on; rows of `out` are `dim` apart.
template <int Rows>
BATON_NOINLINE void add_value_quads_in_place(const char* weights, const char* const* values, int64_t num_quads,
                                             int64_t dim, float* out) {
    for (int64_t d = 0; d < dim; d += kQuadGroup) {
        IntVec high[Rows][4], low[Rows][4];
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) high[r][v] = low[r][v] = IntVec{};
        for (int64_t p = 0; p < num_quads; ++p) {
            IntVec words[4];
            interleave_quad(values + 4 * p, d, words);
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                const char* const quad = weights + r * 4 * kPartition + 4 * p;
                const IntVec upper = splat_word(quad), lower = splat_word(quad + kPartition);
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v) {
                    high[r][v] = add_quads(high[r][v], upper, words[v]);
                    low[r][v] = add_quads(low[r][v], lower, words[v]);
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                float* const target = out + r * dim + d + v * kWidth;
                const IntVec sum = load_words(target) + (high[r][v] << 7) + low[r][v];
                std::memcpy(target, &sum, sizeof sum);
            }
    }
}

}  // namespace baton
