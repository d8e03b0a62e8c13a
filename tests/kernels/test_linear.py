"""Linears of every backend: right against fp64, and the same bits for a row wherever it stands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

ROWS = (*range(1, 20), 24, 25, 33, 36, 37, 64, 70)  # around every border of a tile
SHAPES = ((576, 48), (576, 1000), (100, 7), (33, 48), (33, 7), (100, 1000), (1536, 576), (1, 1), (2050, 130))
NARROW = [
    (k, n) for k in (1, 2, 3, 4, 5, 7) for n in (15, 16, 17, 31, 33, 49, 65, 97)
]  # ends of unrolled steps


def make_case(
    num_rows: int, in_features: int, out_features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows * 7919 + in_features * 31 + out_features)
    x = torch.randn(num_rows, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    bias = torch.randn(out_features, generator=generator)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[expected.dtype]
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.contiguous().view(integers), expected.contiguous().view(integers))


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 7, 70])
def test_linear_is_close_to_fp64(backend, dtype, num_rows, in_features, out_features):
    x, weight, bias = make_case(num_rows, in_features, out_features, dtype)
    packed = backend.pack_linear(weight)
    exact = x.double() @ weight.double().t()
    # fp32 sums err by about sqrt(in)·2^-24; bf16 results are rounded once, to 8 bits
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    for bias_or_none in (None, bias):
        y = backend.linear(x, packed, bias_or_none)
        expected = exact if bias_or_none is None else exact + bias.double()
        assert y.dtype == dtype
        assert y.shape == (num_rows, out_features)
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=1e-5)
    logits = backend.linear_fp32(x, packed)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


def test_bf16_result_is_the_fp32_one_rounded_once(backend):
    x, weight, bias = make_case(13, 576, 130, torch.bfloat16)
    packed = backend.pack_linear(weight)
    assert_same_bits(backend.linear(x, packed), backend.linear_fp32(x, packed).bfloat16())
    with_bias = backend.linear_fp32(x, packed) + bias.float()
    assert_same_bits(backend.linear(x, packed, bias), with_bias.bfloat16())


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_rows_bits_do_not_depend_on_the_batch(backend, dtype, in_features, out_features):
    x, weight, bias = make_case(70, in_features, out_features, dtype)
    packed = backend.pack_linear(weight)
    alone = torch.cat([backend.linear(x[row : row + 1], packed, bias) for row in range(70)])
    for num_rows in ROWS:
        for start in {0, 1, (70 - num_rows) // 2, 70 - num_rows}:
            rows = slice(start, min(start + num_rows, 70))
            assert_same_bits(backend.linear(x[rows], packed, bias), alone[rows])


@pytest.mark.parametrize(("in_features", "out_features"), NARROW)
def test_few_features_of_any_count(make_backend, dtype, in_features, out_features):
    backend = make_backend(1)
    x, weight, _ = make_case(14, in_features, out_features, dtype)
    packed = backend.pack_linear(weight)
    alone = torch.cat([backend.linear_fp32(x[row : row + 1], packed) for row in range(14)])
    torch.testing.assert_close(alone.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)
    for num_rows in range(2, 15):
        assert_same_bits(backend.linear_fp32(x[:num_rows], packed), alone[:num_rows])


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 1000), (100, 7), (2050, 130)])
def test_bits_do_not_depend_on_threads(make_backend, dtype, in_features, out_features):
    x, weight, bias = make_case(70, in_features, out_features, dtype)
    results = []
    for num_threads in (1, 2, 3):
        backend = make_backend(num_threads)
        packed = backend.pack_linear(weight)
        results.append([backend.linear(x[:num_rows], packed, bias) for num_rows in (1, 6, 70)])
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert_same_bits(actual, expected)


def test_neighbouring_rows_do_not_leak(backend, dtype):
    x, weight, _ = make_case(16, 100, 48, dtype)
    packed = backend.pack_linear(weight)
    clean = backend.linear(x[5:6], packed)
    x[:5] = torch.nan
    x[6:] = torch.inf
    assert_same_bits(backend.linear(x, packed)[5:6], clean)


def test_no_rows(backend, dtype):
    x, weight, bias = make_case(1, 100, 48, dtype)
    assert backend.linear(x[:0], backend.pack_linear(weight), bias).shape == (0, 48)


def test_inputs_need_not_be_contiguous(backend, dtype):
    x, weight, _ = make_case(6, 200, 48, dtype)
    half = weight[:, ::2]
    assert_same_bits(
        backend.linear(x[:, ::2], backend.pack_linear(half)),
        backend.linear(x[:, ::2].contiguous(), backend.pack_linear(half.contiguous())),
    )


def test_packed_weight_is_a_plain_tensor_that_can_be_saved_and_mapped(backend, dtype, tmp_path):
    x, weight, _ = make_case(3, 100, 1000, dtype)
    packed = backend.pack_linear(weight)
    assert type(packed) is torch.Tensor
    assert packed.is_contiguous()
    path = tmp_path / "weight.bin"
    path.write_bytes(packed.reshape(-1).view(torch.uint8).numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=packed.nbytes, dtype=torch.uint8)
    mapped = mapped.view(packed.dtype).view(packed.shape)
    assert_same_bits(backend.linear(x, mapped), backend.linear(x, packed))
