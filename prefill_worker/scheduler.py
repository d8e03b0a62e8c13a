"""What a prefill worker computes next: prompts in chunks, several packed into one step.

1. `add` queues a prompt that fits the pool when nothing else is there.
2. `plan` composes a step by `cluster.slo_schedule`: in order of deadline, short prompts before longer ones
   that can wait, late and batch ones in what is left. The step model says how many tokens fit the time that
   a step may take; `max_step_tokens` bounds them. A prompt's blocks are reserved when its first chunk is
   planned and not before, for the whole prompt at once, so a prompt that started can always be completed.
3. One that does not fit now is passed over; once it has waited for what it costs, nobody else begins first.
4. `account` books the step: computed tokens, full blocks into the prefix cache, sampled tokens.
5. `remove` takes a prompt out at any time. Its blocks stay its own: whoever removed it releases them,
   when `in_step` is False and nothing else reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine.batch import StepOutput, StepPlan
from cluster.engine.pacing import LATE_RESERVE, Pacer, WaitingPrompt
from cluster.engine.sequence import Sequence, SequenceKey, num_blocks_for
from cluster.kv.block_manager import BlockManager
from cluster.sampling import TokenOutput
from cluster.slo_classes import DEFAULT_TARGETS, DecodeBatch, Targets
from cluster.step_model import StepWork, chunk_attention


@dataclass(frozen=True, slots=True)
class PrefillSchedulerConfig:
    """`max_step_tokens` bounds a step, whatever the model says; `targets` size it."""

    max_step_tokens: int = 512
    targets: Targets = DEFAULT_TARGETS


class PrefillScheduler:
    """Owns the queue and the step in flight."""

    def __init__(self, config: PrefillSchedulerConfig, blocks: BlockManager) -> None:
        self._blocks = blocks
        self.pacer = Pacer(config.targets, config.max_step_tokens)
        step_s = max(config.targets.tpot_s, self.pacer.settings.max_idle_step_s)
        aim_s = step_s * self.pacer.settings.safety
        self._nobody = DecodeBatch(budget_s=step_s, target_s=aim_s)  # no stream has a say in a step's length
        self._waiting: dict[SequenceKey, WaitingPrompt] = {}  # not completely computed; insertion is arrival
        self._step: list[tuple[Sequence, int]] = []
        self._in_step: set[SequenceKey] = set()

    @property
    def busy(self) -> bool:
        """A step is in flight."""
        return bool(self._step)

    @property
    def num_running(self) -> int:
        """Prompts that have started and are not complete."""
        return sum(1 for prompt in self._waiting.values() if prompt.sequence.block_ids)

    @property
    def num_step_tokens(self) -> int:
        """Tokens in the step in flight."""
        return sum(num_tokens for _, num_tokens in self._step)

    @property
    def num_queued_tokens(self) -> int:
        return sum(prompt.sequence.num_remaining for prompt in self._waiting.values())

    def add(self, sequence: Sequence) -> None:
        blocks, pace = self._blocks, sequence.pace
        num_blocks = num_blocks_for(sequence.num_tokens, blocks.block_size)
        assert num_blocks <= blocks.num_blocks
        prompt = WaitingPrompt(sequence, pace.due_s, pace.is_batch, num_blocks * blocks.block_size)
        self._waiting[sequence.key] = prompt
        self.pacer.prompts.add(prompt)

    def remove(self, sequence: Sequence) -> None:
        prompt = self._waiting.pop(sequence.key, None)
        if prompt is not None:
            self.pacer.prompts.remove(prompt)

    def in_step(self, sequence: Sequence) -> bool:
        return sequence.key in self._in_step

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed. Not while a step is in flight."""
        assert not self._step
        if not self._waiting:
            return None
        blocks = self._blocks
        room = blocks.num_available
        reserve = round(LATE_RESERVE * blocks.num_blocks) if room < blocks.num_blocks else 0
        size = blocks.block_size
        planned = self.pacer.prompts.plan(now, self._nobody, room * size, reserve * size, self._begin)
        if not planned.chunks:
            return None
        self._step = [(prompt.sequence, num_tokens) for prompt, num_tokens in planned.chunks]
        attention = 0.0
        for sequence, num_tokens in self._step:
            attention += chunk_attention(sequence.num_computed, num_tokens)
            if sequence.started_s is None:
                sequence.started_s = now
        self._in_step = {sequence.key for sequence, _ in self._step}
        self.pacer.begin(StepWork(self.num_step_tokens, 0, attention), now)
        return StepPlan(tuple(sequence.row(num_tokens) for sequence, num_tokens in self._step))

    def account(self, output: StepOutput, now: float) -> list[tuple[Sequence, TokenOutput | None]]:
        """Book a finished step. The token is None for prompts that are not complete yet."""
        self.pacer.end(output.compute_s, now)
        step = self._end_step()
        assert len(step) == len(output.outputs), "one output per row"
        for sequence, num_tokens in step:
            sequence.advance(num_tokens)
            sequence.publish(self._blocks)
            if sequence.num_remaining == 0:
                self.remove(sequence)
        return [(sequence, token) for (sequence, _), token in zip(step, output.outputs, strict=True)]

    def fail_step(self) -> list[Sequence]:
        """The step raised: what it wrote does not count. Its sequences leave the queue."""
        self.pacer.drop()
        sequences = [sequence for sequence, _ in self._end_step()]
        for sequence in sequences:
            self.remove(sequence)
        return sequences

    def _end_step(self) -> list[tuple[Sequence, int]]:
        assert self._step, "no step is in flight"
        step, self._step = self._step, []
        self._in_step = set()
        return step

    def _begin(self, prompt: WaitingPrompt) -> None:
        """Take the blocks of the whole prompt: as many are available as it needs without a cache."""
        is_reserved = prompt.sequence.reserve(self._blocks, prompt.kv_tokens // self._blocks.block_size)
        assert is_reserved, "the plan left room for it"
