// The matrix unit (AMX) of Intel processors since Sapphire Rapids: whether there is one, what it looks like, and a thread's
// use of it. What it computes with is said by whoever does (`gemm_amx.h`, `attention_amx.h`), by instructions that
// `amx_tiles.h` has.
//
// Where the compiler or its target has no AMX, `kHasAmx` is false and nothing that uses the unit may be called.
#pragma once

#include <array>
#include <cstdint>

#include "simd.h"

#if defined(BATON_AMX_EMULATED) || \
    (defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define BATON_AMX
#endif

namespace baton {

#if defined(BATON_AMX)
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;
#endif
static_assert(!kHasAmx || kWidth == 16);  // machines with AMX have AVX-512

constexpr int64_t kTileLines = 16, kTileBytes = kTileLines * 64;

// The unit on this thread, set up for eight tiles of a height each, of whole lines. It is released at the end: a thread
// that waits has little state to be saved.
class AmxSession {
public:
    using Heights = std::array<int64_t, 8>;
    explicit AmxSession(const Heights& heights);
    // As `gemm_amx.h` has them: sums and rows of one height, and weights.
    explicit AmxSession(int64_t height)
        : AmxSession(Heights{height, height, height, height, height, height, kTileLines, kTileLines}) {}
    ~AmxSession();
    AmxSession(const AmxSession&) = delete;
    AmxSession& operator=(const AmxSession&) = delete;
};

// Whether this process may use the unit: it asked (`baton_amx_acquire`), and the kernel granted it.
bool amx_is_lent();

}  // namespace baton
