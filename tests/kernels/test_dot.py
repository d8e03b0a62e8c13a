"""Products of pairs of bf16, by the machine's instruction where it has one and emulated: equal to a plain
model of the instruction bit for bit, so equal to each other, and to themselves whatever the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.native import NativeKernels
from kernels.cpu.weight_kind import WeightKind
from kernels.quantization import Quantization
from kernels.reference import ReferenceBackend
from tests.kernels.test_amx import SHAPES, assert_same_bits, flushed, make_case

pytestmark = pytest.mark.timeout(600)  # the first test compiles the emulated library

ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 24, 25, 40, 70)


@pytest.fixture
def kernels(dot_library, monkeypatch):
    def make(num_threads: int = 1) -> NativeKernels:
        monkeypatch.setenv("BATON_CPU_ISA", "avx512-bf16")
        return NativeKernels(dot_library, num_threads, Quantization.NONE)

    return make


def pair_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in]·weight [out, in]ᵀ, fp32, as the instruction gives it: of each pair the odd value's
    product is added first. Products of bf16 are exact in fp32: fused with an addition or not."""
    rows, columns = (flushed(functional.pad(t.float(), (0, t.shape[1] % 2))) for t in (x, weight))
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for pair in range(0, rows.shape[1], 2):
        for k in (pair + 1, pair):
            sums = flushed(sums + rows[:, k, None] * columns[None, :, k])
    return sums


@pytest.mark.parametrize(("in_features", "out_features"), [*SHAPES, (65, 300)])
def test_equals_the_model_of_the_instruction_whatever_the_batch(kernels, in_features, out_features):
    x, weight, bias = make_case(70, in_features, out_features)
    expected = pair_product(x, weight)
    pairs = kernels()
    packed = pairs.pack_linear(weight)
    for num_rows in ROWS:
        for start in {0, 70 - num_rows}:
            chosen = slice(start, start + num_rows)
            assert_same_bits(pairs.linear_fp32(x[chosen], packed), expected[chosen])
            with_bias = (expected[chosen] + bias.float()).bfloat16()
            assert_same_bits(pairs.linear(x[chosen], packed, bias), with_bias)


def test_is_close_to_fp64_and_to_the_reference(kernels):
    for in_features, out_features in SHAPES:
        x, weight, bias = make_case(33, in_features, out_features)
        pairs, reference = kernels(), ReferenceBackend()
        packed = pairs.pack_linear(weight)
        exact = x.double() @ weight.double().t()
        torch.testing.assert_close(pairs.linear_fp32(x, packed).double(), exact, rtol=1e-5, atol=1e-5)
        expected = reference.linear(x, reference.pack_linear(weight), bias)
        torch.testing.assert_close(pairs.linear(x, packed, bias), expected, rtol=2**-7, atol=1e-5)


def test_subnormal_values_and_sums_count_as_zero(kernels):
    x, weight, _ = make_case(3, 64, 32)
    x[:, 5], weight[:, 5] = 2.0**-127, 2.0**100  # not 2^-27
    x[1], weight[7] = 2.0**-70, 2.0**-70  # every product is far below the smallest number
    pairs = kernels()
    result = pairs.linear_fp32(x, pairs.pack_linear(weight))
    assert_same_bits(result, pair_product(x, weight))
    assert result[1, 7] == 0


def test_results_that_the_machine_rounds_otherwise(kernels):
    """Its own rounding to bf16 would make zeros of subnormals and keep a NaN's bits."""
    x, weight, _ = make_case(3, 64, 100)
    special = torch.tensor([1e-39, -3e-40, 2.0**-126, float("nan"), float("inf"), float("-inf"), 3.4e38])
    bias = torch.zeros(100).bfloat16()
    for place in (0, 20, 40, 90):  # in either half of a panel, and in the last one, which is cut
        bias[place : place + len(special)] = special.bfloat16()
    weight[bias != 0] = 0
    pairs = kernels()
    result = pairs.linear(x, pairs.pack_linear(weight), bias)
    expected = (pair_product(x, weight) + bias.float()).bfloat16()
    odd = bias.isnan()  # torch has other bits for them
    assert_same_bits(result[:, ~odd], expected[:, ~odd])
    assert_same_bits(
        result[:, odd], torch.full_like(result[:, odd], 0x7FC0, dtype=torch.int16).view(torch.bfloat16)
    )
    assert result[0, 0] != 0
    assert result[0, 1] != 0


def test_bits_do_not_depend_on_threads_or_on_neighbours(kernels):
    x, weight, bias = make_case(70, 200, 300)
    packed = kernels().pack_linear(weight)
    expected = kernels().linear(x, packed, bias)
    for num_threads in (2, 3):
        assert_same_bits(kernels(num_threads).linear(x, packed, bias), expected)
    x[:5], x[6:] = torch.nan, torch.inf
    assert_same_bits(kernels().linear(x, packed, bias)[5:6], expected[5:6])


def test_rows_too_many_for_the_cache_are_taken_in_blocks(kernels):
    x, weight, _ = make_case(300, 4096, 33)
    pairs = kernels()
    packed = pairs.pack_linear(weight)
    some = [0, 31, 32, 150, 299]
    assert_same_bits(pairs.linear_fp32(x, packed)[some], pairs.linear_fp32(x[some], packed))


def test_no_rows(kernels):
    x, weight, bias = make_case(1, 100, 48)
    assert kernels().linear(x[:0], kernels().pack_linear(weight), bias).shape == (0, 48)


def test_only_bf16_weights_are_of_this_kind_and_only_bf16_rows_meet_them(kernels, dot_library):
    pairs = kernels()
    packed = pairs.pack_linear(torch.ones(8, 64).bfloat16())
    assert dot_library.baton_weight_kind(packed.data_ptr()) == WeightKind.DOT_BF16
    wide = pairs.pack_linear(torch.ones(8, 64))
    assert dot_library.baton_weight_kind(wide.data_ptr()) == WeightKind.FLOAT
    with pytest.raises(TypeError, match="`x` must be bf16 for a bf16 weight"):
        pairs.linear(torch.ones(2, 64), packed)


def test_damaged_weights_are_refused(kernels):
    pairs = kernels()
    x, weight, _ = make_case(2, 64, 40)
    packed = pairs.pack_linear(weight)
    for damaged in (packed[:-1], torch.cat([packed, packed[:1]])):
        with pytest.raises(ValueError, match="not a weight packed as panels"):
            pairs.linear(x, damaged)
