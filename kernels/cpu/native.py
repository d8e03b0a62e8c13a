"""The compiled kernels as operations on tensors: checks, allocation and the call, which drops the GIL.

The library trusts its pointers, so checks here guard memory: dtype, device, shape, and, in the library, every
block id, slot and position. What the contract calls contiguous is copied if it is not.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

import torch
from torch import Tensor

from kernels.coded import CodedMatrix, requested_form
from kernels.cpu.build import BuildError
from kernels.cpu.checks import check, check_index, check_pool, check_same_dtype, check_shape, rows
from kernels.cpu.core_board import CoreBoard, Seat, open_board
from kernels.cpu.isa import Isa, IsaChoice, choose_isa, cpu_has_amx, requested_isa
from kernels.cpu.native_forward import STAGES, NativeForward
from kernels.cpu.native_sampling import NativeSampler
from kernels.cpu.packing import Packing
from kernels.cpu.weight_kind import WeightKind
from kernels.ops import MAXIMA_BLOCK, PARTITION_SIZE, AttentionMeta, DecoderShape, DecoderWeights
from kernels.quantization import Quantization

logger = logging.getLogger(__name__)

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# One letter per argument: p pointer, i int64, f float, d double; then the result, - for none.
SIGNATURES = {
    "baton_panel_width": "i",
    "baton_partition_size": "i",
    "baton_packed_bytes": "iiii",
    "baton_pack": "piiip-",
    "baton_out_features": "piii",
    "baton_weight_kind": "pi",
    "baton_amx_acquire": "i",
    "baton_amx_packed_bytes": "iii",
    "baton_amx_pack": "piip-",
    "baton_dot_is_there": "i",
    "baton_dot_packed_bytes": "iii",
    "baton_dot_pack": "piip-",
    "baton_coded_packed_bytes": "iiiii",
    "baton_coded_pack": "ipppiiip-",
    "baton_linear": "piippipii-",
    "baton_int8_panel_width": "i",
    "baton_int8_packed_bytes": "iii",
    "baton_int8_pack": "ippiip-",
    "baton_rms_norm": "ppfiipii-",
    "baton_rotary": "pipppiiiipiii",
    "baton_silu_mul": "piipii-",
    "baton_write_kv": "ppiipipiiiiiiiiii",
    "baton_paged_attention": "pipiiiiiipppiiiifpiiiii",
    "baton_model_create": "pppppppffip",
    "baton_model_borrow": "ppipppi",
    "baton_model_num_borrowed": "pi",
    "baton_model_destroy": "p-",
    "baton_num_stages": "i",
    "baton_model_profile": "pp-",
    "baton_forward": "pppi",
    "baton_board_open": "pp",
    "baton_board_close": "p-",
    "baton_board_bytes": "i",
    "baton_board_sit_down": "pii",
    "baton_board_work": "p-",
    "baton_board_rest": "p-",
    "baton_board_is_busy": "pii",
    "baton_board_is_idle": "pii",
    "baton_board_bury": "pi-",
    "baton_board_claim": "pii",
    "baton_board_release": "pi-",
    "baton_lifeline_hold": "ip",
    "baton_lifeline_release": "p-",
    "baton_probe_multiply_adds": "iid",
    "baton_probe_fp32_multiply_adds": "iid",
    "baton_probe_byte_multiply_adds": "iid",
    "baton_probe_tile_multiply_adds": "iiid",
    "baton_probe_read": "piid",
    "baton_maxima_block": "i",
    "baton_sampler_create": "ip",
    "baton_sampler_destroy": "p-",
    "baton_sampler_largest_vocabulary": "i",
    "baton_sample": "ppi",
    "baton_step_on": "pi",
}
_TYPES = {"p": _POINTER, "i": _INT, "f": _FLOAT, "d": ctypes.c_double, "-": None}


def bind(library: ctypes.CDLL) -> Any:
    """The library with its functions' types set.

    Raises:
        BuildError: it lacks a function, or was made for other partitions.
    """
    try:
        for name, letters in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_TYPES[letter] for letter in letters[:-1]]
            function.restype = _TYPES[letters[-1]]
    except AttributeError as error:
        raise BuildError(f"the compiled kernels lack a function: {error}") from error
    if library.baton_partition_size() != PARTITION_SIZE:
        raise BuildError(f"the compiled kernels use partitions of {library.baton_partition_size()} keys")
    if library.baton_num_stages() != len(STAGES):
        raise BuildError(f"the compiled kernels have {library.baton_num_stages()} stages in a step")
    if library.baton_maxima_block() != MAXIMA_BLOCK:
        raise BuildError(f"the compiled kernels use blocks of {library.baton_maxima_block()} logits")
    return library


def isa_of(library: Any) -> IsaChoice:
    """What the products of a bound library use in this process, as the user set it; asks for the matrix unit.

    Raises:
        IsaError: the user asks for instructions not to be had.
    """
    return choose_isa(
        requested_isa(os.environ),
        library.baton_amx_acquire,
        cpu_has_amx,
        lambda: bool(library.baton_dot_is_there()),
    )


class NativeKernels:
    """The operations of `kernels.ops` by the compiled library, on `num_threads` threads.

    Weights of bf16, and of int8 whose rows are quantized too, are packed for the matrix unit where
    `choose_isa` says so, those of bf16 for products of pairs; all else is SIMD.
    """

    def __init__(
        self, library: ctypes.CDLL, num_threads: int, quantization: Quantization, seat: Seat | None = None
    ) -> None:
        """`seat`: where fused passes may borrow cores beyond `num_threads`.

        Raises:
            BuildError: see `bind`.
            IsaError, CodedFormError: the user asks for instructions, or a form of weights, not to be had.
        """
        self._num_threads, self._seat = num_threads, seat
        self._library = bind(library)
        choice = isa_of(self._library)
        self._packing = Packing(self._library, choice.isa, quantization, requested_form(os.environ))
        self._by_tiles = choice.isa is Isa.AMX  # attention of bf16 models
        if choice.is_lost:
            logger.warning("products use %s, several times slower: %s", choice.isa.value, choice.reason)
        elif choice.isa is not Isa.SIMD:
            logger.info("products use %s", choice.reason)

    @property
    def packed_layout(self) -> str:
        return self._packing.layout

    @property
    def coded_layout(self) -> str:
        return self._packing.coded_layout

    def pack_linear(self, weight: Tensor) -> Tensor:
        check(weight, 2, "weight")
        return self._packing.pack_linear(weight)

    def pack_coded(self, weight: CodedMatrix, dtype: torch.dtype, expands: bool) -> Tensor | None:
        return self._packing.pack_coded(weight, dtype, expands)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._linear(x, packed, bias, x.dtype)

    def linear_fp32(self, x: Tensor, packed: Tensor) -> Tensor:
        return self._linear(x, packed, None, torch.float32)

    def _linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        is_bf16 = check(x, 2, "x")
        x = x.contiguous()
        num_tokens, in_features = x.shape
        packed_pointer = packed.data_ptr()
        out_features = self._library.baton_out_features(packed_pointer, packed.nbytes, in_features)
        if out_features < 0:
            raise ValueError(
                f"not a weight packed as {self.packed_layout} for {in_features} input features: "
                f"{tuple(packed.shape)} {packed.dtype}"
            )
        kind = WeightKind(self._library.baton_weight_kind(packed_pointer))
        if not is_bf16 and kind.reads_bf16:
            raise TypeError("`x` must be bf16 for a bf16 weight: its product would round it")
        out = torch.empty((num_tokens, out_features), dtype=dtype)
        bias_pointer, bias_bf16 = None, False
        if bias is not None:
            bias_bf16 = check(bias, 1, "bias")
            check_shape(bias, (out_features,), "bias")
            bias = bias.contiguous()
            bias_pointer = bias.data_ptr()
        self._library.baton_linear(
            x.data_ptr(),
            is_bf16,
            num_tokens,
            packed_pointer,
            bias_pointer,
            bias_bf16,
            out.data_ptr(),
            dtype is torch.bfloat16,
            self._num_threads,
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        is_bf16 = check(x, None, "x")
        check_same_dtype(weight, x, "weight")
        x, weight = x.contiguous(), weight.contiguous()
        size = x.shape[-1]
        check_shape(weight, (size,), "weight")
        out = torch.empty_like(x)
        self._library.baton_rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            eps,
            x.numel() // size,
            size,
            out.data_ptr(),
            is_bf16,
            self._num_threads,
        )
        return out

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        is_bf16 = check(x, 3, "x")
        x = rows(x)
        num_tokens, num_heads, head_dim = x.shape
        check_index(positions, (num_tokens,), torch.int64, "positions")
        if cos.dtype is not torch.float32 or sin.dtype is not torch.float32 or cos.shape != sin.shape:
            raise TypeError(f"cos and sin must be fp32 of one shape: {cos.dtype} {sin.dtype}")
        check_shape(cos, (cos.shape[0], head_dim // 2), "cos")
        cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        bad = self._library.baton_rotary(
            x.data_ptr(),
            x.stride(0),
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[0],
            num_tokens,
            num_heads,
            head_dim,
            out.data_ptr(),
            is_bf16,
            self._num_threads,
        )
        if bad >= 0:
            raise IndexError(f"position outside the rotary table of {cos.shape[0]}: {positions[bad]}")
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        is_bf16 = check(gate_up, 2, "gate_up")
        gate_up = gate_up.contiguous()
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        check_shape(gate_up, (num_tokens, 2 * size), "gate_up")
        out = torch.empty((num_tokens, size), dtype=gate_up.dtype)
        self._library.baton_silu_mul(
            gate_up.data_ptr(), num_tokens, size, out.data_ptr(), is_bf16, self._num_threads
        )
        return out

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
        is_bf16 = check(k, 3, "k")
        num_blocks, num_layers, block_size, num_kv_heads, head_dim = check_pool(pool, layer, k)
        shape = (k.shape[0], num_kv_heads, head_dim)
        check_shape(k, shape, "k")
        check_shape(v, shape, "v")
        check_same_dtype(v, k, "v")
        check_index(slot_mapping, shape[:1], torch.int64, "slot_mapping")
        k, v, slot_mapping = rows(k), rows(v), slot_mapping.contiguous()
        bad = self._library.baton_write_kv(
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            v.stride(0),
            pool.data_ptr(),
            layer,
            slot_mapping.data_ptr(),
            k.shape[0],
            num_blocks,
            num_layers,
            block_size,
            num_kv_heads,
            head_dim,
            is_bf16,
            pool.dtype is torch.int8,
            self._num_threads,
        )
        if bad >= 0:
            raise IndexError(f"slot outside the pool of {num_blocks * block_size}: {slot_mapping[bad]}")

    def paged_attention(
        self, q: Tensor, pool: Tensor, layer: int, meta: AttentionMeta, scale: float
    ) -> Tensor:
        is_bf16 = check(q, 3, "q")
        num_blocks, num_layers, block_size, num_kv_heads, head_dim = check_pool(pool, layer, q)
        num_tokens, num_heads = q.shape[:2]
        check_shape(q, (num_tokens, num_heads // num_kv_heads * num_kv_heads, head_dim), "q")
        q = rows(q)
        num_seqs, max_blocks = meta.block_tables.shape
        check_index(meta.query_starts, (num_seqs + 1,), torch.int32, "query_starts")
        check_index(meta.context_lens, (num_seqs,), torch.int32, "context_lens")
        check_index(meta.block_tables, (num_seqs, max_blocks), torch.int32, "block_tables")
        query_starts, context_lens = meta.query_starts.contiguous(), meta.context_lens.contiguous()
        block_tables = meta.block_tables.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        bad = self._library.baton_paged_attention(
            q.data_ptr(),
            q.stride(0),
            pool.data_ptr(),
            num_blocks,
            num_layers,
            block_size,
            num_kv_heads,
            head_dim,
            layer,
            query_starts.data_ptr(),
            context_lens.data_ptr(),
            block_tables.data_ptr(),
            max_blocks,
            num_seqs,
            num_tokens,
            num_heads,
            scale,
            out.data_ptr(),
            is_bf16,
            pool.dtype is torch.int8,
            self._by_tiles,
            self._num_threads,
        )
        if bad >= 0:
            raise IndexError(
                f"sequence {bad} does not fit its queries, block table and pool: "
                f"query starts {query_starts[bad : bad + 2].tolist()} of {num_tokens}, "
                f"context {context_lens[bad]}, blocks {block_tables[bad].tolist()} of {num_blocks}"
            )
        return out

    def fuse(self, shape: DecoderShape, weights: DecoderWeights, cos: Tensor, sin: Tensor) -> NativeForward:
        return NativeForward(
            self._library, self._num_threads, shape, weights, cos, sin, self._seat, self._by_tiles
        )

    def make_sampler(self) -> NativeSampler:
        return NativeSampler(self._library, self._num_threads)

    def open_board(self, path: str) -> CoreBoard:
        return open_board(self._library, path)
