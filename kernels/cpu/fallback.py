"""What runs where the C++ kernels cannot be compiled: the reference, with weights widened once.

Its linears run in tiles of a fixed number of rows, so one row costs as much as a tile: slow, same promises.
"""

from __future__ import annotations

from torch import Tensor

from kernels.quantization import Quantization
from kernels.reference import ReferenceBackend


class TorchKernels(ReferenceBackend):
    """`ReferenceBackend` on the CPU whose weights, where not quantized, are fp32 from packing on: twice the
    memory of bf16, no conversion in each call."""

    name = "cpu"

    def __init__(self, quantization: Quantization = Quantization.NONE) -> None:
        super().__init__("cpu", quantization)

    @property
    def packed_layout(self) -> str:
        return "rows_fp32" if self.quantization is Quantization.NONE else super().packed_layout

    def pack_linear(self, weight: Tensor) -> Tensor:
        packed = super().pack_linear(weight)
        return packed.float() if self.quantization is Quantization.NONE else packed
