"""Int8 weights: every backend to the bit of the contract, every path of the kernels to the bit of another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.backend import CpuBackend
from kernels.ops import Backend
from kernels.quantization import (
    LEVELS,
    MAX_IN_FEATURES,
    PAIR_LIMIT,
    Quantization,
    quantize_rows,
    quantize_weight,
)
from kernels.reference import ReferenceBackend

INT8 = (Quantization.INT8, Quantization.INT8_WEIGHTS)
# out features beside panels of 8, 16 and 32, in features beside quads, pairs and vectors
SHAPES = ((576, 48), (33, 7), (1536, 130), (1, 1), (2, 17), (3, 33), (66, 100), (2047, 31), (64, 64))
NUM_ROWS = (0, 1, 2, 3, 5, 6, 7, 12, 13, 31, 70)


def make_case(
    num_rows: int, in_features: int, out_features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and channels of very different magnitudes; one of each all zeros, one of equal values."""
    generator = torch.Generator().manual_seed(num_rows * 7919 + in_features * 31 + out_features)
    x = torch.randn(num_rows, in_features, generator=generator)
    x *= torch.logspace(-6, 6, max(num_rows, 1))[:num_rows, None]
    weight = torch.randn(out_features, in_features, generator=generator)
    weight *= torch.logspace(-3, 3, out_features)[:, None]
    if num_rows > 4:
        x[1], x[3] = 0, 0.3
    if out_features > 4:
        weight[1], weight[3] = 0, -2.5
    bias = torch.randn(out_features, generator=generator)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[expected.dtype]
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.contiguous().view(integers), expected.contiguous().view(integers))


def native(quantization: Quantization, num_threads: int = 1) -> CpuBackend:
    backend = CpuBackend(num_threads, quantization)
    assert backend.is_native, "the C++ kernels did not compile here: see the log"
    return backend


@pytest.fixture(params=INT8, ids=lambda kind: kind.value)
def quantization(request: pytest.FixtureRequest) -> Quantization:
    kind: Quantization = request.param
    return kind


@pytest.fixture(params=["reference", "cpu"])
def int8_backend(request: pytest.FixtureRequest, quantization: Quantization) -> Backend:
    return native(quantization) if request.param == "cpu" else ReferenceBackend("cpu", quantization)


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_integer_products_are_the_references_to_the_bit(dtype, num_rows, in_features, out_features):
    x, weight, bias = make_case(num_rows, in_features, out_features, dtype)
    reference, cpu = ReferenceBackend("cpu", Quantization.INT8), native(Quantization.INT8)
    packed, expected = cpu.pack_linear(weight), reference.pack_linear(weight)
    assert_same_bits(cpu.linear(x, packed, bias), reference.linear(x, expected, bias))
    assert_same_bits(cpu.linear(x, packed), reference.linear(x, expected))
    assert_same_bits(cpu.linear_fp32(x, packed), reference.linear_fp32(x, expected))


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 7, 70])
def test_widened_products_are_close_to_fp64(dtype, num_rows, in_features, out_features):
    x, weight, bias = make_case(num_rows, in_features, out_features, dtype)
    values, scales = quantize_weight(weight, Quantization.INT8_WEIGHTS)
    stored = values.double() * scales.double()[:, None]
    exact = x.double() @ stored.t()
    # each of `in_features` roundings errs by at most 2^-24 of a partial sum
    bound = (in_features + 2) * 2**-24 * (x.double().abs() @ stored.abs().t())
    for backend in (ReferenceBackend("cpu", Quantization.INT8_WEIGHTS), native(Quantization.INT8_WEIGHTS)):
        y = backend.linear_fp32(x, backend.pack_linear(weight)).double()
        assert ((y - exact).abs() <= bound).all()
        rounded = backend.linear(x, backend.pack_linear(weight), bias)
        assert_same_bits(rounded, (y.float() + bias.float()).to(dtype))


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 48), (33, 7), (2047, 31)])
def test_a_rows_bits_do_not_depend_on_the_batch(int8_backend, dtype, in_features, out_features):
    x, weight, bias = make_case(70, in_features, out_features, dtype)
    packed = int8_backend.pack_linear(weight)
    alone = torch.cat([int8_backend.linear(x[row : row + 1], packed, bias) for row in range(70)])
    for num_rows in (2, 3, 6, 7, 13, 25, 70):
        for start in {0, 1, 70 - num_rows}:
            rows = slice(start, min(start + num_rows, 70))
            assert_same_bits(int8_backend.linear(x[rows], packed, bias), alone[rows])


def test_bits_do_not_depend_on_threads(quantization, dtype):
    x, weight, bias = make_case(70, 576, 1000, dtype)
    results = []
    for num_threads in (1, 2, 3):
        backend = native(quantization, num_threads)
        packed = backend.pack_linear(weight)
        results.append([backend.linear(x[:num_rows], packed, bias) for num_rows in (1, 6, 70)])
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_breaks_itself_alone(int8_backend, dtype, broken):
    x, weight, bias = make_case(16, 100, 48, dtype)
    packed = int8_backend.pack_linear(weight)
    clean = int8_backend.linear(x, packed, bias)
    x[5, 17] = broken
    y = int8_backend.linear(x, packed, bias)
    assert not y[5].isfinite().any() or int8_backend.quantization is Quantization.INT8_WEIGHTS
    if int8_backend.quantization is Quantization.INT8:
        assert y[5].isnan().all()
    others = [row for row in range(16) if row != 5]
    assert_same_bits(y[others], clean[others])


def test_a_broken_channel_breaks_itself_alone(int8_backend, dtype):
    x, weight, _ = make_case(3, 100, 48, dtype)
    clean = int8_backend.linear(x, int8_backend.pack_linear(weight))
    weight[7, 3] = torch.inf
    y = int8_backend.linear(x, int8_backend.pack_linear(weight))
    assert y[:, 7].isnan().all()
    assert_same_bits(torch.cat([y[:, :7], y[:, 8:]], dim=1), torch.cat([clean[:, :7], clean[:, 8:]], dim=1))


def test_largest_sums_are_exact():
    """Every product at its limit and of one sign: nothing saturates, nothing wraps around."""
    in_features = 4096
    x = torch.ones(3, in_features)
    x[1] = -1
    x[2, ::2] = -1
    weight = torch.ones(5, in_features)
    weight[1] = -1
    weight[2, 1::2] = 0
    weight[3, 1::2] = -1
    weight[4, ::4] = 0
    values, scales = quantize_weight(weight, Quantization.INT8)
    assert values.abs().amax() == LEVELS
    exact = (127.0 * x.double()) @ values.double().t()
    expected = exact.float() * (torch.full((3, 1), 1.0) / 127 * scales)
    backend = native(Quantization.INT8)
    assert_same_bits(backend.linear(x, backend.pack_linear(weight)), expected)


class TestQuantization:
    @pytest.mark.parametrize("in_features", [1, 2, 7, 64, 577])
    def test_weights_are_within_half_a_step(self, quantization, in_features):
        _, weight, _ = make_case(1, in_features, 40, torch.float32)
        values, scales = quantize_weight(weight, quantization)
        assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
        error = (values.double() * scales.double()[:, None] - weight.double()).abs()
        assert (error <= scales.double()[:, None] * 0.50001).all()
        assert values.int().abs().max() <= LEVELS
        assert not scales[1]
        assert not values[1].any()

    def test_weights_alone_use_every_level(self):
        _, weight, _ = make_case(1, 64, 40, torch.float32)
        values, _ = quantize_weight(weight, Quantization.INT8_WEIGHTS)
        assert (values[2].int().abs().max(), values[3].unique().tolist()) == (127, [-127])

    @given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=40))
    def test_no_pair_can_saturate(self, row):
        values, scales = quantize_weight(torch.tensor([row]), Quantization.INT8)
        pairs = torch.nn.functional.pad(values.int(), (0, len(row) % 2)).view(-1, 2)
        for sign in (1, -1):
            assert (pairs * sign).clamp(min=0).sum(dim=1).max() <= PAIR_LIMIT
        assert 255 * PAIR_LIMIT < 2**15
        largest = max(map(abs, row))
        assert scales[0] <= max(largest, 1e-30) * 2 / (PAIR_LIMIT - 1) * 1.0001

    def test_rows_round_ties_to_even(self):
        x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0.0]])
        values, scales = quantize_rows(x)
        assert values.tolist() == [[127, 0, 2, 2, 0, -2, 126, 0]]
        assert scales.tolist() == [1.0]

    def test_tiny_rows_count_as_zeros(self):
        values, scales = quantize_rows(torch.full((1, 9), 1e-38))
        assert not values.any()
        assert not scales.any()

    def test_too_many_in_features_are_refused(self, quantization):
        with pytest.raises(ValueError, match="at most 131072 input features: 131073"):
            quantize_weight(torch.zeros(1, MAX_IN_FEATURES + 1), quantization)


def unpack(packed: Tensor, out_features: int, in_features: int, panel: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `gemm_int8.h` says of the layout, read back: values, scales, column sums."""
    columns = -(-out_features // panel) * panel
    quads = -(-in_features // 4)
    scales = packed[64 : 64 + 4 * columns].view(torch.float32)
    sums = packed[64 + 4 * columns : 64 + 8 * columns].view(torch.int32)
    start = 64 + 8 * columns
    values = packed[start : start + 4 * quads * columns].view(torch.int8).view(-1, quads, panel, 4)
    values = values.permute(0, 2, 1, 3).reshape(columns, quads * 4)
    assert not values[out_features:].any()
    assert not values[:, in_features:].any()
    assert not scales[out_features:].any()
    return values[:out_features, :in_features], scales[:out_features], sums[:out_features]


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_packing_keeps_every_value(quantization, dtype, in_features, out_features):
    _, weight, _ = make_case(1, in_features, out_features, dtype)
    backend = native(quantization)
    panel = int(backend.packed_layout.removeprefix("quads").partition("-")[0])
    values, scales, sums = unpack(backend.pack_linear(weight), out_features, in_features, panel)
    expected_values, expected_scales = quantize_weight(weight, quantization)
    assert torch.equal(values, expected_values)
    assert_same_bits(scales, expected_scales)
    assert torch.equal(sums, expected_values.int().sum(dim=1, dtype=torch.int32))


def test_packed_weight_is_a_plain_tensor_that_can_be_saved_and_mapped(int8_backend, dtype, tmp_path):
    x, weight, _ = make_case(3, 100, 90, dtype)
    packed = int8_backend.pack_linear(weight)
    path = tmp_path / "weight.bin"
    path.write_bytes(packed.contiguous().view(torch.uint8).numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=packed.nbytes, dtype=torch.uint8)
    mapped = mapped.view(packed.dtype).view(packed.shape)
    assert_same_bits(int8_backend.linear(x, mapped), int8_backend.linear(x, packed))


def test_kinds_mix_in_one_library(dtype):
    """The kind is the packed weight's own: whoever multiplies need not have made it."""
    x, weight, bias = make_case(5, 100, 48, dtype)
    backends = [native(kind) for kind in Quantization]
    for maker in backends:
        packed = maker.pack_linear(weight)
        for user in backends:
            assert_same_bits(user.linear(x, packed, bias), maker.linear(x, packed, bias))


@pytest.mark.parametrize("cut", [1, 64, 4096])
def test_a_truncated_weight_is_refused(quantization, cut):
    backend = native(quantization)
    packed = backend.pack_linear(torch.ones(48, 576))
    with pytest.raises(ValueError, match="not a weight packed as quads"):
        backend.linear(torch.ones(2, 576), packed[:-cut])
    with pytest.raises(ValueError, match="not a weight packed as quads"):
        backend.linear(torch.ones(2, 575), packed)
