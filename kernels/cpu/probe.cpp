// What this machine can do at most, for benchmarks to state their results against: multiply-adds from registers (of pairs
// of bf16 where it has them, else of fp32)
// and reads from memory, on as many threads as a step would use. Each call is short: take the best of several.
#include <chrono>

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

constexpr int64_t kPerLane = kHasDot ? 2 : 1;  // multiply-adds

inline Vec multiply_add(Vec sum, Vec factor, Vec term) {
    if constexpr (kHasDot)
        return add_pairs(sum, IntVec(factor), IntVec(term));
    else
        return fma(sum, factor, term);
}

float multiply_add(int64_t num_rounds) {
    Vec a = splat(1.0f), b = a, c = a, d = a, e = a, f = a, g = a, h = a, i = a, j = a;
    Vec factor = splat(0.999f), term = splat(1e-3f);
    keep(a), keep(b), keep(c), keep(d), keep(e), keep(f), keep(g), keep(h), keep(i), keep(j);
    for (int64_t round = 0; round < num_rounds; ++round) {
        a = multiply_add(a, factor, term), b = multiply_add(b, factor, term), c = multiply_add(c, factor, term);
        d = multiply_add(d, factor, term), e = multiply_add(e, factor, term), f = multiply_add(f, factor, term);
        g = multiply_add(g, factor, term), h = multiply_add(h, factor, term), i = multiply_add(i, factor, term);
        j = multiply_add(j, factor, term);
        keep(factor);
    }
    return sum_lanes(((a + b) + (c + d)) + ((e + f) + (g + h)) + (i + j));
}

float read(const float* data, int64_t count) {
    Vec a = {}, b = {}, c = {}, d = {};
    for (int64_t i = 0; i + 4 * kWidth <= count; i += 4 * kWidth) {
        prefetch(data + i + 512), prefetch(data + i + 528);
        a += load(data + i), b += load(data + i + kWidth);
        c += load(data + i + 2 * kWidth), d += load(data + i + 3 * kWidth);
    }
    return sum_lanes((a + b) + (c + d));
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

// Multiply-adds per second over all threads, `num_rounds` x 10 vectors on each.
double baton_probe_multiply_adds(int64_t num_rounds, int64_t num_threads) {
    const auto start = Clock::now();
    parallel_ranges(num_threads, num_threads, 1, [&](int64_t, int64_t) {
        volatile float result = multiply_add(num_rounds);
        (void)result;
    });
    return double(num_threads * num_rounds * 10 * kWidth * kPerLane) / seconds_since(start);
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
