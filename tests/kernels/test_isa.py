"""Who computes products: what the user asks for, what the compiler knows, what the kernel lends."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.cpu.isa import (
    AMX_FLAGS,
    NOT_COMPILED,
    Isa,
    IsaError,
    acquire_without_library,
    choose_isa,
    cpu_has_amx,
    requested_isa,
)

PERMISSION_DENIED = 1  # EPERM
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
SAPPHIRE_RAPIDS = ("-std=c++20", "-march=sapphirerapids", "-ffp-contract=off", "-fopenmp", "-Wall", "-Wextra")


def never() -> int:
    raise AssertionError("asked for what the user renounced")


@pytest.mark.parametrize(
    ("requested", "answer", "has_amx", "isa", "reason", "is_lost"),
    [
        ("auto", 0, True, Isa.AMX, "this CPU's matrix unit", False),
        ("amx", 0, True, Isa.AMX, "this CPU's matrix unit", False),
        ("auto", NOT_COMPILED, False, Isa.SIMD, "this CPU has no AMX", False),
        ("auto", NOT_COMPILED, True, Isa.SIMD, "the compiler does not know AMX: use g++ 11 or later", True),
        (
            "auto",
            PERMISSION_DENIED,
            True,
            Isa.SIMD,
            "the kernel does not lend AMX: Operation not permitted",
            True,
        ),
    ],
)
def test_the_choice(requested, answer, has_amx, isa, reason, is_lost):
    choice = choose_isa(requested, lambda: answer, lambda: has_amx)
    assert (choice.isa, choice.reason, choice.is_lost) == (isa, reason, is_lost)


def test_simd_when_asked_for_even_where_there_is_a_unit():
    choice = choose_isa("simd", never, lambda: True)
    assert (choice.isa, choice.is_lost) == (Isa.SIMD, False)


@pytest.mark.parametrize(
    ("answer", "has_amx", "message"),
    [
        (NOT_COMPILED, False, "BATON_CPU_ISA is amx, but this CPU has no AMX; set it to auto"),
        (NOT_COMPILED, True, "BATON_CPU_ISA is amx, but the compiler does not know AMX"),
        (PERMISSION_DENIED, True, "BATON_CPU_ISA is amx, but the kernel does not lend AMX: Operation not"),
    ],
)
def test_what_is_demanded_and_not_there_is_an_error(answer, has_amx, message):
    with pytest.raises(IsaError, match=re.escape(message)):
        choose_isa("amx", lambda: answer, lambda: has_amx)


def test_unknown_instructions_are_an_error():
    with pytest.raises(IsaError, match="BATON_CPU_ISA is `neon`; use auto, simd or amx"):
        choose_isa("neon", never, lambda: True)


@pytest.mark.parametrize(("environment", "requested"), [({}, "auto"), ({"BATON_CPU_ISA": ""}, "auto")])
def test_nothing_asked_for_is_auto(environment, requested):
    assert requested_isa(environment) == requested
    assert requested_isa({"BATON_CPU_ISA": "simd"}) == "simd"


def test_flags_of_the_cpu(tmp_path: Path):
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name\t: some\nflags\t\t: fpu {' '.join(AMX_FLAGS)} avx2\n")
    assert cpu_has_amx(file)
    file.write_text("flags\t\t: fpu amx_tile avx2\n")
    assert not cpu_has_amx(file)
    assert not cpu_has_amx(tmp_path / "missing")


@pytest.fixture(scope="module")
def with_tiles(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`gemm_amx.cpp` with the unit's real instructions; only the permission is asked for."""
    target = tmp_path_factory.mktemp("amx") / "amx.so"
    flags = (
        *(*build.FLAGS, "-O0", "-Wno-psabi", "-DBATON_WIDTH=16"),
        *("-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    )
    sources = [str(build.SOURCE_DIR / name) for name in ("gemm_amx.cpp", "gemm_int8.cpp")]
    subprocess.run([str(COMPILER), *flags, "-shared", *sources, "-o", str(target)], check=True, timeout=120)
    return ctypes.CDLL(str(target))


def test_the_kernel_is_asked_and_its_answer_understood(with_tiles):
    answer = with_tiles.baton_amx_acquire()
    if cpu_has_amx():
        assert answer == 0 or os.strerror(answer)
        assert acquire_without_library(COMPILER) == answer
    else:
        assert answer > 0
        choice = choose_isa("auto", lambda: answer, lambda: True)
        assert (choice.isa, choice.is_lost) == (Isa.SIMD, True)
        assert acquire_without_library(COMPILER) == NOT_COMPILED
    assert with_tiles.baton_amx_acquire() == answer


def test_without_a_compiler_there_is_no_unit():
    assert acquire_without_library(None) == NOT_COMPILED
    assert acquire_without_library("/no/such/compiler") == NOT_COMPILED


def compile_for_sapphire_rapids(source: str, *flags: str) -> str:
    command = [str(COMPILER), *SAPPHIRE_RAPIDS, *flags, "-o", "-", str(build.SOURCE_DIR / source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "sapphirerapids" in result.stderr:
        pytest.skip("this compiler does not know the machine")
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_the_unit_is_used_by_its_real_instructions():
    assembly = compile_for_sapphire_rapids("gemm_amx.cpp", "-O1", "-S")
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbusd", "tilestored", "tilerelease"):
        assert instruction in assembly


@pytest.mark.parametrize("source", [name for name in build.SOURCES if name != "gemm_amx.cpp"])
def test_every_source_compiles_for_avx512_without_a_warning(source):
    compile_for_sapphire_rapids(source, "-fsyntax-only")
