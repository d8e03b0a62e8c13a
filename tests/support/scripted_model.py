"""A model whose tokens are a hash of the history, and a KV pool of tags that proves whose block is read.

1. The KV of position i is the tag `chain(tag of i-1, token i)`: it names the whole prefix up to i.
2. The next token is drawn from the tag of the last position and the seed. So one wrong slot anywhere in a
   sequence's KV changes, or is caught by, everything after it.
3. `ScriptedRunner` checks before and after each step that the slots a row reads hold exactly its request's
   prefix, that its tokens are the ones the undisturbed run has, and that no two rows write one slot. Guesses
   among them it computes as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.simulator.model import as_engine_tells, is_history
from cluster.engine.batch import Row, StepOutput, StepPlan
from cluster.engine.drafts import sort_out
from cluster.ids import BlockId, RequestId
from cluster.sampling import SamplingParams, TokenOutput, finish_reason

VOCABULARY = 50
EOS = 0
ROOT = 17


def chain(tag: int, token: int) -> int:
    """Deterministic across runs: only integers are hashed."""
    return hash((tag, token))


def sample(tag: int, params: SamplingParams) -> TokenOutput:
    mixed = hash((tag, params.seed, 99)) % 1_000_003
    return TokenOutput(mixed % VOCABULARY, -(mixed % 997) / 100 if params.seed % 4 == 0 else None)


@dataclass(slots=True)
class Oracle:
    """The undisturbed run of one request, computed as far as it is asked for."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)  # prompt and outputs
    tags: list[int] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        for token in self.prompt:
            self._extend(token)
        output_ids: list[int] = []
        while finish_reason(self.params, output_ids) is None:
            output = sample(self.tags[-1], self.params)
            self.outputs.append(output)
            output_ids.append(output.token_id)
            self._extend(output.token_id)

    def _extend(self, token: int) -> None:
        self.tokens.append(token)
        self.tags.append(chain(self.tags[-1] if self.tags else ROOT, token))


class TagPool:
    """Tags by block and slot; None is undefined memory."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]

    def read(self, block_ids: Sequence[BlockId], position: int) -> int | None:
        return self.blocks[block_ids[position // self.block_size]][position % self.block_size]

    def write(self, block_ids: Sequence[BlockId], position: int, tag: int | None) -> None:
        self.blocks[block_ids[position // self.block_size]][position % self.block_size] = tag


class ScriptedRunner:
    """One worker's engine: `begin` when the step starts, `finish` or `crash` when it ends."""

    def __init__(self, pool: TagPool, oracles: dict[RequestId, Oracle]) -> None:
        self.pool = pool
        self._oracles = oracles

    def begin(self, plan: StepPlan) -> None:
        assert plan.rows
        assert not plan.copies
        written: set[tuple[BlockId, int]] = set()
        for row in plan.rows:
            self._check(row)
            for position in range(row.start, row.start + len(row.token_ids)):
                slot = (row.block_ids[position // self.pool.block_size], position % self.pool.block_size)
                assert slot not in written, "two rows write one slot"
                written.add(slot)

    def finish(self, plan: StepPlan) -> StepOutput:
        sampled: list[TokenOutput] = []
        for row in plan.rows:
            self._check(row)
            oracle = self._oracles[row.request]
            end = row.start + len(row.token_ids) - row.num_drafts
            tag = oracle.tags[row.start - 1] if row.start else ROOT
            for position, token in enumerate(row.token_ids, row.start):
                tag = chain(tag, token)
                self.pool.write(row.block_ids, position, tag)
                if row.sample is not None and position >= end - 1:
                    sampled.append(sample(tag, row.sample.params))
            if row.sample is not None:
                assert list(row.sample.prompt_ids) == list(oracle.prompt)
                assert is_history(row.sample, oracle.tokens[len(oracle.prompt) : end], plan)
        outputs, further = sort_out(plan.rows, sampled)
        seconds = 0.001 * plan.num_tokens
        outputs = as_engine_tells(outputs)
        return StepOutput(outputs, compute_s=seconds, num_borrowed=2, further=further)

    def crash(self, plan: StepPlan) -> None:
        """The step wrote garbage where it was to write KV."""
        for row in plan.rows:
            for position in range(row.start, row.start + len(row.token_ids)):
                self.pool.write(row.block_ids, position, -1)

    def _check(self, row: Row) -> None:
        oracle = self._oracles[row.request]
        end = row.start + len(row.token_ids)
        assert row.token_ids, "an empty row"
        known = list(row.token_ids[: len(row.token_ids) - row.num_drafts])
        assert known == oracle.tokens[row.start : row.start + len(known)], "not this request's tokens"
        assert end <= len(row.block_ids) * self.pool.block_size, "the block table is too short"
        for position in range(row.start):
            found = self.pool.read(row.block_ids, position)
            assert found == oracle.tags[position], f"{row.request} reads foreign KV at {position}"
