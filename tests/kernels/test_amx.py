"""The matrix unit's products, on tiles emulated in C++: equal to a plain model of the unit bit for bit."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.build import load_library
from kernels.cpu.isa import cpu_has_amx
from kernels.cpu.native import SIGNATURES, NativeKernels
from kernels.cpu.weight_kind import WeightKind
from kernels.quantization import Quantization
from kernels.reference import ReferenceBackend
from tests.support.isa_emulation import emulated_library

pytestmark = pytest.mark.timeout(600)  # the first test compiles the emulated library

ROWS = (1, 2, 7, 16, 17, 31, 32, 33, 48, 65, 70)
# in features, out features; the deepest is multiplied in parts
SHAPES = ((576, 130), (100, 7), (33, 48), (31, 33), (1, 1), (64, 32), (200, 96), (1300, 40))
SMALLEST_NORMAL = 2.0**-126

Kernels = Callable[..., NativeKernels]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return emulated_library()


@pytest.fixture
def kernels(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    def make(
        isa: str = "amx", quantization: Quantization = Quantization.NONE, num_threads: int = 1
    ) -> NativeKernels:
        monkeypatch.setenv("BATON_CPU_ISA", isa)
        return NativeKernels(library, num_threads, quantization)

    return make


def kernels_of_this_machine() -> NativeKernels:
    return NativeKernels(load_library(), 1, Quantization.NONE)


def make_case(num_rows: int, in_features: int, out_features: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows * 7919 + in_features * 31 + out_features)
    x = torch.randn(num_rows, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    bias = torch.randn(out_features, generator=generator)
    return x.bfloat16(), weight.bfloat16(), bias.bfloat16()


def flushed(values: Tensor) -> Tensor:
    return torch.where(values.abs() < SMALLEST_NORMAL, torch.copysign(torch.zeros(()), values), values)


def unit_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in]·weight [out, in]ᵀ as tiles of 32 values of k give it, fp32.

    Products of bf16 are exact in fp32, so a fused multiply-add is a product and a rounded addition.
    """
    padding = -x.shape[1] % 32
    rows, columns = (flushed(functional.pad(t.float(), (0, padding))) for t in (x, weight))
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for first in range(0, rows.shape[1], 32):
        even, odd = torch.zeros_like(sums), torch.zeros_like(sums)
        for k in range(first, first + 32, 2):
            even = flushed(even + rows[:, k, None] * columns[None, :, k])
            odd = flushed(odd + rows[:, k + 1, None] * columns[None, :, k + 1])
        sums = flushed(sums + flushed(even + odd))
    return sums


def assert_same_numbers(actual: Tensor, expected: Tensor) -> None:
    """The same bits, but for those of a NaN."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bits(actual.where(~actual.isnan(), 0.0), expected.where(~expected.isnan(), 0.0))


def alone(unit: NativeKernels, x: Tensor, packed: Tensor) -> Tensor:
    """Each row multiplied by itself."""
    return torch.cat([unit.linear_fp32(row, packed) for row in x.split(1)])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[expected.dtype]
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.contiguous().view(integers), expected.contiguous().view(integers))


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_bf16_equals_the_model_of_the_unit(kernels, in_features, out_features):
    x, weight, bias = make_case(70, in_features, out_features)
    expected = unit_product(x, weight)
    unit = kernels()
    packed = unit.pack_linear(weight)
    for num_rows in ROWS:
        rows = x[-num_rows:]
        assert_same_bits(unit.linear_fp32(rows, packed), expected[-num_rows:])
        assert_same_bits(unit.linear(rows, packed), expected[-num_rows:].bfloat16())
        with_bias = expected[-num_rows:] + bias.float()
        assert_same_bits(unit.linear(rows, packed, bias), with_bias.bfloat16())


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_bf16_is_close_to_fp64_and_to_the_reference(kernels, in_features, out_features):
    x, weight, bias = make_case(33, in_features, out_features)
    unit, reference = kernels(), ReferenceBackend()
    packed = unit.pack_linear(weight)
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(unit.linear_fp32(x, packed).double(), exact, rtol=1e-5, atol=1e-5)
    expected = reference.linear(x, reference.pack_linear(weight), bias)
    torch.testing.assert_close(unit.linear(x, packed, bias), expected, rtol=2**-7, atol=1e-5)


def test_subnormal_values_count_as_zero(kernels):
    x, weight, _ = make_case(3, 64, 32)
    x[:, 5], weight[:, 5] = 2.0**-127, 2.0**100  # not 2^-27
    x[1], weight[7] = 2.0**-70, 2.0**-70  # every product is far below the smallest number
    unit = kernels()
    result = unit.linear_fp32(x, unit.pack_linear(weight))
    assert_same_bits(result, unit_product(x, weight))
    assert result[1, 7] == 0


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_rows_bits_do_not_depend_on_the_batch(kernels, quantization, in_features, out_features):
    x, weight, bias = make_case(70, in_features, out_features)
    unit = kernels(quantization=quantization)
    packed = unit.pack_linear(weight)
    alone = torch.cat([unit.linear(x[row : row + 1], packed, bias) for row in range(70)])
    for num_rows in ROWS:
        for start in {0, 1, 70 - num_rows}:
            rows = slice(start, min(start + num_rows, 70))
            assert_same_bits(unit.linear(x[rows], packed, bias), alone[rows])


def special_case(
    num_rows: int, in_features: int, out_features: int, *, with_nans: bool
) -> tuple[Tensor, Tensor]:
    """Signed zeros, subnormals, ends of the range and infinities among numbers whose products and sums are
    about as large as the smallest normal number."""
    generator = torch.Generator().manual_seed(num_rows * 7919 + in_features * 31 + out_features)
    special = [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x8080, 0x3F80, 0x7F7F, 0x7F80, 0xFF80]
    nans = [0x7FC0, 0xFFC0, 0x7FC5, 0xFFD3, 0x7F81, 0xFF91]
    tensors = []
    for count in (num_rows, out_features):
        shape = (count, in_features)
        bits = torch.randint(0, 2**16, shape, generator=generator)
        bits = (bits & 0x807F) | (torch.randint(60, 68, shape, generator=generator) << 7)
        for values, share in ((special, 0.03), (special[:7], 0.1), (nans, 0.02 if with_nans else 0.0)):
            chosen = torch.tensor(values)[torch.randint(0, len(values), shape, generator=generator)]
            # rows and columns without any infinity or NaN, too
            is_here = torch.rand(shape, generator=generator) < share * torch.rand(
                (count, 1), generator=generator
            )
            bits = torch.where(is_here & (torch.arange(count)[:, None] % 3 > 0), chosen, bits)
        tensors.append(torch.where(bits >= 2**15, bits - 2**16, bits).to(torch.int16).view(torch.bfloat16))
    return tensors[0], tensors[1]


@pytest.mark.parametrize("with_nans", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_row_alone_has_the_bits_of_rows_together(kernels, in_features, out_features, with_nans):
    """Alone it is multiplied without the unit, else by it: emulated, which leaves a NaN's bits open."""
    x, weight = special_case(17, in_features, out_features, with_nans=with_nans)
    unit = kernels()
    packed = unit.pack_linear(weight)
    assert_same_numbers(alone(unit, x, packed), unit.linear_fp32(x, packed))


@pytest.mark.parametrize("with_nans", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_the_unit_its_emulation_and_a_row_alone_agree(kernels, in_features, out_features, with_nans):
    if load_library().baton_amx_acquire() != 0:  # the test before this one has the emulation's part
        pytest.skip("this machine has no matrix unit, or does not lend it")
    x, weight = special_case(17, in_features, out_features, with_nans=with_nans)
    emulated = kernels()
    expected = emulated.linear_fp32(x, emulated.pack_linear(weight))
    unit = kernels_of_this_machine()
    packed = unit.pack_linear(weight)
    together = unit.linear_fp32(x, packed)
    assert_same_numbers(together, expected)
    assert_same_bits(alone(unit, x, packed), together)


def test_what_rounds_to_the_smallest_normal_number_may_count_as_zero(kernels):
    """Where it got there only because subnormals are coarser than numbers would be that had no end."""
    x, weight = torch.zeros(3, 32), torch.zeros(5, 32)
    x[:, 0], weight[:, 0] = 2.0**-63, 2.0**-63
    x[:, 2] = 2.0**-76
    weight[:, 2] = -torch.tensor([0.5, 0.75, 1.0, 1.25, 1.5]) * 2.0**-75
    unit = kernels()
    packed = unit.pack_linear(weight.bfloat16())
    expected = torch.tensor([SMALLEST_NORMAL] * 3 + [0.0] * 2)
    for num_rows in (1, 2, 3):
        assert_same_bits(unit.linear_fp32(x[:num_rows].bfloat16(), packed), expected.expand(num_rows, 5))


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8])
def test_bits_do_not_depend_on_threads(kernels, quantization):
    x, weight, bias = make_case(70, 200, 300)
    results = []
    for num_threads in (1, 2, 3):
        unit = kernels(quantization=quantization, num_threads=num_threads)
        packed = unit.pack_linear(weight)
        results.append(torch.cat([unit.linear(x[:rows], packed, bias) for rows in (1, 2, 16, 70)]))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_rows_too_many_for_the_cache_are_taken_in_blocks(kernels):
    x, weight, _ = make_case(300, 4096, 33)
    unit = kernels()
    packed = unit.pack_linear(weight)
    some = [0, 127, 128, 150, 299]
    assert_same_bits(unit.linear_fp32(x, packed)[some], unit.linear_fp32(x[some], packed))


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8])
def test_neighbouring_rows_do_not_leak(kernels, quantization):
    x, weight, _ = make_case(40, 100, 48)
    unit = kernels(quantization=quantization)
    packed = unit.pack_linear(weight)
    clean = unit.linear(x[5:6], packed)
    x[:5] = torch.nan
    x[6:] = torch.inf
    assert_same_bits(unit.linear(x, packed)[5:6], clean)


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 5, 16, 33, 70])
def test_int8_equals_the_other_instructions_and_the_reference(kernels, num_rows, in_features, out_features):
    x, weight, bias = make_case(num_rows, in_features, out_features)
    results = []
    for isa in ("amx", "simd"):
        instructions = kernels(isa, Quantization.INT8)
        packed = instructions.pack_linear(weight)
        results.append((instructions.linear_fp32(x, packed), instructions.linear(x, packed, bias)))
    reference = ReferenceBackend(quantization=Quantization.INT8)
    packed = reference.pack_linear(weight)
    results.append((reference.linear_fp32(x, packed), reference.linear(x, packed, bias)))
    for other in results[1:]:
        assert_same_bits(other[0], results[0][0])
        assert_same_bits(other[1], results[0][1])


def test_no_rows(kernels):
    for quantization in (Quantization.NONE, Quantization.INT8):
        unit = kernels(quantization=quantization)
        x, weight, bias = make_case(1, 100, 48)
        assert unit.linear(x[:0], unit.pack_linear(weight), bias).shape == (0, 48)


class TestKinds:
    def test_each_instruction_set_has_its_own_layout(self, kernels):
        names = {
            kernels(isa, quantization).packed_layout
            for isa in ("amx", "simd")
            for quantization in (Quantization.NONE, Quantization.INT8)
        }
        assert len(names) == 4

    @pytest.mark.parametrize("isa", ["simd", "amx"])
    @pytest.mark.parametrize("quantization", list(Quantization))
    def test_whoever_attends_by_dot_products_or_tiles_has_another_layout(
        self, library, monkeypatch, isa, quantization
    ):
        monkeypatch.setenv("BATON_CPU_ISA", isa)
        names = []
        for has_dot in (0, 1):
            machine = SimpleNamespace(**{name: getattr(library, name) for name in SIGNATURES})
            machine.baton_dot_is_there = lambda answer=has_dot: answer
            names.append(NativeKernels(machine, 1, quantization).packed_layout)
        assert names[1] == names[0] + {"simd": "-dots", "amx": "-tiles"}[isa]

    @pytest.mark.parametrize(
        ("isa", "dtype", "quantization", "kind"),
        [
            ("amx", torch.bfloat16, Quantization.NONE, WeightKind.AMX_BF16),
            ("auto", torch.bfloat16, Quantization.NONE, WeightKind.AMX_BF16),
            ("simd", torch.bfloat16, Quantization.NONE, WeightKind.FLOAT),
            ("amx", torch.float32, Quantization.NONE, WeightKind.FLOAT),
            ("amx", torch.bfloat16, Quantization.INT8, WeightKind.AMX_INT8),
            ("simd", torch.bfloat16, Quantization.INT8, WeightKind.INT8),
            ("amx", torch.bfloat16, Quantization.INT8_WEIGHTS, WeightKind.INT8_WEIGHTS),
        ],
    )
    def test_who_multiplies_what(self, kernels, library, isa, dtype, quantization, kind):
        packed = kernels(isa, quantization).pack_linear(torch.ones(40, 40, dtype=dtype))
        assert library.baton_weight_kind(packed.data_ptr()) == kind

    def test_fp32_rows_are_not_rounded_in_silence(self, kernels):
        unit = kernels()
        packed = unit.pack_linear(torch.ones(8, 64).bfloat16())
        with pytest.raises(TypeError, match="`x` must be bf16 for a bf16 weight"):
            unit.linear(torch.ones(2, 64), packed)

    @pytest.mark.skipif(cpu_has_amx(), reason="the machine's own library has asked for the unit")
    def test_a_process_without_the_unit_refuses_its_weights(self, kernels):
        x, weight, _ = make_case(2, 64, 40)
        packed = kernels("auto").pack_linear(weight)
        with pytest.raises(ValueError, match="not a weight packed as panels"):
            kernels_of_this_machine().linear(x, packed)

    def test_damaged_weights_are_refused(self, kernels):
        unit = kernels()
        x, weight, _ = make_case(2, 64, 40)
        packed = unit.pack_linear(weight)
        for damaged in (packed[:-1], torch.cat([packed, packed[:1]])):
            with pytest.raises(ValueError, match="not a weight packed as panels"):
                unit.linear(x, damaged)


def test_the_emulation_faults_where_the_unit_would(library):
    """Tiles used by a process that has not asked for them: unnoticed, the emulation would prove nothing."""
    code = f"""
import ctypes

library = ctypes.CDLL({library._name!r})
packed = (ctypes.c_char * 4096)()
library.baton_amx_pack(bytes(64), 1, 32, packed)
library.baton_linear(bytes(192), 1, 3, packed, None, 0, (ctypes.c_char * 64)(), 0, 1)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode < 0
    assert "AMX emulation: no permission was requested" in result.stderr


@pytest.mark.parametrize(
    ("has_dot", "kind", "told"),
    [
        (0, WeightKind.FLOAT, "simd, several times slower: the"),
        (1, WeightKind.DOT_BF16, "avx512-bf16, several times slower: AVX-512 BF16: the"),
    ],
)
def test_refused_the_unit_it_runs_the_next_best_and_says_so_in_one_line(
    library, caplog, monkeypatch, has_dot, kind, told
):
    monkeypatch.setenv("BATON_CPU_ISA", "auto")
    refusing = SimpleNamespace(**{name: getattr(library, name) for name in SIGNATURES})
    refusing.baton_amx_acquire, refusing.baton_dot_is_there = lambda: 1, lambda: has_dot
    kernels = NativeKernels(refusing, 1, Quantization.NONE)
    x, weight, _ = make_case(2, 64, 40)
    packed = kernels.pack_linear(weight)
    assert library.baton_weight_kind(packed.data_ptr()) == kind
    assert kernels.linear(x, packed).shape == (2, 40)
    [record] = caplog.records
    assert record.getMessage() == (f"products use {told} kernel does not lend AMX: Operation not permitted")
