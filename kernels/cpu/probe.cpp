// What this machine can do at most, for benchmarks to state their results against: multiply-adds from registers (of fp32,
// of pairs of bf16 where it has them, of bytes; and of the matrix unit) and reads from memory, on as many threads as a step would use. Each call is
// short: take the best of several.
#include <chrono>
#include <vector>

#include "gemm_amx.h"
#include "simd.h"
#include "threads.h"
#include "words.h"

namespace baton {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The compiler may neither drop the value nor know what it is.
inline void keep(Vec& value) {
#if defined(BATON_AVX512) || defined(BATON_AVX2)
    asm volatile("" : "+x"(value));
#else
    asm volatile("" : "+m"(value));
#endif
}

struct Floats {
    static constexpr int64_t kPerLane = 1;  // multiply-adds
    static Vec add(Vec sum, Vec factor, Vec term) { return fma(sum, factor, term); }
};

struct Pairs {
    static constexpr int64_t kPerLane = 2;
    static Vec add(Vec sum, Vec factor, Vec term) { return add_pairs(sum, IntVec(factor), IntVec(term)); }
};

// As the products of `gemm_int8.cpp`, by the fewest instructions that the machine has for four of a lane.
struct Bytes {
    static constexpr int64_t kPerLane = 4;
    static Vec add(Vec sum, Vec factor, Vec term) {
#if defined(BATON_AVX512) && defined(__AVX512BW__) && !defined(__AVX512VNNI__)
        const __m512i pairs = _mm512_maddubs_epi16(__m512i(factor), __m512i(term));
        return Vec(IntVec(sum) + IntVec(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))));
#elif defined(BATON_AVX2) && defined(__AVX512VNNI__) && defined(__AVX512VL__)
        return Vec(IntVec(_mm256_dpbusd_epi32(__m256i(sum), __m256i(factor), __m256i(term))));
#elif defined(BATON_AVX2) && defined(__AVXVNNI__)
        return Vec(IntVec(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(factor), __m256i(term))));
#elif defined(BATON_AVX2)
        const __m256i pairs = _mm256_maddubs_epi16(__m256i(factor), __m256i(term));
        return Vec(IntVec(sum) + IntVec(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
#else
        return Vec(add_quads(IntVec(sum), IntVec(factor), IntVec(term)));
#endif
    }
};

template <typename Kind>
float multiply_add(int64_t num_rounds) {
    Vec a = splat(1.0f), b = a, c = a, d = a, e = a, f = a, g = a, h = a, i = a, j = a;
    Vec factor = splat(0.999f), term = splat(1e-3f);
    keep(a), keep(b), keep(c), keep(d), keep(e), keep(f), keep(g), keep(h), keep(i), keep(j);
    for (int64_t round = 0; round < num_rounds; ++round) {
        a = Kind::add(a, factor, term), b = Kind::add(b, factor, term), c = Kind::add(c, factor, term);
        d = Kind::add(d, factor, term), e = Kind::add(e, factor, term), f = Kind::add(f, factor, term);
        g = Kind::add(g, factor, term), h = Kind::add(h, factor, term), i = Kind::add(i, factor, term);
        j = Kind::add(j, factor, term);
        keep(factor), keep(term);
    }
    return sum_lanes(((a + b) + (c + d)) + ((e + f) + (g + h)) + (i + j));
}

// Per second over all threads, `num_rounds` x 10 vectors on each.
template <typename Kind>
double multiply_adds_per_s(int64_t num_rounds, int64_t num_threads) {
    const auto start = Clock::now();
    parallel_ranges(num_threads, num_threads, 1, [&](int64_t, int64_t) {
        volatile float result = multiply_add<Kind>(num_rounds);
        (void)result;
    });
    return double(num_threads * num_rounds * 10 * kWidth * Kind::kPerLane) / seconds_since(start);
}

#if defined(BATON_AMX)
// Products of tiles that stay in the unit, of numbers as a model has them: zeros would be multiplied at a higher clock.
template <bool IsBf16>
void multiply_tiles_in_place(int64_t num_rounds) {
    static const std::vector<uint16_t> numbers = [] {
        std::vector<uint16_t> result(4 * kTileBytes / 2);
        uint32_t state = 1;
        for (uint16_t& number : result) {
            state = state * 1664525u + 1013904223u;
            number = uint16_t(0x3c00 + (state >> 16 & 0x81ff));  // 0.008 to 0.031 and their negatives, as bf16
        }
        return result;
    }();
    const char* data = reinterpret_cast<const char*>(numbers.data());
    const AmxSession session(kTileLines);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, data, kLineBytes);
    _tile_loadd(5, data + kTileBytes, kLineBytes);
    _tile_loadd(6, data + 2 * kTileBytes, kLineBytes);
    _tile_loadd(7, data + 3 * kTileBytes, kLineBytes);
    for (int64_t round = 0; round < num_rounds; ++round) {
        if constexpr (IsBf16) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
    }
    alignas(64) char sums[kTileBytes];  // waits for the last product
    _tile_stored(0, sums, kLineBytes);
}

template <bool IsBf16>
double tile_multiply_adds_per_s(int64_t num_rounds, int64_t num_threads) {
    const auto start = Clock::now();
    parallel_ranges(num_threads, num_threads, 1, [&](int64_t, int64_t) { multiply_tiles_in_place<IsBf16>(num_rounds); });
    constexpr int64_t per_product = kTileLines * kTileLines * kLineBytes / (IsBf16 ? 2 : 1);
    return double(num_threads * num_rounds * 4 * per_product) / seconds_since(start);
}
#endif

// Four streams, and no line asked for by name: where some lines are and others not, the machine guesses the rest wrong, and
// reads half as fast.
float read(const float* data, int64_t count) {
    const int64_t quarter = count / 4;
    Vec sums[4] = {};
    for (int64_t i = 0; i + kWidth <= quarter; i += kWidth)
#pragma GCC unroll 4
        for (int64_t stream = 0; stream < 4; ++stream) sums[stream] += load(data + stream * quarter + i);
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

// The best of floating point: of pairs of bf16 if the machine has them, else of fp32.
double baton_probe_multiply_adds(int64_t num_rounds, int64_t num_threads) {
    if constexpr (kHasDot)
        return multiply_adds_per_s<Pairs>(num_rounds, num_threads);
    else
        return multiply_adds_per_s<Floats>(num_rounds, num_threads);
}

double baton_probe_fp32_multiply_adds(int64_t num_rounds, int64_t num_threads) {
    return multiply_adds_per_s<Floats>(num_rounds, num_threads);
}

double baton_probe_byte_multiply_adds(int64_t num_rounds, int64_t num_threads) {
    return multiply_adds_per_s<Bytes>(num_rounds, num_threads);
}

// Of the matrix unit, four products of tiles a round; 0: this process may not use one.
double baton_probe_tile_multiply_adds(int64_t num_rounds, int64_t num_threads, int64_t is_bf16) {
#if defined(BATON_AMX)
    if (amx_is_lent())
        return is_bf16 ? tile_multiply_adds_per_s<true>(num_rounds, num_threads)
                       : tile_multiply_adds_per_s<false>(num_rounds, num_threads);
#endif
    (void)num_rounds, (void)num_threads, (void)is_bf16;
    return 0;
}

// Bytes per second read from `data` [count] by all threads, each its own contiguous share.
double baton_probe_read(const float* data, int64_t count, int64_t num_threads) {
    const auto start = Clock::now();
    parallel_ranges(num_threads, num_threads, 1, [&](int64_t rank, int64_t) {
        const int64_t share = count / num_threads;
        volatile float result = read(data + rank * share, share);
        (void)result;
    });
    return double(count / num_threads * num_threads * 4) / seconds_since(start);
}
}
