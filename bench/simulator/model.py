"""A model whose tokens are a hash of the whole history, read from a KV pool that is only numbers.

1. The KV of position i is `chain(KV of i-1, token i)`: it names the salt and every token up to i.
2. The next token is drawn from the KV of the last position and the seed. So one slot that is wrong, missing,
   of another request or out of date changes, or is caught by, everything that comes after it.
3. An `Oracle` is the undisturbed run of one request: what every slot and every token has to be.
4. `Engine` computes steps from the pool as it is when they begin, and again when they end: what was freed and
   written over in between shows. Guesses in a step (`bench.simulator.guesses`) leave their own KV behind.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final, NoReturn

from bench.simulator.violation import Violation
from cluster.engine.batch import PlainOutputs, Row, SampleSpec, StepOutput, StepPlan
from cluster.engine.drafts import sort_out
from cluster.engine.following import FollowingRows
from cluster.ids import BlockId, RequestId
from cluster.kv.block_manager import BlockManager
from cluster.request import RequestSpec
from cluster.sampling import FinishReason, TokenOutput, finish_reason_at, looks_back

VOCABULARY: Final = 50
EOS: Final = 0
NOTHING: Final = -1  # memory that nobody has written
TORN: Final = -2  # half written


def root(salt: str) -> int:
    """The KV before the first token: equal prompts under unequal salts must not meet."""
    return 17 + zlib.crc32(salt.encode())


def chain(value: int, token: int) -> int:
    """Hashing integers only is the same in every process."""
    return hash((value, token))


def sample(value: int, seed: int) -> TokenOutput:
    """One request in four has a log-probability with each token."""
    mixed = hash((value, seed, 99)) % 1_000_003
    return TokenOutput(mixed % VOCABULARY, -(mixed % 997) / 100 if seed % 4 == 0 else None)


def is_history(spec: SampleSpec, tokens: Sequence[int], plan: StepPlan) -> bool:
    """Whether a request has generated `tokens` by its history, as far as `Runner.run` promises in this step:
    one that nobody looks at may lack what the run has brought."""
    told, num_lacking = list(spec.output_ids), 0
    if isinstance(plan.rows, FollowingRows) and not plan.longest_s and not looks_back(spec.params):
        num_lacking = len(tokens) - len(told)
        if num_lacking > plan.rows.num_on:
            return False
    return told == list(tokens[: len(tokens) - num_lacking])


def as_engine_tells(outputs: Sequence[TokenOutput | None]) -> Sequence[TokenOutput | None]:
    """A step in which nobody has more than a token is told as such."""
    token_ids = [one.token_id for one in outputs if one is not None and one.logprob is None]
    return PlainOutputs(token_ids) if len(token_ids) == len(outputs) else outputs


class Oracle:
    """What a request must lead to. `kv[i]` belongs to `tokens[i]`, prompt and outputs."""

    __slots__ = ("_blocks", "finish", "kv", "outputs", "sampled", "spec", "tokens")

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.tokens: list[int] = []
        self.kv: list[int] = []
        self.outputs: list[TokenOutput] = []
        self.sampled: set[tuple[int, int]] = set()  # (attempt, tokens before) of what workers sampled
        tokens, kv, outputs = self.tokens, self.kv, self.outputs
        value = root(spec.cache_salt)
        for token in spec.token_ids:
            value = chain(value, token)
            tokens.append(token)
            kv.append(value)
        reason: FinishReason | None = None
        while reason is None:
            output = sample(value, spec.sampling.seed)
            outputs.append(output)
            value = chain(value, output.token_id)
            tokens.append(output.token_id)
            kv.append(value)
            reason = finish_reason_at(spec.sampling, output.token_id, len(outputs))
        self.finish = reason
        self._blocks: list[list[int]] = []

    def blocks(self, block_size: int) -> list[list[int]]:
        """`kv` as a pool holds it, the last block as far as it goes. Always asked with one size."""
        if not self._blocks:
            kv = self.kv
            self._blocks = [kv[start : start + block_size] for start in range(0, len(kv), block_size)]
        return self._blocks


class Pool:
    """One worker's KV memory: `blocks[b][s]` is the KV in slot s of block b."""

    __slots__ = ("block_size", "blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[list[int]] = [[NOTHING] * block_size for _ in range(num_blocks)]

    def copy(self, block_ids: Sequence[BlockId]) -> list[list[int]]:
        return [self.blocks[block_id].copy() for block_id in block_ids]

    def paste(self, block_ids: Sequence[BlockId], contents: Sequence[list[int]]) -> None:
        for block_id, content in zip(block_ids, contents, strict=True):
            self.blocks[block_id][:] = content

    def tear(self, block_ids: Sequence[BlockId], contents: Sequence[list[int]]) -> None:
        """A copy in the middle: the first half of the blocks is there, the next block is torn."""
        half = len(block_ids) // 2
        self.paste(block_ids[:half], contents[:half])
        self.blocks[block_ids[half]][self.block_size // 2 :] = [TORN] * (
            self.block_size - self.block_size // 2
        )


class Engine:
    """Computes one worker's steps on its pool. `oracles`: every request there is."""

    def __init__(
        self, pool: Pool, blocks: BlockManager, oracles: dict[RequestId, Oracle], worker: str
    ) -> None:
        self._pool = pool
        self._blocks = blocks
        self._oracles = oracles
        self._worker = worker

    def begin(self, plan: StepPlan) -> None:
        """The step starts to read.

        Raises:
            Violation: it reads what is not its request's history, or writes what is not its own.
        """
        size = self._pool.block_size
        written: set[int] = set()
        for source, target in plan.copies:
            self._pool.blocks[target][:] = self._pool.blocks[source]
        for row in plan.rows:
            self._read(row)
            last = row.start + len(row.token_ids) - 1
            for block_id in row.block_ids[row.start // size : last // size + 1]:
                if block_id in written:
                    self._violate("I1", row, f"two rows of a step write block {block_id}")
                written.add(block_id)

    def finish(self, plan: StepPlan, compute_s: float) -> StepOutput:
        """The step has read everything and writes.

        Raises:
            Violation: as `begin`.
        """
        blocks, size = self._pool.blocks, self._pool.block_size
        sampled: list[TokenOutput] = []
        for row in plan.rows:
            value, block_ids, spec = self._read(row), row.block_ids, row.sample
            first_asked = row.start + len(row.token_ids) - 1 - row.num_drafts
            for position, token in enumerate(row.token_ids, row.start):
                value = chain(value, token)
                blocks[block_ids[position // size]][position % size] = value
                if spec is not None and position >= first_asked:
                    sampled.append(sample(value, spec.params.seed))
            self._check_holders(row)
        outputs, further = sort_out(plan.rows, sampled)
        for index, row in enumerate(plan.rows):
            if row.sample is not None:
                self._check_sampled(plan, row, row.sample, 1 + len(further.get(index, ())))
        return StepOutput(as_engine_tells(outputs), compute_s, further=further)

    def spoil(self, plan: StepPlan) -> None:
        """The step raised in the middle: garbage where it was to write."""
        size = self._pool.block_size
        for row in plan.rows:
            for position in range(row.start, row.start + len(row.token_ids)):
                self._pool.blocks[row.block_ids[position // size]][position % size] = TORN

    def _read(self, row: Row) -> int:
        """The KV before the row's first token, after all before it was read."""
        oracle = self._oracles[row.request]
        start, block_ids, blocks, size = row.start, row.block_ids, self._pool.blocks, self._pool.block_size
        end = start + len(row.token_ids)
        num_known = len(row.token_ids) - row.num_drafts
        if list(row.token_ids[:num_known]) != oracle.tokens[start : start + num_known]:
            self._violate("I8", row, f"tokens {list(row.token_ids)} at {start} are not this request's")
        if end > len(block_ids) * size:
            self._violate("I6", row, f"{len(block_ids)} blocks do not cover {end} tokens")
        if start == 0:
            return root(oracle.spec.cache_salt)
        num_full, rest = divmod(start, size)
        held, right = [blocks[block_id] for block_id in block_ids[:num_full]], oracle.blocks(size)
        if held != right[:num_full]:
            self._wrong_kv(row, next(i for i in range(num_full) if held[i] != right[i]), size)
        if not rest:
            return held[-1][-1]
        last = blocks[block_ids[num_full]]
        if last[:rest] != oracle.kv[start - rest : start]:
            self._wrong_kv(row, num_full, rest)
        return last[rest - 1]

    def _check_sampled(self, plan: StepPlan, row: Row, spec: SampleSpec, num_sampled: int) -> None:
        """From the history that a step which nobody asked for has by now (I8). No index of an attempt
        is drawn and kept twice, whoever draws it (I4)."""
        oracle = self._oracles[row.request]
        sampled, end = oracle.sampled, row.start + len(row.token_ids) - row.num_drafts
        if not is_history(spec, oracle.tokens[len(oracle.spec.token_ids) : end], plan):
            self._violate("I8", row, f"it samples after outputs {list(spec.output_ids)}")
        for index in range(end, end + num_sampled):
            if (row.attempt, index) in sampled:
                self._violate("I4", row, f"the token after position {index - 1} is sampled again")
            sampled.add((row.attempt, index))

    def _check_holders(self, row: Row) -> None:
        """What a step reads is held until it ends (I2), what it writes is nobody else's (I1)."""
        references = self._blocks._allocator._references
        size = self._pool.block_size
        first_written = row.start // size
        last = (row.start + len(row.token_ids) - 1) // size
        holders = [references[block_id] for block_id in row.block_ids[: last + 1]]
        if 0 in holders:
            block_id = row.block_ids[holders.index(0)]
            self._violate("I2", row, f"block {block_id} was freed during the step")
        for block_id, count in zip(
            row.block_ids[first_written : last + 1], holders[first_written:], strict=True
        ):
            if count > 1:
                self._violate("I1", row, f"block {block_id} is written and held by {count}")

    def _wrong_kv(self, row: Row, index: int, num_slots: int) -> NoReturn:
        found = self._pool.blocks[row.block_ids[index]][:num_slots]
        what = "unwritten" if NOTHING in found else "torn" if TORN in found else "foreign"
        self._violate("I5", row, f"its block {index}, {row.block_ids[index]} of the pool, holds {what} KV")

    def _violate(self, invariant: str, row: Row, what: str) -> NoReturn:
        raise Violation(invariant, f"{self._worker}: {row.request}/{row.attempt}: {what}")
