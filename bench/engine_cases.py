"""What `bench.engine` runs: steps of given shapes, and what each cannot do without.

1. `grid` lists the cases: decode steps by batch and context, prefill chunks by where they end.
2. `make_plan` makes a case a step of sequences whose blocks lie all over the pool.
3. `Decoding` goes through steps of a case of decode rows as a worker does.
4. `work` counts bytes and multiply-adds of a case (`bench.roofline`), under the number formats of `Formats`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import torch

from bench.roofline import ModelShape, Roofline, Work
from cluster.engine.batch import Row, Runner, SampleSpec, StepOutput, StepPlan
from cluster.engine.following import following_plan
from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.engine.weights import TORCH_DTYPES
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams
from kernels.ops import row_size
from kernels.quantization import Quantization

BLOCK_SIZE = 64
BATCH_SIZES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (128, 256, 512, 1024, 2048, 4096)
QUICK_BATCH_SIZES, QUICK_CONTEXTS = (1, 8, 32), (256, 1024)
CHUNK, LONG_PROMPT = 512, 8192
STEPS_ON = 32  # of a run of decode steps


@dataclass(frozen=True, slots=True)
class Formats:
    """What numbers are kept as: all that decides the bytes of a step."""

    dtype: Dtype
    quantization: Quantization = Quantization.NONE
    kv_int8: bool = False

    @property
    def weight_bytes(self) -> int:
        """Per element; the scales of int8 weights, one per row, are left out."""
        return TORCH_DTYPES[self.dtype].itemsize if self.quantization is Quantization.NONE else 1

    @property
    def unit_is_bf16(self) -> bool | None:
        """Whether a matrix unit, if there is one, multiplies bf16 or bytes; None: it has no products."""
        if self.dtype is not Dtype.BF16 and self.quantization is not Quantization.INT8:
            return None
        return (
            None if self.quantization is Quantization.INT8_WEIGHTS else self.quantization is Quantization.NONE
        )

    @property
    def pool_dtype(self) -> torch.dtype:
        return torch.int8 if self.kv_int8 else TORCH_DTYPES[self.dtype]

    def kv_bytes(self, head_dim: int) -> float:
        """Per element of a key or value, its share of a scale included."""
        return float(row_size(head_dim, self.pool_dtype) * self.pool_dtype.itemsize / head_dim)


@dataclass(frozen=True, slots=True)
class Case:
    """`num_seqs` sequences, each bringing `num_queries` tokens that end at `context`."""

    name: str
    num_seqs: int
    num_queries: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_queries

    def keys_seen(self) -> int:
        """By all tokens: query i of n sees context - n + i + 1."""
        first = self.context - self.num_queries + 1
        return self.num_tokens * (first + self.context) // 2


@dataclass(frozen=True, slots=True)
class Rates:
    bytes_per_s: float
    multiply_adds_per_s: float
    gemm_multiply_adds_per_s: float = 0.0  # of torch's bf16 products, where a matrix unit multiplies; else 0


def decode(batch_size: int, context: int) -> Case:
    return Case(f"decode {batch_size} x {context}", batch_size, 1, context)


def grid(max_len: int, quick: bool) -> list[Case]:
    """Contexts past `max_len` are left out; prompts longer than a chunk show their later chunks."""
    batch_sizes = QUICK_BATCH_SIZES if quick else BATCH_SIZES
    contexts = [c for c in (QUICK_CONTEXTS if quick else CONTEXTS) if c <= max_len]
    ends = sorted({min(CHUNK, max_len)} | {c for c in (*contexts, LONG_PROMPT) if c <= max_len})
    cases = [decode(batch_size, context) for context in contexts for batch_size in batch_sizes]
    return cases + [Case(f"prefill {min(CHUNK, end)} at {end}", 1, min(CHUNK, end), end) for end in ends]


def roofline(spec: ModelSpec, formats: Formats, rates: Rates, weight_bytes: float) -> Roofline:
    """`weight_bytes` per element, in the mean. A multiply-add counts as two operations there. Where no matrix
    unit multiplies, the limit of arithmetic stays that of floating point for int8 weights too: a share above
    100 % says what integers gain."""
    shape = ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
    )
    return Roofline(
        shape,
        weight_bytes,
        formats.kv_bytes(spec.head_dim),
        rates.bytes_per_s,
        2 * rates.multiply_adds_per_s,
    )


def work(case: Case, line: Roofline) -> Work:
    """What the case cannot do without."""
    return line.step(case.num_tokens, case.num_seqs, case.keys_seen(), case.num_seqs * case.context)


class Decoding:
    """A call is a decode step of `case`, or of a few keys more. Each goes on from the one before, as nearly
    all of a worker's do (`cluster.engine.following`), but for one in `STEPS_ON`, which is planned; where the
    context is the longest there may be, each is."""

    def __init__(self, runner: Runner, case: Case, num_blocks: int, vocab_size: int, max_len: int) -> None:
        self._runner = runner
        num_steps = max(1, min(STEPS_ON, max_len - case.context + 1))
        params = SamplingParams(max_tokens=num_steps, temperature=0.0)
        last = replace(case, context=case.context + num_steps - 1)
        rows = make_plan(last, num_blocks, vocab_size, params).rows
        self._planned = StepPlan(
            tuple(msgspec.structs.replace(row, start=case.context - case.num_queries) for row in rows)
        )
        self._next: StepPlan | None = None

    def __call__(self) -> StepOutput:
        plan = self._planned if self._next is None else self._next
        output = self._runner.run(plan)
        self._next = following_plan(plan, output)
        return output


def make_plan(case: Case, num_blocks: int, vocab_size: int, params: SamplingParams) -> StepPlan:
    """Sequences whose blocks are all over the pool; where there are too few they are shared."""
    per_seq = -(-case.context // BLOCK_SIZE)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    rows = []
    for seq in range(case.num_seqs):
        tokens = [(7919 * seq + 31 * i) % (vocab_size - 5) + 5 for i in range(case.num_queries)]
        blocks = [BlockId(order[(seq * per_seq + b) % num_blocks]) for b in range(per_seq)]
        rows.append(
            Row(
                request=RequestId(str(seq)),
                attempt=Attempt(1),
                token_ids=tokens,
                start=case.context - case.num_queries,
                block_ids=blocks,
                sample=SampleSpec(params, (1,), ()),
            )
        )
    return StepPlan(rows=tuple(rows))
