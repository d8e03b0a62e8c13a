// The instructions of the matrix unit where there is one, or their emulation.
#pragma once

#include "amx_unit.h"  // first: it has the compiler's own, which emulation takes the names of

#if defined(BATON_AMX_EMULATED)
#include "amx_emulated.h"
#elif defined(BATON_AMX)
#include <immintrin.h>
#endif
