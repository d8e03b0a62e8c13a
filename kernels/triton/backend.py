"""`kernels.ops.Backend` on a GPU. Importing this needs triton: ask `kernels.triton.availability` first.

An operation goes to its kernel if the kernel takes the shapes and dtypes, otherwise to the reference on the
same device, with one log line. Bits may differ between the two, never between two calls of the same kind: the
choice follows from shapes and dtypes that a model has, not from the batch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional

from kernels.coded import CodedMatrix
from kernels.ops import AttentionMeta, DecoderShape, DecoderWeights, DeviceSampler, FusedForward, FusedSampler
from kernels.quantization import Quantization
from kernels.reference import ReferenceBackend
from kernels.triton import attention, gemm, rowwise
from kernels.triton.availability import interpreting, why_unavailable
from kernels.triton.checks import MOST_COLUMNS, MOST_HEAD_DIM, check_device, check_pool, why_not_dtype
from kernels.triton.device_sampler import TritonDeviceSampler
from kernels.triton.fallback import Fallbacks
from kernels.triton.forward import TritonForward
from kernels.triton.sampler import TritonSampler
from kernels.triton.selection import MAX_VOCABULARY
from kernels.triton.tiles import INTERPRETER, Mode, Tiles, tiles_for


class TritonBackend:
    """Kernels on one CUDA device, which becomes the process's current one; in Triton's interpreter, on the
    CPU.

    Weights stay rows as published, so a tied head is the embedding's own memory.
    """

    name = "triton"

    def __init__(
        self, mode: Mode = Mode.EXACT, device: torch.device | str | None = None, tiles: Tiles | None = None
    ) -> None:
        """`tiles` None: those of the device's kind.

        Raises:
            RuntimeError: Triton kernels do not run here; says why in one line.
        """
        if reason := why_unavailable():
            raise RuntimeError(reason)
        self.mode = mode
        self.quantization = Quantization.NONE
        self.device = torch.device(device or ("cpu" if interpreting() else "cuda"))
        if self.device.type == "cuda":
            index = self.device.index  # torch's own calls refuse a device without one
            self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
            torch.cuda.set_device(self.device)
            self.tiles = tiles or tiles_for(torch.cuda.get_device_capability(self.device))
        else:
            self.tiles = tiles or INTERPRETER
        self.fallbacks = Fallbacks()
        self._reference = ReferenceBackend(self.device)

    @property
    def packed_layout(self) -> str:
        """Rows as published; the name tells what else decides bits, so that workers whose bits could differ
        have different fingerprints."""
        return f"rows-triton{triton.__version__}-{self.mode.value}-{self.tiles.name}"

    def pack_linear(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    @property
    def coded_layout(self) -> str:
        return ""

    def pack_coded(self, weight: CodedMatrix, dtype: torch.dtype, expands: bool) -> None:
        return None

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        check_device(self.device, x=x, weight=packed)
        if self.mode is Mode.FAST:
            return functional.linear(x, packed, bias if bias is None else bias.to(x.dtype))
        return self.fallbacks.run(
            "linear",
            why_not_dtype(x, packed),
            lambda: gemm.linear(x, packed, bias, x.dtype, self.tiles.gemm_for(x.element_size())),
            lambda: self._reference.linear(x, packed, bias),
        )

    def linear_fp32(self, x: Tensor, packed: Tensor) -> Tensor:
        check_device(self.device, x=x, weight=packed)
        if self.mode is Mode.FAST:
            if x.is_cuda and x.dtype is not torch.float32:
                return torch.mm(x, packed.t(), out_dtype=torch.float32)
            return functional.linear(x.float(), packed.float())
        return self.fallbacks.run(
            "linear_fp32",
            why_not_dtype(x, packed),
            lambda: gemm.linear(x, packed, None, torch.float32, self.tiles.gemm_for(x.element_size())),
            lambda: self._reference.linear_fp32(x, packed),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        check_device(self.device, x=x, weight=weight)
        why_not = why_not_dtype(x, weight)
        if x.shape[-1] > MOST_COLUMNS:
            why_not = f"rows of {x.shape[-1]}, of at most {MOST_COLUMNS}"
        return self.fallbacks.run(
            "rms_norm",
            why_not,
            lambda: rowwise.rms_norm(x, weight, eps),
            lambda: self._reference.rms_norm(x, weight, eps),
        )

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        check_device(self.device, x=x, positions=positions, cos=cos, sin=sin)
        return self.fallbacks.run(
            "rotary",
            why_not_dtype(x) or _why_not_head(x.shape[2]),
            lambda: rowwise.rotary(x, positions, cos, sin),
            lambda: self._reference.rotary(x, positions, cos, sin),
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        check_device(self.device, gate_up=gate_up)
        return self.fallbacks.run(
            "silu_mul",
            why_not_dtype(gate_up),
            lambda: rowwise.silu_mul(gate_up),
            lambda: self._reference.silu_mul(gate_up),
        )

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
        check_device(self.device, k=k, v=v, pool=pool, slot_mapping=slot_mapping)
        check_pool(pool, layer)
        self.fallbacks.run(
            "write_kv",
            why_not_dtype(k, v, pool) or _why_not_head(k.shape[2]),
            lambda: rowwise.write_kv(k, v, pool, layer, slot_mapping),
            lambda: self._reference.write_kv(k, v, pool, layer, slot_mapping),
        )

    def paged_attention(
        self, q: Tensor, pool: Tensor, layer: int, meta: AttentionMeta, scale: float
    ) -> Tensor:
        check_device(self.device, q=q, pool=pool, block_tables=meta.block_tables)
        check_pool(pool, layer)
        return self.fallbacks.run(
            "paged_attention",
            why_not_dtype(q, pool)
            or attention.why_not_attention(q, pool, self.tiles, self.mode, MOST_HEAD_DIM),
            lambda: attention.paged_attention(q, pool, layer, meta, scale, self.tiles, self.mode),
            lambda: self._reference.paged_attention(q, pool, layer, meta, scale),
        )

    def fuse(
        self, shape: DecoderShape, weights: DecoderWeights, cos: Tensor, sin: Tensor
    ) -> FusedForward | None:
        return TritonForward(self, self.tiles, self.mode, self.fallbacks, shape, weights, cos, sin)

    def make_sampler(self) -> FusedSampler | None:
        return TritonSampler(self.device)

    def make_device_sampler(self, max_rows: int, vocab_size: int) -> DeviceSampler | None:
        if vocab_size > MAX_VOCABULARY:
            return None
        return TritonDeviceSampler(self.device, max_rows, vocab_size)


def _why_not_head(head_dim: int) -> str | None:
    return f"head_dim {head_dim}, of at most {MOST_HEAD_DIM}" if head_dim > MOST_HEAD_DIM else None
