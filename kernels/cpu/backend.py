"""The CPU backend: C++ kernels where they compile, torch with the same promises where they do not."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kernels.coded import CodedMatrix
from kernels.cpu.build import BuildError, load_library
from kernels.cpu.core_board import CoreBoard, Seat
from kernels.cpu.fallback import TorchKernels
from kernels.cpu.native import NativeKernels
from kernels.ops import AttentionMeta, DecoderShape, DecoderWeights, FusedForward, FusedSampler
from kernels.quantization import Quantization

logger = logging.getLogger(__name__)


class CpuBackend:
    """`kernels.ops.Backend` on exactly `num_threads` CPU threads (in the fallback: on torch's).

    The first construction on a machine compiles for some seconds; `is_native` tells what came of it.
    """

    name = "cpu"

    def __init__(
        self, num_threads: int, quantization: Quantization = Quantization.NONE, seat: Seat | None = None
    ) -> None:
        """`seat`: the threads may be more while other workers rest. Without kernels it is of no use.

        Raises:
            OSError: its board cannot be opened.
        """
        if num_threads < 1:
            raise ValueError(f"`num_threads` must be at least 1: {num_threads}")
        self.device = torch.device("cpu")
        self.num_threads = num_threads
        self.quantization = quantization
        self._kernels: NativeKernels | TorchKernels
        try:
            self._kernels = NativeKernels(load_library(), num_threads, quantization, seat)
        except BuildError as error:
            logger.warning("CPU kernels are not compiled, running slower in torch: %s", error)
            self._kernels = TorchKernels(quantization)

        self.board: CoreBoard | None = None
        if seat is not None and isinstance(self._kernels, NativeKernels):
            self.board = self._kernels.open_board(seat.board)
            self.board.sit_down(seat.worker)

    @property
    def is_native(self) -> bool:
        return isinstance(self._kernels, NativeKernels)

    @property
    def packed_layout(self) -> str:
        return self._kernels.packed_layout

    def pack_linear(self, weight: Tensor) -> Tensor:
        return self._kernels.pack_linear(weight)

    @property
    def coded_layout(self) -> str:
        return self._kernels.coded_layout

    def pack_coded(self, weight: CodedMatrix, dtype: torch.dtype, expands: bool) -> Tensor | None:
        return self._kernels.pack_coded(weight, dtype, expands)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._kernels.linear(x, packed, bias)

    def linear_fp32(self, x: Tensor, packed: Tensor) -> Tensor:
        return self._kernels.linear_fp32(x, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._kernels.rotary(x, positions, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_mul(gate_up)

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
        self._kernels.write_kv(k, v, pool, layer, slot_mapping)

    def paged_attention(
        self, q: Tensor, pool: Tensor, layer: int, meta: AttentionMeta, scale: float
    ) -> Tensor:
        return self._kernels.paged_attention(q, pool, layer, meta, scale)

    def fuse(
        self, shape: DecoderShape, weights: DecoderWeights, cos: Tensor, sin: Tensor
    ) -> FusedForward | None:
        return self._kernels.fuse(shape, weights, cos, sin)

    def make_sampler(self) -> FusedSampler | None:
        return self._kernels.make_sampler()

    def make_device_sampler(self, max_rows: int, vocab_size: int) -> None:
        return None
