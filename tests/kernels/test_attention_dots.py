"""Attention by dot products (pairs of bf16; integers over int8 KV), real and emulated: close to fp64,
the same bits on both, and for a decode step and a whole prompt."""

from __future__ import annotations

import ctypes

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

SHAPES = (((9, 3), 64), ((8, 1), 80), ((4, 4), 128), ((8, 2), 32))


@pytest.fixture
def kernels(dot_library: ctypes.CDLL) -> NativeKernels:
    return NativeKernels(dot_library, 1, Quantization.NONE)


def world_of(lengths: list[int], shape: tuple[tuple[int, int], int], kv_int8: bool) -> World:
    return World(lengths, *shape, dtype=torch.bfloat16, kv_int8=kv_int8)


def whole(world: World, kernels: NativeKernels) -> list[Tensor]:
    spans = [(index, 0, len(one.q)) for index, one in enumerate(world.sequences)]
    return world.attend(kernels, spans)


@pytest.mark.parametrize("kv_int8", [False, True], ids=["bf16-kv", "int8-kv"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_close_to_fp64_and_the_same_step_by_step(kernels, shape, kv_int8):
    lengths = [1, 17, PARTITION_SIZE + 2]
    world = world_of(lengths, shape, kv_int8)
    for index, out in enumerate(whole(world, kernels)):
        assert ((out.double() - world.exact(index)).abs() <= world.largest_error(index)).all()
        for position in {0, lengths[index] // 2, lengths[index] - 2, lengths[index] - 1} - {-1}:
            for first in (position, max(0, position - 1), max(0, position - 9)):
                [part] = world.attend(kernels, [(index, first, position + 1)])
                assert torch.equal(part, out[first : position + 1])


@pytest.mark.parametrize("kv_int8", [False, True], ids=["bf16-kv", "int8-kv"])
def test_the_emulation_gives_the_bits_of_the_instructions(kv_int8):
    if not bind(load_library()).baton_dot_is_there():
        pytest.skip("this machine has no such instructions")
    results = [
        whole(
            world_of([40, PARTITION_SIZE + 2], SHAPES[0], kv_int8),
            NativeKernels(library, 1, Quantization.NONE),
        )
        for library in (load_library(), emulated_library())
    ]
    for real, emulated in zip(*results, strict=True):
        assert torch.equal(real, emulated)


def test_a_query_that_is_not_finite_and_a_broken_value_stay_where_they_are(kernels):
    """Integers have no NaN: the scales say it."""
    world = world_of([40], SHAPES[0], kv_int8=True)
    [expected] = whole(world, kernels)
    sequence = world.sequences[0]
    block, offset = sequence.blocks[30 // world.block_size], 30 % world.block_size
    world.pool[block, LAYER, 1, offset] = quantize_kv(torch.full((3, 64), torch.nan))
    [broken] = whole(world, kernels)
    assert torch.equal(broken[:30], expected[:30])  # a later value of the same tile
    assert broken[30:].isnan().all()
    sequence.q[12, 4, 7], sequence.q[13, 8, 0] = torch.inf, torch.nan
    [odd] = whole(world, kernels)
    assert odd[12, 4].isnan().all()
    assert odd[13, 8].isnan().all()
    odd[12, 4], odd[13, 8] = expected[12, 4], expected[13, 8]
    assert torch.equal(odd[:30], expected[:30])


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_queries_of_any_size(kernels, size):
    world = world_of([50], SHAPES[0], kv_int8=True)
    world.sequences[0].q.mul_(size)
    world.scale /= max(size, 1.0)
    [out] = whole(world, kernels)
    assert out.isfinite().all()
    assert ((out.double() - world.exact(0)).abs() <= world.largest_error(0)).all()
