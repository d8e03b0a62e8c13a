"""Attention by the matrix unit, real and emulated: close to fp64, the same bits on both, and for a decode
step, a chunk and a whole prompt, wherever keys and values lie. Over int8 the bits are those of dot products,
too."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu.build import load_library
from kernels.cpu.native import NativeKernels, bind
from kernels.ops import PARTITION_SIZE
from kernels.quantization import Quantization
from kernels.reference import quantize_kv
from tests.kernels.attention_world import LAYER, World
from tests.support.isa_emulation import emulated_library

pytestmark = pytest.mark.timeout(600)  # the first test compiles the emulated library

SHAPES = (((9, 3), 64), ((8, 1), 80), ((4, 4), 128), ((8, 2), 32), ((6, 1), 10), ((5, 1), 96), ((34, 2), 40))
INT8_SHAPES = (
    ((9, 3), 64),
    ((8, 1), 80),
    ((4, 4), 128),
    ((8, 2), 32),
    ((6, 2), 10),
    ((34, 2), 40),
    ((5, 1), 260),
)

Kernels = Callable[..., NativeKernels]


@pytest.fixture(params=["emulated", "real"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    library = emulated_library() if request.param == "emulated" else load_library()
    if bind(library).baton_amx_acquire() != 0:
        pytest.skip("this machine has no matrix unit")

    def make(isa: str = "amx", num_threads: int = 1) -> NativeKernels:
        return make_kernels(library, monkeypatch, isa, num_threads)

    return make


def make_kernels(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, isa: str = "amx", num_threads: int = 1
) -> NativeKernels:
    monkeypatch.setenv("BATON_CPU_ISA", isa)
    return NativeKernels(library, num_threads, Quantization.NONE)


def world_of(lengths: list[int], shape: tuple[tuple[int, int], int], **where: int) -> World:
    return World(lengths, *shape, dtype=torch.bfloat16, **where)


def have_the_same_bits(outputs: list[Tensor], others: list[Tensor]) -> bool:
    """Of numbers; NaN are where NaN are."""
    return all(
        torch.equal(out.isnan(), other.isnan()) and torch.equal(out[~out.isnan()], other[~other.isnan()])
        for out, other in zip(outputs, others, strict=True)
    )


def whole(world: World, kernels: NativeKernels) -> list[Tensor]:
    spans = [(index, 0, len(one.q)) for index, one in enumerate(world.sequences)]
    return world.attend(kernels, spans)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_close_to_fp64_and_the_same_step_by_step(kernels, shape):
    """Chunks of 1 to 40 queries: few rows, one tile, pairs of tiles with and without an end."""
    unit = kernels()
    lengths = [1, 17, PARTITION_SIZE + 34]
    world = world_of(lengths, shape)
    for index, out in enumerate(whole(world, unit)):
        assert ((out.double() - world.exact(index)).abs() <= world.largest_error(index)).all()
        for last in {0, lengths[index] // 2, PARTITION_SIZE - 1, PARTITION_SIZE, lengths[index] - 1}:
            for num_queries in (1, 2, 5, 40):
                first = max(0, last + 1 - num_queries)
                if last < lengths[index]:
                    [part] = world.attend(unit, [(index, first, last + 1)])
                    assert torch.equal(part, out[first : last + 1])


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 24, 32, 256])
def test_bits_do_not_depend_on_where_keys_and_values_lie(kernels, shape, block_size):
    """Blocks that hold no whole tile of keys among them, and every number of keys at the end of one."""
    unit = kernels()
    length = PARTITION_SIZE + 19
    usual, other = (world_of([length], shape, block_size=size) for size in (16, block_size))
    [expected] = whole(usual, unit)
    assert torch.equal(whole(other, unit)[0], expected)
    for position in (*range(30, 50), length - 1):
        [step] = other.attend(unit, [(0, position, position + 1)])
        assert torch.equal(step[0], expected[position])


def test_bits_do_not_depend_on_the_batch_or_threads(kernels):
    lengths = [1, 15, 40, PARTITION_SIZE, PARTITION_SIZE + 1, 2 * PARTITION_SIZE + 3]
    world = world_of(lengths, SHAPES[0])
    spans = [(index, max(0, length - (1, 4, 30)[index % 3]), length) for index, length in enumerate(lengths)]
    unit = kernels()
    alone = [world.attend(unit, [span])[0] for span in spans]
    for num_threads in (1, 2, 3):
        for out, expected in zip(world.attend(kernels("amx", num_threads), spans), alone, strict=True):
            assert torch.equal(out, expected)


def test_weights_that_vanish_and_large_scores(kernels):
    """A running maximum that leaps between partitions, and sums below the smallest number."""
    unit = kernels()
    length = 2 * PARTITION_SIZE + 5
    world = world_of([length], SHAPES[0])
    world.scale *= 500.0
    [out] = whole(world, unit)
    assert out.isfinite().all()
    assert ((out.double() - world.exact(0)).abs() <= world.largest_error(0)).all()
    for position in (PARTITION_SIZE - 1, PARTITION_SIZE, length - 1):
        assert torch.equal(world.attend(unit, [(0, position, position + 1)])[0][0], out[position])


@pytest.mark.parametrize("factor", [-1.0, 0.0, -0.0])
def test_a_scale_that_is_not_above_zero(kernels, factor):
    world = world_of([PARTITION_SIZE + 2], SHAPES[0])
    world.scale *= factor
    [out] = whole(world, kernels())
    assert ((out.double() - world.exact(0)).abs() <= world.largest_error(0)).all()


def test_a_later_key_that_is_not_a_number_and_those_of_others_stay_where_they_are(kernels):
    unit = kernels()
    world = world_of([90, 50], SHAPES[0])
    expected = whole(world, unit)
    world.pool[world.sequences[0].blocks[4]] = torch.nan  # positions from 64 on: no tile of those before
    broken = whole(world, unit)
    assert torch.equal(broken[0][:30], expected[0][:30])
    assert torch.equal(broken[1], expected[1])
    assert broken[0][64:].isnan().all()


@pytest.mark.parametrize("kv_int8", [False, True], ids=["bf16-kv", "int8-kv"])
def test_the_emulation_gives_the_bits_of_the_unit(monkeypatch, kv_int8):
    if bind(load_library()).baton_amx_acquire() != 0:
        pytest.skip("this machine has no matrix unit")
    results = [
        whole(
            world_of([40, PARTITION_SIZE + 2], SHAPES[0], kv_int8=kv_int8), make_kernels(library, monkeypatch)
        )
        for library in (load_library(), emulated_library())
    ]
    for real, emulated in zip(*results, strict=True):
        assert torch.equal(real, emulated)


def test_who_renounces_the_unit_does_not_use_it(kernels):
    world = world_of([PARTITION_SIZE + 2], SHAPES[0])
    by_isa = {isa: whole(world, kernels(isa))[0] for isa in ("simd", "amx", "avx512-bf16")}
    assert torch.equal(by_isa["simd"], by_isa["avx512-bf16"])  # attention of both is by pairs
    assert not torch.equal(by_isa["simd"], by_isa["amx"])


@pytest.mark.parametrize("shape", INT8_SHAPES, ids=str)
def test_over_int8_bits_are_those_of_dot_products(kernels, shape):
    """Prompts, chunks and steps: sums are exact integers both ways."""
    unit, dots = kernels(), kernels("simd")
    lengths = [2, 17, 63, PARTITION_SIZE, 2 * PARTITION_SIZE + 34]
    world = world_of(lengths, shape, kv_int8=True)
    expected = whole(world, dots)
    outputs = whole(world, unit)
    assert have_the_same_bits(outputs, expected)
    for index, out in enumerate(outputs):
        assert ((out.double() - world.exact(index)).abs() <= world.largest_error(index)).all()
    for index, length in enumerate(lengths):
        for num_queries in (1, 2, 5, 23, 40, 150):
            span = (index, max(0, length - num_queries), length)
            for isa in (unit, dots):
                assert torch.equal(world.attend(isa, [span])[0], expected[index][span[1] :])


@pytest.mark.parametrize("block_size", [1, 8, 24, 256])
def test_over_int8_bits_do_not_depend_on_blocks_the_batch_or_threads(kernels, block_size):
    lengths = [40, PARTITION_SIZE, PARTITION_SIZE + 1, 2 * PARTITION_SIZE + 3]
    spans = [(index, max(0, length - (1, 70, 30)[index % 3]), length) for index, length in enumerate(lengths)]
    usual, other = (
        world_of(lengths, INT8_SHAPES[0], block_size=size, kv_int8=True) for size in (16, block_size)
    )
    dots = kernels("simd")
    expected = [usual.attend(dots, [span])[0] for span in spans]
    for num_threads in (1, 3):
        assert have_the_same_bits(other.attend(kernels("amx", num_threads), spans), expected)


@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_over_int8_what_is_not_a_number_stays_where_it_is(kernels, which):
    """Scales of keys or values, and queries; with weights of every kind."""
    unit, dots = kernels(), kernels("simd")
    length, place = PARTITION_SIZE + 70, PARTITION_SIZE + 30
    world = world_of([length], INT8_SHAPES[0], kv_int8=True)
    [expected] = whole(world, unit)
    sequence = world.sequences[0]
    block, offset = sequence.blocks[place // world.block_size], place % world.block_size
    world.pool[block, LAYER, which, offset] = quantize_kv(torch.full((3, 64), torch.nan))
    [broken] = whole(world, unit)
    assert torch.equal(broken[:place], expected[:place])
    assert broken[place:].isnan().all()
    sequence.q[12, 4, 7], sequence.q[13, 8, 0] = torch.inf, torch.nan
    for factor in (1.0, -1.0, 500.0):
        world.scale *= factor
        assert have_the_same_bits(whole(world, unit), whole(world, dots))


def test_a_process_that_was_not_lent_the_unit_does_not_use_it():
    """The emulation ends a process that uses tiles without asking."""
    code = f"""
import ctypes

library = ctypes.CDLL({emulated_library()._name!r})
integers = lambda *values: (ctypes.c_int32 * len(values))(*values)
word, wide = ctypes.c_int64, ctypes.create_string_buffer
out = wide(64)
for lent in (False, True):
    if lent:
        library.baton_amx_acquire()
    library.baton_paged_attention(
        bytes(64), word(32), wide(2048), word(1), word(1), word(16), word(1), word(32), word(0),
        integers(0, 1), integers(1), integers(0), word(1), word(1), word(1), word(1), ctypes.c_float(1), out,
        word(1), word(0), word(1), word(1)
    )
    print("attended")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout.split()) == (0, ["attended"] * 2), result.stderr
