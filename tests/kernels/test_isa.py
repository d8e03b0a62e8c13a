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
    has_dot_without_library,
    requested_isa,
)

AMX_SOURCES = ("gemm_amx.cpp", "gemm_amx_row.cpp", "gemm_int8.cpp", "line_rows.cpp")
PERMISSION_DENIED = 1  # EPERM
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
SAPPHIRE_RAPIDS = ("-std=c++20", "-march=sapphirerapids", "-ffp-contract=off", "-fopenmp", "-Wall", "-Wextra")


def never() -> int:
    raise AssertionError("asked for what the user renounced")


LACKING = "this CPU has no AMX"
UNKNOWN = "the compiler does not know AMX: use g++ 11 or later"
REFUSED = "the kernel does not lend AMX: Operation not permitted"


@pytest.mark.parametrize(
    ("requested", "answer", "has_amx", "has_dot", "isa", "reason", "is_lost"),
    [
        ("auto", 0, True, True, Isa.AMX, "this CPU's matrix unit", False),
        ("amx", 0, True, True, Isa.AMX, "this CPU's matrix unit", False),
        ("auto", NOT_COMPILED, False, False, Isa.SIMD, LACKING, False),
        ("auto", NOT_COMPILED, True, False, Isa.SIMD, UNKNOWN, True),
        ("auto", PERMISSION_DENIED, True, False, Isa.SIMD, REFUSED, True),
        ("auto", NOT_COMPILED, False, True, Isa.DOT, f"AVX-512 BF16: {LACKING}", False),
        ("auto", PERMISSION_DENIED, True, True, Isa.DOT, f"AVX-512 BF16: {REFUSED}", True),
    ],
)
def test_the_choice(requested, answer, has_amx, has_dot, isa, reason, is_lost):
    choice = choose_isa(requested, lambda: answer, lambda: has_amx, lambda: has_dot)
    assert (choice.isa, choice.reason, choice.is_lost) == (isa, reason, is_lost)


@pytest.mark.parametrize("isa", [Isa.SIMD, Isa.DOT])
def test_what_is_asked_for_even_where_there_is_a_unit(isa):
    choice = choose_isa(isa.value, never, lambda: True, lambda: True)
    assert (choice.isa, choice.is_lost) == (isa, False)


def test_pairs_demanded_and_not_there_are_an_error():
    with pytest.raises(IsaError, match="avx512-bf16, which this CPU or compiler lacks; set it to auto"):
        choose_isa("avx512-bf16", never, lambda: True, lambda: False)


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
        choose_isa("amx", lambda: answer, lambda: has_amx, lambda: True)


def test_unknown_instructions_are_an_error():
    with pytest.raises(IsaError, match="BATON_CPU_ISA is `neon`; use auto, simd, avx512-bf16 or amx"):
        choose_isa("neon", never, lambda: True, lambda: True)


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
    sources = [str(build.SOURCE_DIR / name) for name in AMX_SOURCES]
    subprocess.run([str(COMPILER), *flags, "-shared", *sources, "-o", str(target)], check=True, timeout=120)
    return ctypes.CDLL(str(target))


def test_the_kernel_is_asked_and_its_answer_understood(with_tiles):
    answer = with_tiles.baton_amx_acquire()
    if cpu_has_amx():
        assert answer == 0 or os.strerror(answer)
        assert acquire_without_library(COMPILER) == answer
    else:
        assert answer > 0
        choice = choose_isa("auto", lambda: answer, lambda: True, lambda: False)
        assert (choice.isa, choice.is_lost) == (Isa.SIMD, True)
        assert acquire_without_library(COMPILER) == NOT_COMPILED
    assert with_tiles.baton_amx_acquire() == answer


def test_without_a_compiler_there_is_no_unit():
    assert acquire_without_library(None) == NOT_COMPILED
    assert acquire_without_library("/no/such/compiler") == NOT_COMPILED
    assert not has_dot_without_library(None)
    assert not has_dot_without_library("/no/such/compiler")


def test_what_the_compiler_knows_is_what_the_library_has():
    assert has_dot_without_library(COMPILER) == bool(build.load_library().baton_dot_is_there())


def compile_for_sapphire_rapids(source: str, *flags: str) -> str:
    command = [str(COMPILER), *SAPPHIRE_RAPIDS, *flags, "-o", "-", str(build.SOURCE_DIR / source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "sapphirerapids" in result.stderr:
        pytest.skip("this compiler does not know the machine")
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize(
    ("source", "instructions"),
    [
        ("gemm_amx.cpp", ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbusd", "tilestored", "tilerelease")),
        ("attention_amx.cpp", ("tileloadd", "tdpbf16ps", "tilestored")),
        ("attention_amx_bytes.cpp", ("tileloadd", "tdpbssd", "tdpbusd", "tilestored")),
    ],
)
def test_the_unit_is_used_by_its_real_instructions(source, instructions):
    assembly = compile_for_sapphire_rapids(source, "-O1", "-S")
    for instruction in instructions:
        assert instruction in assembly


def test_pairs_are_multiplied_by_their_real_instruction():
    assembly = compile_for_sapphire_rapids("gemm_dot.cpp", "-O1", "-S")
    assert "vdpbf16ps" in assembly


@pytest.mark.parametrize("source", [name for name in build.SOURCES if "amx" not in name])
def test_every_source_compiles_for_avx512_without_a_warning(source):
    compile_for_sapphire_rapids(source, "-fsyntax-only")
