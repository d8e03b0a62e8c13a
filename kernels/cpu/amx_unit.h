// The matrix unit's instructions, for the sources that use them: the machine's own, or in plain C++ where tests ask for it.
// Tile numbers are part of the instructions, so functions of theirs cannot take a tile as an argument.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm_amx.h"

#if defined(BATON_AMX_EMULATED)
#include "amx_emulated.h"
#elif defined(BATON_AMX)
#include <immintrin.h>
#endif
