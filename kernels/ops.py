"""The operations a model is made of: meaning, shapes, dtypes. Backends implement them, tests hold them to it.

Every backend keeps two promises:

- **Row invariance.** The bits of an output row depend on that row's inputs only, not on how many rows
  are computed together, where the row stands, how many threads run, or how a prompt was chunked.
- **Fixed KV partitions.** Attention reduces keys in partitions of `PARTITION_SIZE` positions, counted
  from position 0, and combines the partitions in order, whatever the query length or block size.

Activations are `[num_tokens, ...]`, contiguous, of the model's dtype (fp32 or bf16); sums are carried
in fp32.

Keys and values live in a pool `[num_blocks, num_layers, 2, block_size, kv_heads, row_size]`, K before V. A
row holds one token's `head_dim` elements of one head: of the model's dtype, or in int8, quantized from these
elements alone: scale = max(absmax / 127, 2^-126), value = x / scale rounded to even, with the scale in the
row's last `KV_SCALE_BYTES`. A row with an element that is not finite gets the scale NaN and zeros, so what is
broken shows. The scale is fp32, so that any finite key has one, as near as 24 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NewType, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.coded import CodedMatrix
from kernels.draw_kind import DrawKind
from kernels.quantization import Quantization

PARTITION_SIZE = 128  # key positions reduced at a time; a multiple of every supported block size

NUMERICS = 4  # of all backends: another number wherever a change gives results other bits

KV_SCALE_BYTES = 4  # fp32, behind the values of each row of an int8 pool
MAXIMA_BLOCK = 64  # logits of a row, one after another, that `StepResult.maxima` has one number for

PackedWeight = NewType("PackedWeight", object)  # opaque to the model; made by `pack_linear` only


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements a pool of `dtype` keeps of one token and head: `head_dim`, in int8 a scale's bytes too."""
    return head_dim + KV_SCALE_BYTES if dtype is torch.int8 else head_dim


def pool_head_dim(pool: Tensor) -> int:
    """`head_dim` of the model whose keys and values `pool` [..., row_size] keeps."""
    size: int = pool.shape[-1]
    return size - KV_SCALE_BYTES if pool.dtype is torch.int8 else size


class AttentionMeta(Protocol):
    """Shape of a packed batch as attention sees it; all tensors int32 on the compute device."""

    query_starts: Tensor  # [num_seqs + 1], prefix sum of query lengths
    context_lens: Tensor  # [num_seqs], keys visible to the last query of each sequence
    block_tables: Tensor  # [num_seqs, max_blocks]
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset


class StepBatch(AttentionMeta, Protocol):
    """A packed batch, as a whole forward pass sees it; int64."""

    tokens: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    logit_rows: Tensor  # [num_logit_rows], rows of the batch


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """`qkv` stacks the rows of q, k and v; `gate_up` those of gate and up. Matrices are packed by the
    backend."""

    input_norm: Tensor
    qkv: Any
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Any
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Any
    gate_up_bias: Tensor | None
    down: Any
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [vocab_size, hidden_size], plain rows
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    lm_head: Any  # packed; of the embedding's values where embeddings are tied


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers of a decoder of pre-normed layers: attention with rotary positions, gated MLP."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


@dataclass(slots=True)
class StepResult:
    """Tensors of a forward pass, which are overwritten by the next one; they are never others."""

    hidden: Tensor  # [num_tokens, hidden_size] after the last layer, before the final norm; empty if not kept
    logits: Tensor  # fp32 [num_logit_rows, vocab_size]
    best: Tensor  # int64 [num_logit_rows]: the first largest logit of a row, or its first NaN
    maxima: Tensor | None = None  # fp32 [num_logit_rows, blocks]: the largest logit of each `MAXIMA_BLOCK`
    notes: Any = None  # of the sampler, which has checked them


class FusedForward(Protocol):
    """A forward pass in one call; writes the batch's keys and values to the pool. One thread at a time."""

    @property
    def num_borrowed(self) -> int:
        """Pieces of work done so far on cores that belong to other workers, which rested."""
        ...

    @property
    def needs_no_mode(self) -> bool:
        """Whether it is the same outside torch's inference mode, asking nothing of torch."""
        ...

    def __call__(self, batch: StepBatch, pool: Tensor, keep_hidden: bool = True) -> StepResult:
        """Rows that ask for no logits end with the last layer's keys and values, unless `keep_hidden`."""
        ...

    def steps_with(self, sampler: FusedSampler) -> FusedSteps | None:
        """Steps that follow those which this and `sampler` have computed; None where there are no such."""
        ...


class SamplingParameters(Protocol):
    """How a request wants its tokens chosen; they never change. What they mean is the engine's to say."""

    @property
    def seed(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Sequence[tuple[int, float]]: ...
    @property
    def allowed_token_ids(self) -> Sequence[int]: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def bad_words_ids(self) -> Sequence[Sequence[int]]: ...
    @property
    def num_logprobs(self) -> int | None: ...


class SamplingRequest(Protocol):
    """A request that is due a token; of `output_ids` only the end changes, by growing."""

    @property
    def params(self) -> SamplingParameters: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def output_ids(self) -> Sequence[int]: ...


class TokenDetail(NamedTuple):
    """Log-probabilities that a row asked for."""

    row: int
    logprob: float  # of its token
    top_logprobs: tuple[tuple[int, float], ...]  # (token id, log-probability), best first


# A token per row; details of the rows that asked, in order; rows with a NaN or +infinity among their logits.
ChosenTokens = tuple[list[int], list[TokenDetail], int]


Positions = Sequence[int] | NDArray[np.int64]


class FusedSampler(Protocol):
    """Chooses the tokens of all rows in one call. One thread at a time."""

    largest_vocabulary: int  # it refuses larger ones

    def __call__(
        self, result: StepResult, requests: Sequence[SamplingRequest], positions: Positions
    ) -> ChosenTokens:
        """For each row of logits its request, and the position in its sequence of the token to choose. What
        is in `requests` does not change but in their answers: the same list is not looked over twice. An
        array of positions may be the one of the call before, with other numbers in it."""
        ...


class FusedSteps(Protocol):
    """The step after a step in one call: every row brings the token that it has just got, and samples again.
    One thread at a time."""

    def may_follow(self) -> bool:
        """Whether a step may follow the one that the forward pass and the sampler have just computed: each of
        its rows was a token of a sequence of its own, chosen by logits and position alone."""
        ...

    def __call__(self) -> tuple[list[int], int]:
        """The tokens of the next step, as `ChosenTokens` without details. It moves the batch on in its own
        memory, positions included. Since it may follow, that memory is as it was, and the sampler has
        chosen nothing else; other batches may have been computed. The batch's block tables have room."""
        ...


class DeviceSampler(Protocol):
    """Chooses tokens where the logits are, for rows that ask for nothing but temperature, top-k, top-p and
    min-p. One thread at a time."""

    def set_rules(self, rules: Sequence[SamplingParameters]) -> None:
        """What row i of the next steps wants, from the first row on. Not while a step is under way."""
        ...

    def choose(self, logits: Tensor, best: Tensor, positions: Tensor, kind: DrawKind, chosen: Tensor) -> None:
        """logits fp32 [num_rows, vocab], best as in `StepResult`, positions int64 [num_rows] of the tokens
        to choose → chosen int64 [2, num_rows]: the ids, as a `FusedSampler` would choose them, and 1 where
        it has to be asked after all, since a row's largest logit is not a finite number (the id is 0 then).

        Nothing is asked of the host, so a captured graph can hold it. `kind`: at least that of the rules.
        """
        ...


class Backend(Protocol):
    """One implementation of all operations on one device, made for one quantization of the matrices."""

    name: str
    device: torch.device
    quantization: Quantization  # of the weights that `pack_linear` makes

    def pack_linear(self, weight: Tensor) -> Any:
        """weight [out, in] → whatever `linear` wants. Done once per weight; may return a tensor that is
        saved to and mapped from the weight cache (see `packed_layout`)."""
        ...

    @property
    def coded_layout(self) -> str:
        """What `packed_layout` goes on with where matrices may be packed as codes, as `pack_coded` does;
        empty if this backend never does."""
        ...

    def pack_coded(self, weight: CodedMatrix, dtype: torch.dtype, expands: bool) -> Tensor | None:
        """As `pack_linear(weight.decode().to(dtype))`, results bit for bit the same, but kept as codes, and
        if it `expands` decoded beside them, where `CodedForm` allows; None if this backend has no such
        form, or not of this matrix."""
        ...

    @property
    def packed_layout(self) -> str:
        """Names the format `pack_linear` returns, quantization included, e.g. "rows", "quads16-int8": part
        of the cache key."""
        ...

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None = None) -> Tensor:
        """y[m, n] = Σ_k x[m, k]·w[n, k] + b[n]. x [num_tokens, in] → [num_tokens, out], x's dtype.

        With int8 weights (see `kernels.quantization`), rounded once to x's dtype where two types meet:
        `INT8`: q, s = quantize_rows(x); y = fp32(Σ_k q[m, k]·p[n, k]) · (s[m]·scale[n]) + b[n].
        `INT8_WEIGHTS`: y = (Σ_k x[m, k]·p[n, k]) · scale[n] + b[n].
        """
        ...

    def linear_fp32(self, x: Tensor, packed: Any) -> Tensor:
        """As `linear` without bias, result in fp32: the logits."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """y = x · rsqrt(mean(x²) + eps) · w over the last dimension (Zhang & Sennrich 2019).
        The square, mean and product in fp32; rounded once to x's dtype before the multiply by w, as
        the published models do."""
        ...

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate halves (GPT-NeoX order; Su et al. 2021). x [num_tokens, heads, head_dim], positions
        [num_tokens] int64, cos/sin [max_positions, head_dim // 2] fp32."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[num_tokens, 2·n] → silu(first half)·second half, [num_tokens, n]."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
        """Scatter k, v [num_tokens, kv_heads, head_dim] into `pool` at `layer` and the given slots, quantized
        where the pool is int8."""
        ...

    def paged_attention(
        self, q: Tensor, pool: Tensor, layer: int, meta: AttentionMeta, scale: float
    ) -> Tensor:
        """Causal attention of q [num_tokens, heads, head_dim] over each sequence's paged keys; query
        head h reads KV head h // (heads // kv_heads). Query i of a sequence with query length n and
        context length c stands at position c - n + i and sees keys [0, position]. Returns q's shape."""
        ...

    def fuse(
        self, shape: DecoderShape, weights: DecoderWeights, cos: Tensor, sin: Tensor
    ) -> FusedForward | None:
        """The whole decoder as one call, equal bit for bit to this backend's operations one by one; None
        where the backend has none."""
        ...

    def make_sampler(self) -> FusedSampler | None:
        """A sampler of its own for a caller, equal bit for bit to the engine's definition; None where the
        backend has none."""
        ...

    def make_device_sampler(self, max_rows: int, vocab_size: int) -> DeviceSampler | None:
        """A sampler for steps of up to `max_rows` rows; None where tokens are chosen on the host, or the
        vocabulary is too large for it."""
        ...
