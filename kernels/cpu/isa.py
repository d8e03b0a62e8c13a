"""Which instructions products use: the matrix unit (AMX) where there is one and it is lent, else those that
multiply pairs of bf16 (AVX-512 BF16), else SIMD in fp32. Attention of bf16 models follows it to the unit.

1. The compiler knows them if it targets a machine that has them (`-march=native`).
2. The kernel lends the unit's registers to whoever asks (Linux 5.16 and later; sandboxes may refuse).
3. The user may leave them alone: `BATON_CPU_ISA` is `auto`, `simd`, or `amx` or `avx512-bf16`, which then
   must be there.

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
DOT_MACROS: Final = ("__AVX512F__", "__AVX512BF16__")
COMPILER_TIMEOUT_S: Final = 20.0

NOT_COMPILED: Final = -1  # of `baton_amx_acquire`; 0 is granted, else the error number of a refusal

_ARCH_PRCTL: Final = 158  # x86-64
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18


class Isa(Enum):
    SIMD = "simd"
    DOT = "avx512-bf16"
    AMX = "amx"


@dataclass(frozen=True, slots=True)
class IsaChoice:
    """`is_lost`: the machine has a matrix unit that the user did not renounce, and it is not used."""

    isa: Isa
    reason: str
    is_lost: bool = False


class IsaError(ValueError):
    """`BATON_CPU_ISA` names no instructions, or some that cannot be used here."""


def choose_isa(
    requested: str, acquired: Callable[[], int], has_amx: Callable[[], bool], has_dot: Callable[[], bool]
) -> IsaChoice:
    """`requested` as the user set it; `acquired()` asks for the unit (not called if it is not wanted),
    `has_amx()` tells whether the CPU has one, and `has_dot()` whether pairs of bf16 can be multiplied.

    Raises:
        IsaError: `requested` is unknown, or something of its own that is not to be had.
    """
    if requested not in ("auto", *(isa.value for isa in Isa)):
        raise IsaError(f"{ISA_VARIABLE} is `{requested}`; use auto, simd, avx512-bf16 or amx")
    if requested == Isa.SIMD.value:
        return IsaChoice(Isa.SIMD, f"{ISA_VARIABLE} is simd")
    if requested == Isa.DOT.value:
        if has_dot():
            return IsaChoice(Isa.DOT, f"{ISA_VARIABLE} is avx512-bf16")
        raise IsaError(f"{ISA_VARIABLE} is avx512-bf16, which this CPU or compiler lacks; set it to auto")
    answer = acquired()
    if answer == 0:
        return IsaChoice(Isa.AMX, "this CPU's matrix unit")
    is_lost = True
    if answer != NOT_COMPILED:
        reason = f"the kernel does not lend AMX: {os.strerror(answer)}"
    elif has_amx():
        reason = "the compiler does not know AMX: use g++ 11 or later"
    else:
        reason, is_lost = "this CPU has no AMX", False
    if requested == Isa.AMX.value:
        raise IsaError(f"{ISA_VARIABLE} is amx, but {reason}; set it to auto")
    if has_dot():
        return IsaChoice(Isa.DOT, f"AVX-512 BF16: {reason}", is_lost)
    return IsaChoice(Isa.SIMD, reason, is_lost)


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
    if not _compiler_knows(compiler, AMX_MACROS):
        return NOT_COMPILED
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return 0
    return ctypes.get_errno()


def has_dot_without_library(compiler: str | None) -> bool:
    """What `baton_dot_is_there` will answer, likewise."""
    return _compiler_knows(compiler, DOT_MACROS)


def _compiler_knows(compiler: str | None, macros: tuple[str, ...]) -> bool:
    if compiler is None or platform.machine() != "x86_64":
        return False
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False  # the check of the compiler itself says so
    return all(f"#define {macro} " in result.stdout for macro in macros)
