"""A whole forward pass by the compiled library: the model is described once, a step is one call.

1. Construction checks every weight against the shape and hands pointers to the library, which starts its
   threads. The tensors are kept here as long as the library may read them.
2. A call checks the batch's tensors; the library checks every index in them before it writes anything.
3. Results lie in buffers that grow as needed and are overwritten by the next call.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.checks import check, check_index, check_pool, check_shape
from kernels.cpu.core_board import Seat, borrow
from kernels.ops import DecoderShape, DecoderWeights, LayerWeights, StepBatch, StepResult

_FAULTS = ("", "token id", "position", "slot", "sequence", "logit row")  # `Fault` in forward.cpp


class NativeForward:
    """`kernels.ops.FusedForward`."""

    def __init__(
        self,
        library: Any,
        num_threads: int,
        shape: DecoderShape,
        weights: DecoderWeights,
        cos: Tensor,
        sin: Tensor,
        seat: Seat | None = None,
    ) -> None:
        """Raises:
        TypeError, ValueError: a tensor is not what the shape says, or not contiguous on the CPU.
        OSError: cores cannot be borrowed as `seat` says.
        RuntimeError: the threads cannot be started.
        """
        self._library, self._shape = library, shape
        self._dtype = weights.embedding.dtype
        is_bf16 = check(weights.embedding, 2, "embedding")
        self._vocab_size = weights.embedding.shape[0]
        self._max_positions = cos.shape[0]
        self._kept: list[Tensor] = []
        table = (self._max_positions, shape.head_dim // 2)
        pointers = [pointer for layer in weights.layers for pointer in self._layer(layer)]
        sizes = (
            len(weights.layers),
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self._vocab_size,
            self._max_positions,
            is_bf16,
        )
        model = library.baton_model_create(
            (ctypes.c_int64 * len(sizes))(*sizes),
            (ctypes.c_void_p * len(pointers))(*pointers),
            self._plain(weights.embedding, (self._vocab_size, shape.hidden_size), "embedding"),
            self._plain(weights.final_norm, (shape.hidden_size,), "final_norm"),
            self._packed(weights.lm_head, self._vocab_size, shape.hidden_size, "lm_head"),
            self._table(cos, table, "cos"),
            self._table(sin, table, "sin"),
            shape.rms_norm_eps,
            shape.head_dim**-0.5,
            num_threads,
        )
        if model is None:
            raise RuntimeError(f"a team of {num_threads} compute threads cannot be started")
        self._model = model
        self._layers = len(weights.layers)
        weakref.finalize(self, library.baton_model_destroy, model)
        if seat is not None:
            borrow(library, model, seat)
        self._hidden = torch.empty((0, shape.hidden_size), dtype=self._dtype)
        self._logits = torch.empty((0, self._vocab_size))
        self._best = torch.empty(0, dtype=torch.int64)
        self._bad_index = ctypes.c_int64()

    def __call__(self, batch: StepBatch, pool: Tensor) -> StepResult:
        """Raises:
        TypeError, ValueError: a tensor of the batch or the pool has another dtype or shape than it must.
        IndexError: a token, position, slot, block or logit row is out of range; nothing was written.
        """
        shape = self._shape
        num_tokens, num_seqs = batch.tokens.shape[0], batch.context_lens.shape[0]
        num_rows, max_blocks = batch.logit_rows.shape[0], batch.block_tables.shape[1]
        for name in ("tokens", "positions", "slot_mapping"):
            check_index(getattr(batch, name), (num_tokens,), torch.int64, name)
        check_index(batch.logit_rows, (num_rows,), torch.int64, "logit_rows")
        check_index(batch.query_starts, (num_seqs + 1,), torch.int32, "query_starts")
        check_index(batch.context_lens, (num_seqs,), torch.int32, "context_lens")
        check_index(batch.block_tables, (num_seqs, max_blocks), torch.int32, "block_tables")
        num_blocks, num_layers, block_size, *heads = check_pool(pool, 0, self._hidden)
        if (num_layers, *heads) != (self._layers, shape.num_kv_heads, shape.head_dim):
            raise ValueError(f"`pool` does not fit the model: {tuple(pool.shape)}")
        self._grow(num_tokens, num_rows)
        arrays = (
            batch.tokens,
            batch.positions,
            batch.slot_mapping,
            batch.logit_rows,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
        )
        arrays = tuple(array.contiguous() for array in arrays)
        fault = self._library.baton_forward(
            self._model,
            num_tokens,
            num_seqs,
            max_blocks,
            num_rows,
            *(array.data_ptr() for array in arrays),
            pool.data_ptr(),
            num_blocks,
            block_size,
            self._hidden.data_ptr(),
            self._logits.data_ptr(),
            self._best.data_ptr(),
            ctypes.addressof(self._bad_index),
        )
        if fault:
            raise IndexError(
                f"{_FAULTS[fault]} {self._bad_index.value} of the batch is out of range: "
                f"{num_tokens} tokens, "
                f"a vocabulary of {self._vocab_size}, {self._max_positions} positions, "
                f"{num_blocks} blocks of {block_size}"
            )
        return StepResult(self._hidden[:num_tokens], self._logits[:num_rows], self._best[:num_rows])

    @property
    def num_borrowed(self) -> int:
        """Pieces of work done on borrowed cores so far."""
        count: int = self._library.baton_model_num_borrowed(self._model)
        return count

    def _grow(self, num_tokens: int, num_rows: int) -> None:
        if num_tokens > self._hidden.shape[0]:
            self._hidden = torch.empty((num_tokens, self._shape.hidden_size), dtype=self._dtype)
        if num_rows > self._logits.shape[0]:
            self._logits = torch.empty((num_rows, self._vocab_size))
            self._best = torch.empty(num_rows, dtype=torch.int64)

    def _layer(self, layer: LayerWeights) -> tuple[int | None, ...]:
        """Pointers in the order of `Layer` in forward.cpp."""
        shape = self._shape
        hidden, inner, head = shape.hidden_size, shape.intermediate_size, (shape.head_dim,)
        query = shape.num_heads * shape.head_dim
        qkv = query + 2 * shape.num_kv_heads * shape.head_dim
        return (
            self._plain(layer.input_norm, (hidden,), "input_norm"),
            self._packed(layer.qkv, qkv, hidden, "qkv"),
            self._optional(layer.q_norm, head, "q_norm"),
            self._optional(layer.k_norm, head, "k_norm"),
            self._packed(layer.output, hidden, query, "output"),
            self._plain(layer.mlp_norm, (hidden,), "mlp_norm"),
            self._packed(layer.gate_up, 2 * inner, hidden, "gate_up"),
            self._packed(layer.down, hidden, inner, "down"),
            self._bias(layer.qkv_bias, qkv, "qkv_bias"),
            self._bias(layer.output_bias, hidden, "output_bias"),
            self._bias(layer.gate_up_bias, 2 * inner, "gate_up_bias"),
            self._bias(layer.down_bias, hidden, "down_bias"),
        )

    def _keep(self, tensor: Tensor) -> int:
        if not tensor.is_cpu:
            raise ValueError(f"weights must be on the CPU, not on {tensor.device}")
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        pointer: int = tensor.data_ptr()
        return pointer

    def _plain(self, tensor: Tensor, shape: tuple[int, ...], name: str) -> int:
        check_shape(tensor, shape, name)
        if tensor.dtype is not self._dtype:
            raise TypeError(f"`{name}` must be {self._dtype}: {tensor.dtype}")
        return self._keep(tensor)

    def _optional(self, tensor: Tensor | None, shape: tuple[int, ...], name: str) -> int | None:
        return None if tensor is None else self._plain(tensor, shape, name)

    def _bias(self, bias: Tensor | None, size: int, name: str) -> int | None:
        if bias is None:
            return None
        check_shape(bias, (size,), name)
        return self._keep(bias.float())

    def _table(self, tensor: Tensor, shape: tuple[int, ...], name: str) -> int:
        check_shape(tensor, shape, name)
        if tensor.dtype is not torch.float32:
            raise TypeError(f"`{name}` must be fp32: {tensor.dtype}")
        return self._keep(tensor)

    def _packed(self, packed: Tensor, out_features: int, in_features: int, name: str) -> int:
        found = self._library.baton_out_features(packed.data_ptr(), packed.nbytes, in_features)
        expected = self._library.baton_packed_bytes(out_features, in_features, self._dtype.itemsize)
        if found != out_features or packed.nbytes != expected:
            raise ValueError(
                f"`{name}` is not {out_features} by {in_features} of {self._dtype}, packed for these kernels"
            )
        return self._keep(packed)
