"""What a decode worker computes next: a continuous batch, with prompts in what room is left.

1. `add` takes a sequence that holds its blocks: complete KV to decode from, or a prompt to prefill here.
2. `plan` gives every decoding sequence one token, oldest first. Chunks of prompts ride along, as many tokens
   as the tightest stream has time for: `cluster.slo_schedule` by this worker's own step model, with
   `max_chunk_tokens` as a bound. Sequences that yield (`cluster.engine.pace`) are in the steps that bear it.
3. Where few decode and no chunk rides along, rows may bring drafts as far as their blocks reach
   (`cluster.engine.speculation`): a step then gives some of them several tokens, and computes their KV.
4. A decoding sequence takes a block when it fills its last one, and sooner where many are left
   (`decode_worker.room`). If none is left, the youngest sequence is preempted: its full blocks go to the
   prefix cache, and its tokens so far are prefilled again later (the bits are the same, so nothing changes
   for the client). The youngest itself waits, it preempts nobody. So the oldest sequence can always go on,
   unless leases hold the rest, and those end by themselves.
5. Preempted sequences come back oldest first, before anything younger is let in, once their
   blocks and one more for every running sequence fit. They are then due as a new prompt would be.
6. `account` books the step and tells what was generated. Ended sequences leave their full blocks, generated
   tokens included, as prefix cache. A step that nothing waits for may have gone on to the next one with the
   same rows (`may_go_on`, `decode_worker.step_book`): mostly all there is then is a token each.
7. `cancel` drops a sequence. Its blocks are released at once, or when the step that computes it is done.

Work per step is proportional to rows and new tokens, not to lengths; hashing happens once per block.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass

from cluster.engine.batch import StepOutput, StepPlan
from cluster.engine.draft_policy import MOST_ROWS
from cluster.engine.pacing import Pacer, WaitingPrompt
from cluster.engine.sequence import Sequence, SequenceKey, num_blocks_for
from cluster.ids import RequestId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import TokenOutput
from cluster.slo_classes import DEFAULT_TARGETS, DecodeBatch, Targets
from cluster.step_model import StepWork, chunk_attention
from decode_worker.batch_load import Lives, decode_batch
from decode_worker.decode_step import DecodeStep, Generated
from decode_worker.room import rows_with_room, take_ahead
from decode_worker.step_book import StepBook


@dataclass(frozen=True, slots=True)
class DecodeSchedulerConfig:
    """Most prompt tokens per step, the blocks a resumed sequence gets beyond its tokens, what requests are
    promised that ask for nothing else, and whether rows may bring drafts."""

    max_chunk_tokens: int = 512
    growth_blocks: int = 1
    targets: Targets = DEFAULT_TARGETS
    speculates: bool = False


def _age(sequence: Sequence) -> int:
    return sequence.order


def _resting(decoding: list[Sequence], count: int) -> set[SequenceKey]:
    """Rows that yield and are not in the step: those that had a token last."""
    yielding = [sequence for sequence in decoding if sequence.pace.yields]
    yielding.sort(key=lambda sequence: (sequence.pace.last_s, sequence.order))
    return {sequence.key for sequence in yielding[len(yielding) - count :]}


class DecodeScheduler:
    """Owns the sequences that run here, and their blocks."""

    def __init__(self, config: DecodeSchedulerConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self.book = StepBook(Pacer(config.targets, config.max_chunk_tokens))
        self.lives = Lives()
        self._all: dict[RequestId, Sequence] = {}  # one attempt of a request at a time
        self._decoding: list[Sequence] = []  # one token to compute; oldest first, as the lists below
        self._prefilling: list[Sequence] = []
        self._preempted: list[Sequence] = []  # without blocks
        self._prompts: dict[SequenceKey, WaitingPrompt] = {}  # of those that prefill
        self.num_preemptions = 0

    @property
    def num_sequences(self) -> int:
        return len(self._all)

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    @property
    def decode_context(self) -> int:
        """Keys that the decoding sequences read in a step."""
        self.book.settle()
        return sum(len(sequence.token_ids) for sequence in self._decoding)

    def yielding(self) -> tuple[int, int]:
        """Of the sequences that decode, those that need not be in every step: (how many, their keys)."""
        self.book.settle()
        lengths = [len(sequence.token_ids) for sequence in self._decoding if sequence.pace.yields]
        return len(lengths), sum(lengths)

    @property
    def num_preempted(self) -> int:
        return len(self._preempted)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens still to compute here."""
        return sum(sequence.num_remaining for sequence in (*self._prefilling, *self._preempted))

    def get(self, request: RequestId) -> Sequence | None:
        """The running attempt of a request."""
        self.book.settle()
        return self._all.get(request)

    def sequences(self) -> tuple[Sequence, ...]:
        self.book.settle()
        return tuple(self._all.values())

    def add(self, sequence: Sequence) -> None:
        assert sequence.request not in self._all, "the older attempt still runs"
        self._all[sequence.request] = sequence
        if sequence.num_generated > 0 and sequence.num_remaining == 1:  # token 0 came with its KV
            insort(self._decoding, sequence, key=_age)
        else:
            self._wait(sequence, sequence.pace.due_s)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed. Not while a step is in flight."""
        assert not self.book.busy
        if not self._all:
            return None
        if self._preempted:
            self._resume(now)
        size = self._blocks.block_size
        decoding = [
            sequence
            for sequence in tuple(self._decoding)
            if len(sequence.token_ids) <= len(sequence.block_ids) * size or self._has_room(sequence)
        ]
        chunks: list[tuple[WaitingPrompt, int]] = []
        if self._prefilling or any([sequence.pace.yields for sequence in decoding]):
            batch = self._batch(decoding, now)
            planned = self.book.pacer.prompts.plan(now, batch, room=0)
            chunks = planned.chunks
            if planned.num_yielding < batch.num_yielding:
                resting = _resting(decoding, batch.num_yielding - planned.num_yielding)
                decoding = [sequence for sequence in decoding if sequence.key not in resting]
        step = [(sequence, 1) for sequence in decoding]
        attention, total = 0.0, len(decoding)
        for prompt, num_tokens in chunks:
            sequence = prompt.sequence
            if sequence.started_s is None:
                sequence.started_s = now
            attention += chunk_attention(sequence.num_computed, num_tokens)
            total += num_tokens
            step.append((sequence, num_tokens))
        if not step:
            return None
        context = sum([len(sequence.token_ids) for sequence in decoding])
        may_draft = not chunks and self._config.speculates and len(decoding) <= MOST_ROWS
        in_flight = DecodeStep(step, len(decoding), context, may_draft)
        self.book.begin(in_flight, StepWork(total, context, attention), now)
        if not chunks:
            # blocks are for those that were preempted, if there are any
            keep_free = self._blocks.num_blocks if self._preempted else self.num_running
            take_ahead(decoding, self._blocks, keep_free)
            if may_draft:
                return self._open_to_drafts(decoding, now)
        rows = [sequence.decode_row() for sequence in decoding]
        rows += [sequence.row(num_tokens) for sequence, num_tokens in step[len(decoding) :]]
        return StepPlan(tuple(rows))

    def _batch(self, decoding: list[Sequence], now: float) -> DecodeBatch:
        pacer, lives = self.book.pacer, self.lives
        return decode_batch(decoding, now, pacer.model, pacer.settings, lives.mean_s, lives.mean_output)

    def _open_to_drafts(self, decoding: list[Sequence], now: float) -> StepPlan:
        """All that is in the step decodes."""
        batch = self._batch(decoding, now)
        rows = rows_with_room(decoding, self._blocks.block_size)
        return StepPlan(rows, longest_s=math.inf if batch.budget_s is None else batch.budget_s)

    def may_go_on(self) -> bool:
        """Whether the next step would be the same rows, each with the token it gets in this one: all that is
        here decodes, is wanted, and has a place for it. Of the places for more, rows know themselves."""
        step = self.book.unsettled
        if step is None or self._prefilling or self._preempted or step.cancelled:
            return False
        if not step.is_pure_decode or len(step.rows) != len(self._decoding):
            return False
        room = step.look_for_room(self._blocks.block_size) if step.room is None else step.room
        return room > 0

    def account(self, output: StepOutput, now: float, *, went_on: bool = False) -> list[Generated]:
        """Book a finished step: the new tokens of the sequences that are still wanted, in row order.

        `went_on`: a step with the same rows is in flight, each with its last new token; so none has ended.
        What was cancelled since then stays in it, and holds its blocks.
        """
        step = self.book.step if went_on else self.book.end(output, now)
        assert step is not None
        outputs, num_plain = output.outputs, 0
        generated: list[Generated] = []
        if not (went_on or step.cancelled or output.further):  # those that decode got a token each
            num_plain = step.num_decode_rows
            for (sequence, _), token in zip(step.rows[:num_plain], outputs[:num_plain], strict=True):
                assert token is not None
                index = len(sequence.token_ids) - sequence.num_initial
                reason = sequence.take(token.token_id, now)
                if reason is not None:
                    self._ended(sequence, now)
                generated.append(Generated(sequence, index, [token], reason))
        others = zip(step.rows[num_plain:], outputs[num_plain:], strict=True)
        for index, ((sequence, num_tokens), token) in enumerate(others, num_plain):
            sequence.advance(num_tokens)
            if step.cancelled and sequence.key in step.cancelled:
                if went_on:
                    assert token is not None
                    sequence.append(token.token_id)  # nobody is told, but its history is that of its step
                    for further in output.further.get(index, ()):
                        sequence.advance(1)
                        sequence.append(further.token_id)
                else:
                    self._free(sequence)
            elif token is not None:
                if index >= step.num_decode_rows:  # its prompt is complete
                    sequence.publish(self._blocks)
                    self._unwait(sequence)
                    insort(self._decoding, sequence, key=_age)
                generated.append(self._append(sequence, [token, *output.further.get(index, ())], now))
        if went_on:
            self.book.went_on(output, now)
        return generated

    def fail_step(self) -> list[Sequence]:
        """The step raised: its sequences are gone; the ones that were still wanted are returned."""
        step = self.book.fail()
        failed: list[Sequence] = []
        for sequence, _ in step.rows:
            if sequence.key in step.cancelled:
                self._free(sequence)
            else:
                failed.append(sequence)
                self.cancel(sequence)
        return failed

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence; its blocks follow at once, or after the step that computes it."""
        step = self.book.step
        self._drop(sequence)
        if step is not None and step.has(sequence):
            step.cancelled.add(sequence.key)
        else:
            self._free(sequence)

    # ---- prompts

    def _wait(self, sequence: Sequence, deadline_s: float) -> None:
        """It holds its blocks; its prompt is to be computed here."""
        pace = sequence.pace
        model, kv_tokens = self.book.pacer.model, self._blocks.num_blocks * self._blocks.block_size
        prompt = WaitingPrompt(
            sequence,
            deadline_s,
            pace.is_batch,
            decode_s=self.lives.decode_s(sequence, model, kv_tokens),
            load_s=model.per_token_s + model.per_context_s * sequence.num_tokens,
        )
        self._prompts[sequence.key] = prompt
        insort(self._prefilling, sequence, key=_age)
        self.book.pacer.prompts.add(prompt)

    def _unwait(self, sequence: Sequence) -> None:
        self._prefilling.remove(sequence)
        self.book.pacer.prompts.remove(self._prompts.pop(sequence.key))

    # ---- blocks

    def _has_room(self, sequence: Sequence) -> bool:
        """For one more token. Without blocks it was preempted by an older one, a moment ago."""
        room = len(sequence.block_ids) * self._blocks.block_size
        return room > 0 and (len(sequence.token_ids) <= room or self._grow(sequence))

    def _grow(self, sequence: Sequence) -> bool:
        """One more block, by preemption if need be; False: the sequence has to wait."""
        while (fresh := self._blocks.allocate(1)) is None:
            youngest = self._youngest()
            if youngest is sequence:
                return False
            self._preempt(youngest)
        sequence.block_ids += fresh
        return True

    def _youngest(self) -> Sequence:
        return max((*self._decoding[-1:], *self._prefilling[-1:]), key=_age)

    def _preempt(self, sequence: Sequence) -> None:
        if sequence in self._decoding[-1:]:
            self._decoding.pop()
        else:
            self._unwait(sequence)
        self._free(sequence)
        insort(self._preempted, sequence, key=_age)
        self.num_preemptions += 1

    def _resume(self, now: float) -> None:
        while self._preempted:
            sequence = self._preempted[0]
            num_running = self.num_running
            size = self._blocks.block_size
            num_blocks = num_blocks_for(sequence.num_tokens, size)
            keep_free = 0
            if num_running:  # else it takes what it can get
                most = num_blocks_for(sequence.max_tokens_with_kv, size)
                num_blocks = max(num_blocks, min(num_blocks + self._config.growth_blocks, most))
                keep_free = num_running
            if not sequence.reserve(self._blocks, num_blocks, keep_free=keep_free):
                return
            self._preempted.pop(0)
            self._wait(sequence, now + self._config.targets.ttft_s)

    def _free(self, sequence: Sequence) -> None:
        if sequence.block_ids:
            sequence.publish(self._blocks)
            sequence.release(self._blocks)

    # ---- tokens

    def _append(self, sequence: Sequence, outputs: list[TokenOutput], now: float) -> Generated:
        """Behind the first, those that follow drafts which were right: only the last can end it."""
        index = sequence.num_generated
        if index == 0:
            sequence.pace.first_token(now)
        else:
            sequence.pace.token(now)
        reason = sequence.append(outputs[0].token_id)
        for further in outputs[1:]:
            sequence.advance(1)
            reason = sequence.append(further.token_id)
        if reason is not None:
            self._ended(sequence, now)
        return Generated(sequence, index, outputs, reason)

    def _ended(self, sequence: Sequence, now: float) -> None:
        self.lives.ended(sequence, now)
        self._drop(sequence)
        self._free(sequence)

    def _drop(self, sequence: Sequence) -> None:
        del self._all[sequence.request]
        if sequence.key in self._prompts:
            self._unwait(sequence)
            return
        for queue in (self._decoding, self._preempted):
            if sequence in queue:
                queue.remove(sequence)
