"""Which instructions products use: the matrix unit (AMX) where there is one and it is lent, else SIMD.

1. The compiler knows the unit if it targets a machine that has it (`-march=native`).
2. The kernel lends its registers to a process that asks (Linux 5.16 and later; sandboxes may refuse).
3. The user may leave it alone: `BATON_CPU_ISA` is `auto`, `simd`, or `amx` where nothing else will do.

Results differ in their last bits, so the choice is part of `packed_layout`. No torch here: `baton doctor`
asks too.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

ISA_VARIABLE: Final = "BATON_CPU_ISA"
AMX_FLAGS: Final = frozenset({"amx_tile", "amx_bf16", "amx_int8"})  # in /proc/cpuinfo
AMX_MACROS: Final = ("__AMX_TILE__", "__AMX_BF16__", "__AMX_INT8__")
COMPILER_TIMEOUT_S: Final = 20.0

NOT_COMPILED: Final = -1  # of `baton_amx_acquire`; 0 is granted, else the error number of a refusal

_ARCH_PRCTL: Final = 158  # x86-64
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18


class Isa(Enum):
    SIMD = "simd"
    AMX = "amx"


@dataclass(frozen=True, slots=True)
class IsaChoice:
    """`is_lost`: the machine has a matrix unit that the user did not renounce, and it is not used."""

    isa: Isa
    reason: str
    is_lost: bool = False


class IsaError(ValueError):
    """`BATON_CPU_ISA` names no instructions, or some that cannot be used here."""


def choose_isa(requested: str, acquired: Callable[[], int], has_amx: Callable[[], bool]) -> IsaChoice:
    """`requested` as the user set it; `acquired()` asks for the unit (not called if it is not wanted) and
    `has_amx()` tells whether the CPU has one.

    Raises:
        IsaError: `requested` is unknown, or `amx` and there is none to be had.
    """
    if requested not in ("auto", "simd", "amx"):
        raise IsaError(f"{ISA_VARIABLE} is `{requested}`; use auto, simd or amx")
    if requested == "simd":
        return IsaChoice(Isa.SIMD, f"{ISA_VARIABLE} is simd")
    answer = acquired()
    if answer == 0:
        return IsaChoice(Isa.AMX, "this CPU's matrix unit")
    if answer != NOT_COMPILED:
        choice = IsaChoice(Isa.SIMD, f"the kernel does not lend AMX: {os.strerror(answer)}", is_lost=True)
    elif has_amx():
        choice = IsaChoice(Isa.SIMD, "the compiler does not know AMX: use g++ 11 or later", is_lost=True)
    else:
        choice = IsaChoice(Isa.SIMD, "this CPU has no AMX")
    if requested == "amx":
        raise IsaError(f"{ISA_VARIABLE} is amx, but {choice.reason}; set it to auto")
    return choice


def requested_isa(environment: Mapping[str, str]) -> str:
    return environment.get(ISA_VARIABLE) or "auto"


def cpu_has_amx(file: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return False  # no Linux
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.split()) >= AMX_FLAGS


def acquire_without_library(compiler: str | None) -> int:
    """What `baton_amx_acquire` will answer once `compiler` has built it, found out without building."""
    if compiler is None or platform.machine() != "x86_64" or not _compiler_knows_amx(compiler):
        return NOT_COMPILED
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return 0
    return ctypes.get_errno()


def _compiler_knows_amx(compiler: str) -> bool:
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False  # the check of the compiler itself says so
    return all(f"#define {macro} " in result.stdout for macro in AMX_MACROS)
