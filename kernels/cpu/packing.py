"""Matrices as the compiled products read them: which kind a matrix becomes, what the kinds are called in the
weight cache, and the calls that pack them.

1. fp32 and bf16 panels; of bf16, pairs (AVX-512 BF16) or tiles (AMX) where these instructions are used.
2. int8, with rows quantized too or not, where the backend is made for it.
3. Codes of a GGUF file, for pairs and tiles (`gemm_coded.h`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.coded import CodedForm, CodedMatrix
from kernels.cpu.isa import Isa
from kernels.cpu.weight_kind import WeightKind
from kernels.quantization import Quantization, quantize_weight

_CODED_KINDS = {  # by whether it is for the matrix unit, and whether codes have 8 bits
    (False, False): WeightKind.NIBBLES,
    (False, True): WeightKind.BYTES,
    (True, False): WeightKind.AMX_NIBBLES,
    (True, True): WeightKind.AMX_BYTES,
}
_UNITS = {Isa.SIMD: "", Isa.DOT: "-dot", Isa.AMX: "-amx"}  # in `packed_layout`


class Packing:
    """For products by the instructions of `isa`. Tensors are as their callers have checked them."""

    def __init__(self, library: Any, isa: Isa, quantization: Quantization, form: CodedForm) -> None:
        self._library, self._isa, self._quantization, self._form = library, isa, quantization, form

    @property
    def layout(self) -> str:
        """What weights are packed for, and all else that results depend on in their last bits."""
        library, unit = self._library, _UNITS[self._isa]
        attends = ""  # by what sums, whatever weights are
        if library.baton_dot_is_there():
            attends = "-tiles" if self._isa is Isa.AMX else "-dots"
        if self._quantization is Quantization.NONE:
            return f"panels{library.baton_panel_width()}-paired{unit}{attends}"
        unit = unit if self._isa is Isa.AMX else ""  # pairs of bf16 are no matter of int8
        return f"quads{library.baton_int8_panel_width()}-{self._quantization.value}{unit}{attends}"

    @property
    def coded_layout(self) -> str:
        """Only products of pairs and of the matrix unit decode."""
        wanted = self._form is not CodedForm.EXPAND
        keeps = wanted and self._isa is not Isa.SIMD and self._quantization is Quantization.NONE
        return f"-codes-{self._form.value}" if keeps else ""

    def pack_linear(self, weight: Tensor) -> Tensor:
        """weight [out, in] → uint8 [bytes]: a header and panels, see `gemm.cpp` and `gemm_int8.h`."""
        if self._quantization is not Quantization.NONE:
            return self._pack_int8(*quantize_weight(weight, self._quantization))
        weight = weight.contiguous()
        out_features, in_features = weight.shape
        if self._isa is not Isa.SIMD and weight.dtype is torch.bfloat16:
            library = self._library
            num_bytes, pack = (
                (library.baton_amx_packed_bytes, library.baton_amx_pack)
                if self._isa is Isa.AMX
                else (library.baton_dot_packed_bytes, library.baton_dot_pack)
            )
            packed = torch.empty(num_bytes(out_features, in_features), dtype=torch.uint8)
            pack(weight.data_ptr(), out_features, in_features, packed.data_ptr())
            return packed
        element_bytes = weight.element_size()
        num_bytes = self._library.baton_packed_bytes(out_features, in_features, element_bytes)
        packed = torch.empty(num_bytes, dtype=torch.uint8)
        self._library.baton_pack(
            weight.data_ptr(), out_features, in_features, element_bytes, packed.data_ptr()
        )
        return packed

    def pack_coded(self, weight: CodedMatrix, dtype: torch.dtype, expands: bool) -> Tensor | None:
        out_features, in_features = weight.codes.shape
        expands = expands and self._form is CodedForm.AUTO
        if not expands and self._isa is Isa.AMX and self._form is CodedForm.AUTO:
            return None  # a long prompt would wait for decoding rather than for the unit
        if not (self.coded_layout and dtype is torch.bfloat16 and weight.is_finite):
            return None
        kind = _CODED_KINDS[self._isa is Isa.AMX, weight.minima is None]
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        packed = torch.empty(
            self._library.baton_coded_packed_bytes(kind, out_features, in_features, expands),
            dtype=torch.uint8,
        )
        minima = None if weight.minima is None else weight.minima.contiguous()
        self._library.baton_coded_pack(
            kind,
            codes.data_ptr(),
            scales.data_ptr(),
            None if minima is None else minima.data_ptr(),
            out_features,
            in_features,
            expands,
            packed.data_ptr(),
        )
        return packed

    def _pack_int8(self, values: Tensor, scales: Tensor) -> Tensor:
        out_features, in_features = values.shape
        values = values.contiguous()
        packed = torch.empty(
            self._library.baton_int8_packed_bytes(out_features, in_features), dtype=torch.uint8
        )
        self._library.baton_int8_pack(
            self._int8_kind,
            values.data_ptr(),
            scales.data_ptr(),
            out_features,
            in_features,
            packed.data_ptr(),
        )
        return packed

    @property
    def _int8_kind(self) -> WeightKind:
        if self._quantization is Quantization.INT8_WEIGHTS:
            return WeightKind.INT8_WEIGHTS
        return WeightKind.AMX_INT8 if self._isa is Isa.AMX else WeightKind.INT8
