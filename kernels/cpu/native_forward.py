"""A whole forward pass by the compiled library: the model is described once, a step is one call.

1. Construction checks every weight against the shape and hands pointers to the library, which starts its
   threads. The tensors are kept here as long as the library may read them.
2. A call checks the batch's tensors, unless it has met this very batch before; the library checks every index
   in them before it writes anything.
3. Results lie in buffers that grow as needed and are overwritten by the next call.
"""

from __future__ import annotations

import ctypes
import weakref
from operator import is_
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kernels.cpu.checks import check, check_index, check_pool, check_shape
from kernels.cpu.core_board import Seat, borrow
from kernels.cpu.native_sampling import NativeSampler
from kernels.cpu.native_steps import NativeSteps
from kernels.cpu.weight_kind import WeightKind
from kernels.ops import (
    MAXIMA_BLOCK,
    DecoderShape,
    DecoderWeights,
    FusedSampler,
    LayerWeights,
    StepBatch,
    StepResult,
)

STAGES = (  # `StepStage` in stopwatch.h
    "embedding",
    "norms",
    "qkv",
    "heads and KV write",
    "attention",
    "output",
    "gate and up",
    "silu",
    "down",
    "logits",
    "largest logit",
)
_FAULTS = (
    "",
    "token id",
    "position",
    "slot",
    "sequence",
    "logit row",
    "order of logit row",
    "largest logit",
)  # `Fault` in forward_model.h

_MOST_KNOWN = 64  # batches that are remembered


class Computed(NamedTuple):
    """A batch that was checked, and what a call with it needs; what is in its tensors may change."""

    batch: StepBatch
    keep_hidden: bool
    fields: Any  # `Batch` in forward_model.h
    result: StepResult
    copies: list[Tensor]  # which the fields are of where a tensor is not contiguous: good for one call


class NativeForward:
    """`kernels.ops.FusedForward`."""

    needs_no_mode: Final = True

    def __init__(
        self,
        library: Any,
        num_threads: int,
        shape: DecoderShape,
        weights: DecoderWeights,
        cos: Tensor,
        sin: Tensor,
        seat: Seat | None = None,
        by_tiles: bool = False,
    ) -> None:
        """`by_tiles`: attention of bf16 models uses the matrix unit.

        Raises:
        TypeError, ValueError: a tensor is not what the shape says, or not contiguous on the CPU.
        OSError: cores cannot be borrowed as `seat` says.
        RuntimeError: the threads cannot be started.
        """
        self._library, self._shape, self._num_threads = library, shape, num_threads
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
            by_tiles,
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
        self.has_guests, self.num_borrowed = seat is not None, 0
        if seat is not None:
            borrow(library, model, seat)
        self._hidden = torch.empty((0, shape.hidden_size), dtype=self._dtype)
        self._logits = torch.empty((0, self._vocab_size))
        self._best = torch.empty(0, dtype=torch.int64)
        self._maxima = torch.empty((0, -(-self._vocab_size // MAXIMA_BLOCK)))
        self._bad_index = ctypes.c_int64()
        self._bad_index_address = ctypes.addressof(self._bad_index)
        self._known: dict[int, Computed] = {}  # by the id of the batch, which the entry keeps alive
        self._batch: StepBatch | None = None  # that the address and the result are for; None: look
        self._pool: Tensor | None = None  # with these
        self._keeps_hidden = True
        self._now: Computed | None = None  # what was computed last ...
        self._address = 0  # ... and its fields
        self._result = StepResult(self._hidden, self._logits, self._best, self._maxima)

    def __call__(self, batch: StepBatch, pool: Tensor, keep_hidden: bool = True) -> StepResult:
        """Raises:
        TypeError, ValueError: a tensor of the batch or the pool has another dtype or shape than it must.
        IndexError: a token, position, slot, block or logit row is out of range, or logit rows do not ascend
        and hidden states are not kept; nothing was written.
        """
        if batch is not self._batch or pool is not self._pool or keep_hidden is not self._keeps_hidden:
            self._meet(batch, pool, keep_hidden)
        fault = self._library.baton_forward(self._model, self._address, self._bad_index_address)
        if self.has_guests:
            self.look_at_guests()
        if fault:
            assert self._now is not None
            raise self.fault(fault, self._bad_index.value, self._now)
        return self._result

    def look_at_guests(self) -> None:
        self.num_borrowed = self._library.baton_model_num_borrowed(self._model)

    @property
    def computed(self) -> Computed | None:
        """What was computed last. None: of tensors that were copied."""
        return None if self._batch is None else self._now

    def fault(self, kind: int, index: int, of: Computed) -> IndexError:
        """What the library refused in a batch that was to be computed."""
        num_tokens, num_blocks, block_size = [of.fields[field] for field in (0, 12, 13)]
        return IndexError(
            f"{_FAULTS[kind]} {index} of the batch is out of range: {num_tokens} tokens, "
            f"a vocabulary of {self._vocab_size}, {self._max_positions} positions, "
            f"{num_blocks} blocks of {block_size}"
        )

    def steps_with(self, sampler: FusedSampler) -> NativeSteps | None:
        if not isinstance(sampler, NativeSampler):
            return None
        return NativeSteps(self._library, self._model, self, sampler)

    def _meet(self, batch: StepBatch, pool: Tensor, keep_hidden: bool) -> None:
        """A batch is only read once it is made, so one that is known needs no look."""
        self._batch = None
        if pool is not self._pool:
            self._known.clear()
            self._pool = pool
        known = self._known.get(id(batch))
        if known is None or known.keep_hidden is not keep_hidden:
            known = self._look_over(batch, pool, keep_hidden)
        self._now, self._address, self._result = known, ctypes.addressof(known.fields), known.result
        if not known.copies:
            self._batch, self._keeps_hidden = batch, keep_hidden

    def _look_over(self, batch: StepBatch, pool: Tensor, keep_hidden: bool) -> Computed:
        """Check the tensors of a step and write the fields. A step with the same batch, whatever is in its
        tensors, needs no more."""
        arrays = (
            batch.tokens,
            batch.positions,
            batch.slot_mapping,
            batch.logit_rows,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
        )
        shape = self._shape
        tokens, positions, slots, logit_rows, query_starts, context_lens, block_tables = arrays
        num_tokens, num_seqs = tokens.shape[0], context_lens.shape[0]
        num_rows, max_blocks = logit_rows.shape[0], block_tables.shape[1]
        for name, array in (("tokens", tokens), ("positions", positions), ("slot_mapping", slots)):
            check_index(array, (num_tokens,), torch.int64, name)
        check_index(logit_rows, (num_rows,), torch.int64, "logit_rows")
        check_index(query_starts, (num_seqs + 1,), torch.int32, "query_starts")
        check_index(context_lens, (num_seqs,), torch.int32, "context_lens")
        check_index(block_tables, (num_seqs, max_blocks), torch.int32, "block_tables")
        num_blocks, num_layers, block_size, *heads = check_pool(pool, 0, self._hidden)
        if (num_layers, *heads) != (self._layers, shape.num_kv_heads, shape.head_dim):
            raise ValueError(f"`pool` does not fit the model: {tuple(pool.shape)}")
        self._grow(num_tokens, num_rows)
        kept = [array.contiguous() for array in arrays]
        fields = (ctypes.c_int64 * 20)(
            num_tokens,
            num_seqs,
            max_blocks,
            num_rows,
            *[array.data_ptr() for array in kept],
            pool.data_ptr(),
            num_blocks,
            block_size,
            pool.dtype is torch.int8,
            keep_hidden,
            self._hidden.data_ptr(),
            self._logits.data_ptr(),
            self._best.data_ptr(),
            self._maxima.data_ptr(),
        )
        result = StepResult(
            self._hidden[: num_tokens if keep_hidden else 0],
            self._logits[:num_rows],
            self._best[:num_rows],
            self._maxima[:num_rows],
        )
        copies = [] if all(map(is_, kept, arrays)) else kept
        known = Computed(batch, keep_hidden, fields, result, copies)
        if not copies:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[id(batch)] = known
        return known

    def start_profile(self) -> Tensor:
        """Seconds [num_threads, len(STAGES), 2] that later steps add to: work, and waits at a stage's end. A
        thread that only helps in a step adds nothing to it."""
        self._profile = torch.zeros(self._num_threads, len(STAGES), 2, dtype=torch.float64)
        self._library.baton_model_profile(self._model, self._profile.data_ptr())
        return self._profile

    def stop_profile(self) -> None:
        self._library.baton_model_profile(self._model, None)

    def _grow(self, num_tokens: int, num_rows: int) -> None:
        if num_tokens > self._hidden.shape[0] or num_rows > self._logits.shape[0]:
            self._known.clear()
        if num_tokens > self._hidden.shape[0]:
            self._hidden = torch.empty((num_tokens, self._shape.hidden_size), dtype=self._dtype)
        if num_rows > self._logits.shape[0]:
            self._logits = torch.empty((num_rows, self._vocab_size))
            self._best = torch.empty(num_rows, dtype=torch.int64)
            self._maxima = torch.empty((num_rows, self._maxima.shape[1]))

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
        fits = found == out_features
        kind = WeightKind(self._library.baton_weight_kind(packed.data_ptr())) if fits else None
        if kind is WeightKind.FLOAT:
            plain_bytes = self._library.baton_packed_bytes(out_features, in_features, self._dtype.itemsize)
            fits = packed.nbytes == plain_bytes
        elif kind is not None and kind.reads_bf16:
            fits = self._dtype is torch.bfloat16
        if not fits:
            raise ValueError(
                f"`{name}` is not {out_features} by {in_features} of {self._dtype} or int8, "
                "packed for these kernels"
            )
        return self._keep(packed)
