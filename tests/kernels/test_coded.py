"""Weights kept as codes: bit for bit what products of the decoded weights give, by the machine's own
decoding and by the portable one, whatever the batch and whether decoded panels are there too."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kernels.coded import BLOCK_SIZE, CodedForm, CodedFormError, CodedMatrix, requested_form, stack
from kernels.cpu.native import NativeKernels, bind
from kernels.cpu.weight_kind import WeightKind
from kernels.quantization import Quantization
from tests.kernels.test_amx import assert_same_bits

pytestmark = pytest.mark.timeout(600)  # the first test compiles the emulated library

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 25, 40)
SHAPES = ((1, 32), (31, 64), (33, 96), (64, 576), (100, 1536))


def make_matrix(out_features: int, in_features: int, bits: int, seed: int = 3) -> CodedMatrix:
    """All codes; scales and minima of either sign, zero, subnormal and large."""
    generator = torch.Generator().manual_seed(seed)
    shape, blocks = (out_features, in_features), (out_features, in_features // BLOCK_SIZE)
    scales = torch.randn(blocks, generator=generator) * 0.05
    special = torch.tensor([0.0, 2.0**-24, -(2.0**-20), 30.0])
    scales.flatten()[: len(special)] = special[: scales.numel()]
    if bits == 8:
        codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        return CodedMatrix(codes, scales.half(), None)
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    minima = torch.randn(blocks, generator=generator)
    minima.flatten()[-1] = 2.0**-24
    return CodedMatrix(codes, scales.half(), minima.half())


@pytest.fixture(params=["avx512-bf16", "amx"])
def isa(request: pytest.FixtureRequest, dot_library: Any) -> str:
    """The matrix unit's tiles are emulated only; real ones are tested where the machine has them."""
    if request.param == "amx" and bind(dot_library).baton_amx_acquire() != 0:
        pytest.skip("this machine has no matrix unit")
    found: str = request.param
    return found


@pytest.fixture
def kernels(dot_library: Any, isa: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(num_threads: int = 1, form: str = "auto") -> NativeKernels:
        monkeypatch.setenv("BATON_CPU_ISA", isa)
        monkeypatch.setenv("BATON_GGUF_WEIGHTS", form)
        return NativeKernels(dot_library, num_threads, Quantization.NONE)

    return make


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_equals_the_product_of_decoded_weights(
    kernels: Any, bits: int, out_features: int, in_features: int
) -> None:
    matrix = make_matrix(out_features, in_features, bits)
    native = kernels()
    decoded = native.pack_linear(matrix.decode().bfloat16())
    forms = [kernels(form=form).pack_coded(matrix, torch.bfloat16, True) for form in ("small", "auto")]
    assert forms[0].nbytes < forms[1].nbytes
    bias = torch.randn(out_features, generator=torch.Generator().manual_seed(5)).bfloat16()
    x = torch.randn(ROWS[-1], in_features, generator=torch.Generator().manual_seed(4)).bfloat16()
    for num_rows in ROWS:
        rows = x[-num_rows:]
        expected = native.linear_fp32(rows, decoded)
        for coded in forms:
            assert_same_bits(native.linear_fp32(rows, coded), expected)
            assert_same_bits(native.linear(rows, coded, bias), native.linear(rows, decoded, bias))


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_too_many_for_the_cache_and_any_number_of_threads(kernels: Any, bits: int) -> None:
    matrix = make_matrix(70, 4096, bits)
    x = torch.randn(300, 4096, generator=torch.Generator().manual_seed(4)).bfloat16()
    native = kernels()
    decoded = native.pack_linear(matrix.decode().bfloat16())
    expected = native.linear_fp32(x, decoded)
    for num_threads in (1, 3):
        for form in ("small", "auto"):
            coded = kernels(num_threads, form).pack_coded(matrix, torch.bfloat16, form == "auto")
            assert_same_bits(kernels(num_threads).linear_fp32(x, coded), expected)


@pytest.mark.parametrize("expands", [False, True])
def test_no_rows(kernels: Any, expands: bool) -> None:
    """On a thread of its own, whose memory for rows is not there yet."""
    native = kernels(form="auto" if expands else "small")
    coded = native.pack_coded(make_matrix(48, 64, 4), torch.bfloat16, expands)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(native.linear, torch.ones(0, 64).bfloat16(), coded).result(timeout=60)
    assert result.shape == (0, 48)


def test_views_are_packed_as_what_they_show(kernels: Any) -> None:
    matrix = make_matrix(96, 96, 4)
    assert matrix.minima is not None
    strided = CodedMatrix(
        *(part.t().contiguous().t() for part in (matrix.codes, matrix.scales, matrix.minima))
    )
    assert not strided.codes.is_contiguous()
    packed = kernels().pack_coded(matrix, torch.bfloat16, True)
    assert kernels().pack_coded(strided, torch.bfloat16, True).equal(packed)


def test_matrices_that_kernels_could_not_trust_are_refused() -> None:
    matrix = make_matrix(4, 64, 4)
    for change in (
        {"scales": matrix.scales[:, :1]},
        {"scales": matrix.scales.float()},
        {"codes": matrix.codes.to(torch.int8)},
        {"codes": matrix.codes[:, :50]},
        {"minima": None},
    ):
        with pytest.raises(ValueError, match=r"codes are|scales and minima"):
            dataclasses.replace(matrix, **change)


def test_kinds_and_sizes(kernels: Any, isa: str, dot_library: Any) -> None:
    of_unit = WeightKind.AMX_NIBBLES - WeightKind.NIBBLES if isa == "amx" else 0
    for bits, kind, bytes_per_block in (
        (4, WeightKind.NIBBLES + of_unit, 20),
        (8, WeightKind.BYTES + of_unit, 34),
    ):
        coded = kernels(form="small").pack_coded(make_matrix(1024, 1024, bits), torch.bfloat16, False)
        assert dot_library.baton_weight_kind(coded.data_ptr()) == kind
        assert 0 <= coded.nbytes - 1024 * 1024 // BLOCK_SIZE * bytes_per_block < 5_000


def test_what_is_not_kept_as_codes(
    kernels: Any, isa: str, dot_library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = make_matrix(40, 64, 4)
    assert kernels(form="expand").pack_coded(matrix, torch.bfloat16, True) is None
    assert kernels().pack_coded(matrix, torch.float32, True) is None
    assert matrix.minima is not None
    for part in (matrix.scales, matrix.minima):
        part[3, 1] = torch.inf
        assert kernels().pack_coded(matrix, torch.bfloat16, True) is None
        part[3, 1] = 1
    if isa == "amx":  # of a large model
        assert kernels().pack_coded(matrix, torch.bfloat16, False) is None
    small = kernels(form="small")
    assert small.pack_coded(matrix, torch.bfloat16, True).equal(
        small.pack_coded(matrix, torch.bfloat16, False)
    )
    for other_isa, quantization in (("simd", Quantization.NONE), (isa, Quantization.INT8)):
        monkeypatch.setenv("BATON_CPU_ISA", other_isa)
        other = NativeKernels(dot_library, 1, quantization)
        assert other.pack_coded(matrix, torch.bfloat16, True) is None
        assert other.coded_layout == ""


def test_layouts_have_different_names(kernels: Any) -> None:
    names = [kernels(form=form).coded_layout for form in CodedForm]
    assert len(set(names)) == len(names)
    assert len({kernels(form=form).packed_layout for form in CodedForm}) == 1  # of what is no GGUF file


@pytest.mark.parametrize("expands", [False, True])
def test_damaged_weights_are_refused(kernels: Any, expands: bool) -> None:
    native = kernels(form="auto" if expands else "small")
    x = torch.ones(2, 64).bfloat16()
    packed = native.pack_coded(make_matrix(40, 64, 4), torch.bfloat16, expands)
    elsewhere = packed.clone()
    elsewhere[48:56] = 64  # where decoded panels begin
    for damaged in (packed[:-1], torch.cat([packed, packed[:1]]), elsewhere):
        with pytest.raises(ValueError, match="not a weight packed as panels"):
            native.linear(x, damaged)
    with pytest.raises(TypeError, match="`x` must be bf16 for a bf16 weight"):
        native.linear(torch.ones(2, 64), packed)


def test_stacking() -> None:
    parts = [make_matrix(3, 64, 4), make_matrix(5, 64, 4, seed=9)]
    stacked = stack(parts)
    assert stacked is not None
    assert stacked.decode().equal(torch.cat([part.decode() for part in parts]))
    assert stack([parts[0], make_matrix(5, 64, 8)]) is None


def test_forms_by_name() -> None:
    for unset in ({}, {"BATON_GGUF_WEIGHTS": ""}):
        assert requested_form(unset) is CodedForm.AUTO
    assert requested_form({"BATON_GGUF_WEIGHTS": "small"}) is CodedForm.SMALL
    with pytest.raises(CodedFormError, match="`tiny`; use auto, small, expand"):
        requested_form({"BATON_GGUF_WEIGHTS": "tiny"})
