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

// Of one row with one tile.
struct Chains {
    Vec even{}, odd{};

    void take(const Values& x, const Values& w) {
        even = multiply_add(even, x.even, w.even);
        odd = multiply_add(odd, x.odd, w.odd);
    }
};

template <int Rows>
void few_sums(const char* x, int64_t steps, const char* panel, const char* then, float* out) {
    Vec left[Rows] = {}, right[Rows] = {};
    if (then == nullptr) then = panel;
    for (int64_t step = 0; step < steps; ++step, x += Rows * kLineBytes, panel += kAmxStepBytes) {
        Chains left_chains[Rows], right_chains[Rows];
        const int64_t later = step + kAmxFewAhead;
        const char* ahead = later < steps ? panel + kAmxFewAhead * kAmxStepBytes : then + (later - steps) * kAmxStepBytes;
#pragma GCC unroll 16
        for (int64_t k = 0; k < kTileLines; ++k) {
            const char* line = panel + k * kLineBytes;
            prefetch_l2(ahead + 2 * k * kLineBytes);
            prefetch_l2(ahead + (2 * k + 1) * kLineBytes);
            const Values left_weights(UintVec(load_words(line))), right_weights(UintVec(load_words(line + kTileBytes)));
#pragma GCC unroll 2
            for (int row = 0; row < Rows; ++row) {
                const Values values(UintVec(splat_word(x + row * kLineBytes + 4 * k)));
                left_chains[row].take(values, left_weights);
                right_chains[row].take(values, right_weights);
            }
        }
        for (int row = 0; row < Rows; ++row) {
            left[row] = add(left[row], add(left_chains[row].even, left_chains[row].odd));
            right[row] = add(right[row], add(right_chains[row].even, right_chains[row].odd));
        }
    }
    for (int row = 0; row < Rows; ++row, out += kAmxPanel) store_two(out, left[row], right[row]);
}

}  // namespace

void amx_few_sums(const LineRows& rows, const char* panel, const char* then, float* sums) {
    const Flushing flushing;
    static_assert(kAmxFewRows == 2);
    (rows.cut.height == 1 ? few_sums<1> : few_sums<2>)(rows.data, rows.steps, panel, then, sums);
}

}  // namespace baton

#endif  // BATON_AMX
