"""What a prefill worker computes next: prompts in chunks, several packed into one step.

1. `add` queues a prompt that fits the pool when nothing else is there.
2. `plan` composes a step of at most `max_step_tokens` tokens by `cluster.engine.prefill_order`. A prompt's
   blocks are reserved when its first chunk is planned and not before, for the whole prompt at once, so a
   prompt that started can always be completed. One that does not fit now is passed over; once it has
   waited `aging_bound_s`, no younger prompt takes blocks until it has got its own.
3. `account` books the step: computed tokens, full blocks into the prefix cache, sampled tokens.
4. `remove` takes a prompt out at any time. Its blocks stay its own: whoever removed it releases them,
   when `in_step` is False and nothing else reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.engine.batch import StepOutput, StepPlan
from cluster.engine.prefill_order import PrefillOrder
from cluster.engine.sequence import Sequence, SequenceKey, num_blocks_for
from cluster.kv.block_manager import BlockManager
from cluster.sampling import TokenOutput


@dataclass(frozen=True, slots=True)
class PrefillSchedulerConfig:
    """`max_step_tokens` bounds a step; more make it longer, fewer make prompts take more steps."""

    max_step_tokens: int = 512
    order: PrefillOrder = field(default_factory=PrefillOrder)


class PrefillScheduler:
    """Owns the queue and the step in flight."""

    def __init__(self, config: PrefillSchedulerConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._waiting: dict[SequenceKey, Sequence] = {}  # not completely computed; insertion is arrival
        self._step: list[tuple[Sequence, int]] = []
        self._in_step: set[SequenceKey] = set()
        self._refused_at: dict[SequenceKey, int] = {}  # num_available when its blocks last did not fit

    @property
    def busy(self) -> bool:
        """A step is in flight."""
        return bool(self._step)

    @property
    def num_running(self) -> int:
        """Prompts that have started and are not complete."""
        return sum(1 for sequence in self._waiting.values() if sequence.block_ids)

    @property
    def num_step_tokens(self) -> int:
        """Tokens in the step in flight."""
        return sum(num_tokens for _, num_tokens in self._step)

    @property
    def num_queued_tokens(self) -> int:
        return sum(sequence.num_remaining for sequence in self._waiting.values())

    def add(self, sequence: Sequence) -> None:
        assert num_blocks_for(sequence.num_tokens, self._blocks.block_size) <= self._blocks.num_blocks
        self._waiting[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.key, None)
        self._refused_at.pop(sequence.key, None)

    def in_step(self, sequence: Sequence) -> bool:
        return sequence.key in self._in_step

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed. Not while a step is in flight."""
        assert not self._step
        gate = self._gate(now)

        def admit(sequence: Sequence) -> bool:
            return bool(sequence.block_ids) or (
                (gate is None or sequence is gate) and self._reserve(sequence)
            )

        self._step = self._config.order.compose(self._waiting.values(), self._config.max_step_tokens, admit)
        if not self._step:
            return None
        for sequence, _ in self._step:
            if sequence.started_s is None:
                sequence.started_s = now
        self._in_step = {sequence.key for sequence, _ in self._step}
        return StepPlan(tuple(sequence.row(num_tokens) for sequence, num_tokens in self._step))

    def account(self, output: StepOutput) -> list[tuple[Sequence, TokenOutput | None]]:
        """Book a finished step. The token is None for prompts that are not complete yet."""
        step = self._end_step()
        assert len(step) == len(output.outputs), "one output per row"
        for sequence, num_tokens in step:
            sequence.advance(num_tokens)
            sequence.publish(self._blocks)
            if sequence.num_remaining == 0:
                self._waiting.pop(sequence.key, None)
        return [(sequence, token) for (sequence, _), token in zip(step, output.outputs, strict=True)]

    def fail_step(self) -> list[Sequence]:
        """The step raised: what it wrote does not count. Its sequences leave the queue."""
        sequences = [sequence for sequence, _ in self._end_step()]
        for sequence in sequences:
            self.remove(sequence)
        return sequences

    def _end_step(self) -> list[tuple[Sequence, int]]:
        assert self._step, "no step is in flight"
        step, self._step = self._step, []
        self._in_step = set()
        return step

    def _gate(self, now: float) -> Sequence | None:
        """The oldest prompt that blocks did not suffice for and that has waited longer than the bound."""
        for key in self._refused_at:
            sequence = self._waiting[key]
            if now - sequence.accepted_s >= self._config.order.aging_bound_s:
                return min(
                    (self._waiting[other] for other in self._refused_at), key=lambda oldest: oldest.order
                )
        return None

    def _reserve(self, sequence: Sequence) -> bool:
        num_available = self._blocks.num_available
        if self._refused_at.get(sequence.key) == num_available:
            return False  # nothing changed since it last did not fit: do not hash the prompt again
        if sequence.reserve(self._blocks, num_blocks_for(sequence.num_tokens, self._blocks.block_size)):
            self._refused_at.pop(sequence.key, None)
            return True
        self._refused_at[sequence.key] = num_available
        return False
