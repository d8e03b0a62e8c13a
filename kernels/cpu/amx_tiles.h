// The instructions of the matrix unit where there is one (`BATON_AMX` of `gemm_amx.h`), or their emulation.
#pragma once

#if defined(BATON_AMX_EMULATED)
#include "amx_emulated.h"
#elif defined(BATON_AMX)
#include <immintrin.h>
#endif
