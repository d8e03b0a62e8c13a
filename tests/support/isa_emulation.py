"""The CPU kernels as for a machine with AMX, its tiles in plain C++ (`tests/kernels/amx_emulated.h`), and
with products of pairs (`gemm_dot.cpp` has their emulation).

Sources are those of every machine; vectors are 16 floats wide, as on machines with AMX. The library is
cached like the machine's own, by its sources, flags and that header.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Final

from kernels.cpu import build

HEADER: Final = Path(__file__).parents[1] / "kernels" / "amx_emulated.h"


def emulated_library() -> ctypes.CDLL:
    """Compiled now if it is not in the cache: some 12 s on one core."""
    version = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:8]
    flags = (
        *build.FLAGS,
        "-O0",  # the last one counts: compiled fast, not for speed
        "-Wno-psabi",
        "-DBATON_WIDTH=16",
        f"-DBATON_AMX_EMULATED=0x{version}",
        "-DBATON_DOT_EMULATED",
        f"-I{HEADER.parent}",
    )
    return build.load_library(flags)
