// Choosing ids from one row of scores: weights, the largest few, a nucleus, a draw. One row at a time, one thread.
//
// A row is read once for the maxima of its blocks; after that the largest few are found in the few blocks that can
// hold any, so nothing sorts a vocabulary. Weights are multiples of 2^-34 and at most 1: sums of up to 2^19 of them
// are exact in fp64, in any order. So partitions, vector widths and pivots cannot show in a result, and the plain
// definition in NumPy (the engine's sampler) has the same bits.
//
// Order everywhere: larger score first, among equal scores the lower id first. Scores have no NaN and no +infinity.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace baton {

constexpr int64_t kBlock = 64;  // scores per maximum
constexpr int64_t kLargestVocabulary = int64_t(1) << 19;
static_assert(kBlock % kWidth == 0);

struct Scores {
    const float* values;
    int64_t size;
    const float* maxima;  // [num_blocks]: of each block of kBlock, the last one shorter

    int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
    int64_t block_end(int64_t block) const { return std::min(size, (block + 1) * kBlock); }
};

// Orders by score, then id; `weight` is filled by `weigh`.
struct Candidate {
    uint64_t key;
    float weight;

    int64_t id() const { return int64_t(key & 0xffffffff); }
};

inline bool any(IntVec mask) {
#if defined(BATON_AVX512)
    return _mm512_test_epi32_mask(__m512i(mask), __m512i(mask)) != 0;
#elif defined(BATON_AVX2)
    return _mm256_movemask_epi8(__m256i(mask)) != 0;
#else
    int32_t result = 0;
    for (int64_t lane = 0; lane < kWidth; ++lane) result |= mask[lane];
    return result != 0;
#endif
}

// Integers in the order of the floats, and back.
inline int32_t to_ordered(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}
inline float from_ordered(int32_t ordered) {
    const int32_t bits = ordered ^ ((ordered >> 31) & 0x7fffffff);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Keys ascend where scores fall and, among equals, ids rise. Adding 0 makes -0.0 the same as 0.0.
inline uint64_t key_of(float score, int64_t id) {
    const uint32_t falling = uint32_t(to_ordered(score + 0.0f)) ^ 0x7fffffff;
    return uint64_t(falling) << 32 | uint64_t(id);
}
inline float score_of(uint64_t key) { return from_ordered(int32_t(uint32_t(key >> 32) ^ 0x7fffffff)); }

// Fills in the maximum of each block. Returns the id of the largest value, the first among equals; of the first NaN,
// if there is one, and then the maxima mean nothing.
inline int64_t find_best(const float* values, int64_t size, float* maxima) {
    Vec highest = splat(-kInfinity);
    IntVec not_numbers = {};
    const int64_t num_blocks = (size + kBlock - 1) / kBlock;
    for (int64_t block = 0; block < num_blocks; ++block) {
        const float* source = values + block * kBlock;
        const int64_t count = std::min(kBlock, size - block * kBlock);
        Vec of_block = splat(-kInfinity);
        int64_t i = 0;
        for (; i + kWidth <= count; i += kWidth) {
            const Vec value = load(source + i);
            not_numbers |= value != value;
            of_block = max(of_block, value);
        }
        for (; i < count; ++i) {
            const Vec value = splat(source[i]);
            not_numbers |= value != value;
            of_block = max(of_block, value);
        }
        highest = max(highest, of_block);
        maxima[block] = max_lanes(of_block);
    }
    if (any(not_numbers)) return std::find_if(values, values + size, [](float v) { return v != v; }) - values;
    const float best = max_lanes(highest);
    int64_t id = (std::find(maxima, maxima + num_blocks, best) - maxima) * kBlock;
    while (values[id] != best) ++id;
    return id;
}

// e^x for x <= 0, rounded to a multiple of 2^-34: Cephes' expf in single multiplications and additions.
inline Vec weight(Vec x) {
    const Vec to_integer = splat(kMagic);
    const Vec to_grid = splat(0x1p-11f);        // what is below, plus this, is a multiple of 2^-34
    x = max(x, splat(-25.0f));                  // e^-25 is less than half a step of the grid
    const Vec shifted = x * 1.44269504088896341f + to_integer;
    const Vec n = shifted - to_integer;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const Vec result = Vec(IntVec(p) + ((IntVec(shifted) - IntVec(to_integer)) << 23));
    return result < to_grid ? (result + to_grid) - to_grid : result;
}

// Scores to weights: exp((score - peak) · 1/temperature).
struct Softmax {
    float peak, temperature, inverse;

    Softmax(float peak, float temperature) : peak(peak), temperature(temperature), inverse(1.0f / temperature) {}

    Vec operator()(Vec score) const { return weight((score - peak) * inverse); }
    // What scores below this weigh is 0, or less than `least`, whatever rounding does in `operator()`.
    float floor(double least) const {
        const double x = least > 0x1p-20 ? std::log(least) - 0.001 : -25.0;
        const double score = double(peak) + x * double(temperature) * 1.000001;
        return score < -double(std::numeric_limits<float>::max()) ? -kInfinity : float(score);
    }
};

// Both halves of a vector, widened and added: for numbers whose sums are exact.
typedef double DoubleVec __attribute__((vector_size(kWidth * 4)));

inline DoubleVec add_halves(Vec value) {
#if defined(BATON_AVX2)
    return _mm256_cvtps_pd(_mm256_castps256_ps128(value)) + _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
#else
    typedef float Half __attribute__((vector_size(kWidth * 2)));
    Half halves[2];
    std::memcpy(halves, &value, sizeof value);
    return __builtin_convertvector(halves[0], DoubleVec) + __builtin_convertvector(halves[1], DoubleVec);
#endif
}
inline double sum_lanes(DoubleVec value) {
    double sum = 0;
    for (int64_t lane = 0; lane < kWidth / 2; ++lane) sum += value[lane];
    return sum;
}

// The sum of each block's weights; returns the sum of all.
inline double weigh_blocks(const Scores& scores, const Softmax& softmax, double* sums) {
    const float floor = softmax.floor(0);
    double total = 0;
    for (int64_t block = 0; block < scores.num_blocks(); ++block) {
        sums[block] = 0;
        if (scores.maxima[block] < floor) continue;
        DoubleVec sum = {};
        const int64_t end = scores.block_end(block);
        int64_t i = block * kBlock;
        for (; i + kWidth <= end; i += kWidth) sum += add_halves(softmax(load(scores.values + i)));
        for (; i < end; ++i) sums[block] += double(softmax(splat(scores.values[i]))[0]);
        sums[block] += sum_lanes(sum);
        total += sums[block];
    }
    return total;
}

inline int64_t count_from(const float* values, int64_t size, float floor) {
    IntVec counts = {};
    int64_t i = 0, count = 0;
    for (; i + kWidth <= size; i += kWidth) counts -= load(values + i) >= floor;
    for (int64_t lane = 0; lane < kWidth; ++lane) count += counts[lane];
    for (; i < size; ++i) count += values[i] >= floor;
    return count;
}

// A score that at least `count` (of at most all) scores reach, close to the `count`-th largest: where there are
// clearly more blocks than that, the `count`-th largest maximum, else the score itself; found by bisection.
inline float floor_of_largest(const Scores& scores, int64_t count) {
    const bool by_block = count < scores.num_blocks() - scores.num_blocks() / 8;
    const float* values = by_block ? scores.maxima : scores.values;
    const int64_t size = by_block ? scores.num_blocks() : scores.size;
    int64_t low = to_ordered(-kInfinity), high = int64_t(to_ordered(kInfinity)) + 1;  // reached by enough; by too few
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        const int64_t reached = count_from(values, size, from_ordered(int32_t(middle)));
        (reached >= count ? low : high) = middle;
        if (reached >= count && reached <= count + count / 4 + 4) break;
    }
    return from_ordered(int32_t(low));
}

// All candidates from `floor` on, in id order; returns how many. `found` has room for all, and a vector more.
inline int64_t collect(const Scores& scores, float floor, Candidate* found) {
    int64_t count = 0;
    for (int64_t block = 0; block < scores.num_blocks(); ++block) {
        if (!(scores.maxima[block] >= floor)) continue;
        const int64_t end = scores.block_end(block);
        for (int64_t i = block * kBlock; i < end; i += kWidth) {
            if (i + kWidth <= end && !any(load(scores.values + i) >= floor)) continue;
            for (int64_t id = i; id < std::min(i + kWidth, end); ++id) {
                found[count].key = key_of(scores.values[id], id);
                count += scores.values[id] >= floor;
            }
        }
    }
    return count;
}

// Drops candidates after the one with key `last`; their order stays.
inline int64_t drop_after(uint64_t last, Candidate* candidates, int64_t count) {
    return std::remove_if(candidates, candidates + count, [&](const Candidate& c) { return c.key > last; }) - candidates;
}

inline bool precedes(const Candidate& a, const Candidate& b) { return a.key < b.key; }

// The `count` first of at least as many candidates, still in id order. `work` has room for them all.
inline int64_t keep_largest(int64_t count, Candidate* candidates, int64_t size, Candidate* work) {
    if (count >= size) return size;
    std::copy(candidates, candidates + size, work);
    std::nth_element(work, work + count - 1, work + size, precedes);
    return drop_after(work[count - 1].key, candidates, size);
}

// Fills in the candidates' weights; returns their sum.
inline double weigh(const Softmax& softmax, Candidate* candidates, int64_t count) {
    double sum = 0;
    for (int64_t start = 0; start < count; start += kWidth) {
        const int64_t num_lanes = std::min(kWidth, count - start);
        Vec scores = splat(-kInfinity);
        for (int64_t lane = 0; lane < num_lanes; ++lane) scores[lane] = score_of(candidates[start + lane].key);
        const Vec weights = softmax(scores);
        for (int64_t lane = 0; lane < num_lanes; ++lane) {
            candidates[start + lane].weight = weights[lane];
            sum += double(weights[lane]);
        }
    }
    return sum;
}

// The fewest first candidates whose weights reach `target`, at least one, still in id order: halves are told apart
// by their middle, and only the one that holds the end is looked into. All of them reach the target.
inline int64_t keep_nucleus(double target, Candidate* candidates, int64_t size, Candidate* work) {
    std::copy(candidates, candidates + size, work);
    double before = 0;
    for (int64_t count = size; count > 1;) {
        const int64_t half = count / 2;
        std::nth_element(work, work + half - 1, work + count, precedes);
        double sum = before;
        for (int64_t i = 0; i < half; ++i) sum += double(work[i].weight);
        if (sum >= target) {
            count = half;
        } else {
            before = sum;
            work += half;
            count -= half;
        }
    }
    return drop_after(work[0].key, candidates, size);
}

// Inverse CDF in id order: the candidate whose share of the running sum holds `u` in [0, 1) times the sum of weights
// of at least `least`. The last with any weight, where that product rounds to the sum.
inline int64_t draw(const Candidate* candidates, int64_t count, float least, double u) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i)
        if (candidates[i].weight >= least) sum += double(candidates[i].weight);
    const double threshold = u * sum;
    int64_t last = 0;
    double upto = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float weight = candidates[i].weight;
        if (weight < least || weight == 0) continue;
        last = i;
        upto += double(weight);
        if (upto > threshold) break;
    }
    return candidates[last].id();
}

// The same over a whole row, with what `weigh_blocks` says of it.
inline int64_t draw(const Scores& scores, const Softmax& softmax, const double* sums, double total, double u) {
    const double threshold = u * total;
    double before = 0, upto = 0;
    int64_t block = 0;
    for (int64_t b = 0; b < scores.num_blocks(); ++b) {
        if (sums[b] == 0) continue;
        block = b;
        before = upto;
        upto += sums[b];
        if (upto > threshold) break;
    }
    int64_t last = 0;
    upto = before;
    for (int64_t id = block * kBlock; id < scores.block_end(block); ++id) {
        const float weight = softmax(splat(scores.values[id]))[0];
        if (weight == 0) continue;
        last = id;
        upto += double(weight);
        if (upto > threshold) break;
    }
    return last;
}

}  // namespace baton
