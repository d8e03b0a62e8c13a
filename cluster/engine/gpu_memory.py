"""How much of a GPU's memory is for what. Pure: what is measured comes in as numbers.

    free with the weights loaded = largest steps + (1 - share) · rest + share · rest
                                                                        KV, unless its size is given

Workers that share a GPU have equal parts of it, and what is free to one is what its part has left
(`free_of_part`): whoever of them starts first finds no more than the last.

1. `largest_step` is a plan that takes as much memory as any of so many rows; running it once says how much
   that is. More rows do not always take more: attention over few is spread, with results to be put together.
2. `size_pool` gives KV what is left, or refuses in one line with both numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine.batch import Row, SampleSpec, StepPlan
from cluster.errors import ConfigError
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams

GIB = 2**30
NUM_SCRATCH_BLOCKS = 1  # of a pool, that padding reads and writes
_LEAST_BLOCKS = 2
_ADVICE = "give workers fewer tokens per step or rows (`--prefill-chunk`, `--local-chunk`, `--max-num-seqs`)"

# Every kind of work that choosing a token can be: edits of a copy of the logits, both selections, a draw.
_PARAMS = SamplingParams(max_tokens=1, temperature=1.0, top_k=20, top_p=0.9, repetition_penalty=1.1)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes. `free` is what the device has left when the weights are there and nothing else is."""

    total: int
    free: int
    weights: int
    steps: int  # most that steps take beside weights and KV, graphs included


def free_of_part(free: int, total: int, held: int, num_sharers: int) -> int:
    """Bytes that a worker may still take of a GPU of `total` bytes that `num_sharers` workers share in equal
    parts: what its part has left beside the `held` bytes that it has, and never more than is free."""
    return min(free, max(0, total // num_sharers - held))


def check_weights_fit(num_bytes: int, free: int, total: int) -> None:
    """
    Raises:
        ConfigError: they do not; says how much is needed and how much is free.
    """
    if num_bytes > free:
        raise ConfigError(
            f"the weights need {gib(num_bytes)} but only {gib(free)} of {gib(total)} of GPU memory is free: "
            "use a smaller model, or end what else runs on this GPU"
        )


def size_pool(
    memory: DeviceMemory, bytes_per_block: int, share: float, kv_bytes: int | None, kv_flag: str
) -> int:
    """Blocks of KV, beside those for padding. `share`: of what is left, for KV; `kv_bytes`: what is wanted
    instead; `kv_flag` is how a user says that.

    Raises:
        ConfigError: not enough for two blocks, or for what is wanted; says needed and free GiB.
    """
    rest = memory.free - memory.steps
    scratch = NUM_SCRATCH_BLOCKS * bytes_per_block
    budget = int(rest * share) - scratch if kv_bytes is None else kv_bytes
    needed = max(_LEAST_BLOCKS * bytes_per_block, budget)
    if needed + scratch > rest:
        raise ConfigError(
            f"KV needs {gib(needed + scratch)} but only {gib(max(0, rest))} of {gib(memory.total)} of GPU "
            f"memory is free beside {gib(memory.weights)} of weights and {gib(memory.steps)} for steps: "
            + (f"lower `{kv_flag}`, or {_ADVICE}" if kv_bytes is not None else _ADVICE)
        )
    num_blocks = budget // bytes_per_block
    if num_blocks < _LEAST_BLOCKS:
        way = "raise `--gpu-memory-share`" if kv_bytes is None else f"raise `{kv_flag}`"
        raise ConfigError(
            f"KV needs {gib(_LEAST_BLOCKS * bytes_per_block)} for {_LEAST_BLOCKS} blocks but may take only "
            f"{gib(max(0, budget))} of {gib(rest)} of free GPU memory: {way}"
        )
    return num_blocks


def largest_step(chunk_tokens: int, num_rows: int, max_model_len: int, block_size: int) -> StepPlan:
    """A chunk of so many tokens beside decode rows, all as long as can be; without a chunk, decode rows that
    have room for as much: what memory attention takes follows from the room. Every row has block 0 alone,
    again and again: what is computed is of no use."""
    chunk, end = min(chunk_tokens, max_model_len), max_model_len if chunk_tokens else 1
    lengths = [chunk or 1, *[1] * (num_rows - 1)]
    return StepPlan(tuple(_row(length, end, -(-max_model_len // block_size)) for length in lengths))


def _row(num_tokens: int, end: int, num_blocks: int) -> Row:
    return Row(
        request=RequestId("profile"),
        attempt=Attempt(1),
        token_ids=[0] * num_tokens,
        start=end - num_tokens,
        block_ids=[BlockId(0)] * num_blocks,
        sample=SampleSpec(_PARAMS, (0,), ()),
    )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
