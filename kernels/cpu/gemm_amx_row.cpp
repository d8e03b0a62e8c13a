// The sums of `gemm_amx_row.h`.
#include "gemm_amx_row.h"

#include "gemm_amx.h"

#if defined(BATON_AMX)

namespace baton {
namespace {

#if defined(BATON_AVX512)

// The thread's arithmetic in the unit's mode: to nearest, no exceptions, subnormals are zeros. Memory is as it looks to
// others at both ends, so nothing that is loaded and stored within is computed outside.
class Flushing {
public:
    Flushing() : before_(_mm_getcsr()) { set(kMode); }
    ~Flushing() { set(before_); }
    Flushing(const Flushing&) = delete;
    Flushing& operator=(const Flushing&) = delete;

private:
    static constexpr unsigned kMode = 0x1f80 | _MM_FLUSH_ZERO_ON | 0x0040;  // 0x0040: of what is loaded, too

    static void set(unsigned mode) {
        asm volatile("" : : : "memory");
        _mm_setcsr(mode);
        asm volatile("" : : : "memory");
    }

    const unsigned before_;
};

inline Vec multiply_add(Vec sum, Vec x, Vec w) { return accumulate(sum, x, w); }

// An addition whose operands the compiler leaves in this order.
inline Vec add(Vec a, Vec b) {
    Vec sum;
    asm("vaddps %2, %1, %0" : "=v"(sum) : "v"(a), "v"(b));
    return sum;
}

#else  // the unit is emulated on a machine without such vectors: as it does, lane by lane

struct Flushing {
    Flushing() {}
};

inline Vec multiply_add(Vec sum, Vec x, Vec w) {
    for (int64_t lane = 0; lane < kWidth; ++lane)
        sum[lane] = amx_emulated::multiply_add(amx_emulated::flushed(x[lane]), amx_emulated::flushed(w[lane]), sum[lane]);
    return sum;
}

inline Vec add(Vec a, Vec b) {
    for (int64_t lane = 0; lane < kWidth; ++lane) a[lane] = amx_emulated::flushed(a[lane] + b[lane]);
    return a;
}

#endif

// The even and the odd values of 16 words.
struct Values {
    Vec even, odd;

    explicit Values(UintVec words) : even(Vec(words << 16)), odd(Vec(words & 0xffff0000)) {}
};

// Of the row with a tile.
struct Chains {
    Vec even{}, odd{};

    void take(const Values& x, const Values& w) {
        even = multiply_add(even, x.even, w.even);
        odd = multiply_add(odd, x.odd, w.odd);
    }
    Vec sum() const { return add(even, odd); }
};

}  // namespace

void amx_row_sums(const LineRows& row, const char* panel, const char* then, float* sums) {
    const Flushing flushing;
    if (then == nullptr) then = panel;
    const char* x = row.data;
    Vec low{}, high{};
    for (int64_t step = 0; step < row.steps; ++step, x += kLineBytes, panel += kAmxStepBytes) {
        const int64_t left = row.steps - step;
        const char* ahead =
            kAmxRowAhead < left ? panel + kAmxRowAhead * kAmxStepBytes : then + (kAmxRowAhead - left) * kAmxStepBytes;
        Chains left_chains, right_chains;
#pragma GCC unroll 16
        for (int64_t k = 0; k < kTileLines; ++k, ahead += 2 * kLineBytes) {
            prefetch_l2(ahead);
            prefetch_l2(ahead + kLineBytes);
            prefetch(panel + kAmxStepBytes + k * kLineBytes);
            prefetch(panel + kAmxStepBytes + kTileBytes + k * kLineBytes);
            const Values values(UintVec(splat_word(x + 4 * k)));
            left_chains.take(values, Values(UintVec(load_words(panel + k * kLineBytes))));
            right_chains.take(values, Values(UintVec(load_words(panel + kTileBytes + k * kLineBytes))));
        }
        low = add(low, left_chains.sum());
        high = add(high, right_chains.sum());
    }
    store_two(sums, low, high);
}

}  // namespace baton

#endif  // BATON_AMX
