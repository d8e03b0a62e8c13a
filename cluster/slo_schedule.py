"""Which prompts a worker computes in its next step, and how much of each: the elastic policy, worker side.

1. A prompt arrives: `SloScheduler.add`. It has a deadline for its first token and an expected decode cost.
2. Before each step `plan(now, decode)` gives the chunks that ride in it.
3. `remove` takes a prompt out when it is computed, cancelled or moved.

Algorithm of `plan`:
  1. *Budget*: the step may last until the tightest stream in the batch is due: its mean TPOT so far says how
     long (`step_budget_s`), the worst-gap limit caps it. Where mixed steps have a price, it is enough for a
     chunk that is worth it, or none (`lent_budget_s`).
  2. *Classes*: earliest deadline first, with the work summed up. Decode takes part of each step, and the
     queued prompts bring more of it once they decode, so work is divided by the share of a step that is then
     left. When a prompt would be late, the one that costs most in all (prefill and expected decode) among
     those up to it is demoted: the most requests on time (Moore and Hodgson). Classes are found anew for each
     step, so a demoted prompt is on time again as soon as there is room. A prompt past its deadline is late
     for good. Batch prompts are never on time: they have no deadline that anything gives way to.
  3. *Chunks*: prompts on time, in order of deadline, as many tokens as fit the budget; then, of what is left,
     late ones, demoted ones and batch ones, the oldest first, if their decode too leaves the batch within its
     target. While rows yield, `late_share` of what is left is these prompts', then the rows come, then these
     prompts again: no target is at stake between them, and a first token is waited for most. With
     `short_slack`, a short prompt goes before longer ones with earlier deadlines, as long as it takes no more
     than that share of their slack: nobody becomes late by it. A step that completes a prompt ends when that
     is due.
  4. A step that would be empty takes a chunk whatever the budget: a worker that can compute does.

Order: deadline, then arrival. Nobody is demoted while the work fits. A prompt that has been late for
`overdue_s` goes before those on time, in `overdue_share` of what the rows with a target leave of a step.

When nothing fits: no chunk; the decode batch goes on alone.

Bounds: prompts that are not on time have `aged_share` of the worker's time: the oldest of them runs in any
case once that share has paid for it, even if the step then takes longer than its budget; if there is no KV
for it by then, nobody else begins until there is. So it waits at most (what it and those demoted before it
cost) / aged_share, and for the KV of those that have begun. It has a part of a step every `max_pause_s` in
any case, and so have the rows that yield. A plan is O(n log n) in the prompts looked at, at most
`max_looked_at`.

No IO, no clock.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Generic

import msgspec

from cluster.slo_budget import SloSettings as SloSettings
from cluster.slo_budget import aim_s, lent_budget_s, step_budget_s
from cluster.slo_classes import DecodeBatch, P, Prompt, Targets, classify, prefill_s, shortest_first
from cluster.slo_step import StepFilling
from cluster.step_model import StepModel, StepWork


class StepPlan(msgspec.Struct, Generic[P], frozen=True):
    """(prompt, tokens) to compute, and how many of the rows that yield are in the step."""

    chunks: list[tuple[P, int]]
    num_yielding: int


class SloScheduler(Generic[P]):
    """Owns the prompts that wait on one worker; see the module."""

    def __init__(self, model: StepModel, targets: Targets, settings: SloSettings | None = None) -> None:
        self.model = model
        self.targets = targets  # of requests that ask for nothing else
        self.settings = settings or SloSettings()
        self.work_s = 0.0  # prefill of the prompts on time, as of the last plan and the prompts added since
        self.load_s = 0.0  # what their decode will add to each step
        self.on_time_share = 1.0  # of what rows with a target leave: theirs, not the overdue prompts'
        self.num_demoted = 0
        self.newly_late: list[P] = []  # found past their deadlines by the last plan
        self.planned_late_s: float | None = None  # in the last plan, of those not on time; None: none waited
        self._waiting: list[P] = []  # by deadline
        self._late: deque[P] = deque()  # past their deadlines, oldest first
        self._batch: list[P] = []  # by deadline
        self._demoted: Sequence[P] = ()
        self._credit_s = 0.0
        self._is_owed = False
        self._planned_at = 0.0
        self._aged_at = 0.0  # when the oldest of those not on time last had a chunk

    def __len__(self) -> int:
        return len(self._waiting) + len(self._late) + len(self._batch)

    @property
    def num_late(self) -> int:
        return len(self._late)

    @property
    def late_s(self) -> float:
        """Prefill of the prompts that are late, of the batch class, or were demoted by the last plan."""
        if not (self._late or self._batch or self._demoted):
            return 0.0
        prompts = chain(self._late, self._batch, self._demoted)
        return sum(prefill_s(self.model, one.num_tokens, one.num_computed) for one in prompts)

    def add(self, prompt: P) -> None:
        if prompt.is_batch:
            insort(self._batch, prompt, key=_deadline)
            return
        insort(self._waiting, prompt, key=_deadline)
        self.work_s += prefill_s(self.model, prompt.num_tokens, prompt.num_computed)
        self.load_s += prompt.load_s

    def remove(self, prompt: P) -> None:
        """Raises ValueError if it is not here."""
        if self._demoted:
            self._demoted = [other for other in self._demoted if other is not prompt]
        for queue in (self._waiting, self._batch):
            for index, other in enumerate(queue):
                if other is prompt:
                    del queue[index]
                    return
        self._late.remove(prompt)

    def plan(
        self,
        now: float,
        decode: DecodeBatch,
        room: int,
        reserve: int = 0,
        begin: Callable[[P], None] | None = None,
    ) -> StepPlan[P]:
        """The step that begins now.

        Args:
            room: tokens of KV that prompts not yet begun may take; a prompt begins only if all of it fits.
            reserve: tokens of KV that one that is not on time must leave.
            begin: called for each prompt that begins, to take its KV; it may find part of it computed.
        """
        self._expire(now)
        settings, model = self.settings, self.model
        tpot_s = decode.target_s or aim_s(self.targets, settings)
        budget_s = decode.budget_s
        if budget_s is None:
            least_s = model.step_s(StepWork(1))  # targets tighter than that leave half of a step to prompts
            budget_s = max(step_budget_s(self.targets, math.inf, settings), 2 * least_s)
        if not decode.num_rows:
            budget_s = max(budget_s, model.fixed_s / settings.fixed_share)
        elif decode.budget_s is not None and model.mixed_s > settings.price_from * tpot_s:
            budget_s = lent_budget_s(model, decode, budget_s, tpot_s, self.work_s, settings)
        looked_at = self._waiting[: settings.max_looked_at]
        overdue = self._overdue(now)
        self.on_time_share = shared = 1.0 - settings.overdue_share if overdue else 1.0
        classes = classify(looked_at, now, model, decode, tpot_s, settings.min_share, shared)
        self.work_s, self.load_s, self._demoted = classes.work_s, classes.load_s, classes.demoted
        self.num_demoted = len(classes.demoted)
        step: StepFilling[P] = StepFilling(
            model, decode, now, budget_s, room, settings.max_chunk_tokens, begin
        )
        yield_s = model.per_token_s * decode.num_yielding + model.per_context_s * decode.yielding_context
        oldest = self._oldest()
        self._earn(now, is_owed=oldest is not None or decode.num_yielding > 0)
        if decode.num_yielding and (self._credit_s >= yield_s or decode.paused_s >= settings.max_pause_s):
            step.add_yielding(decode, decode.num_yielding)
            self._credit_s = max(0.0, self._credit_s - yield_s)
        if oldest is not None:
            self._age(oldest, step, tpot_s, now, may_claim=not decode.num_yielding)
        if overdue:
            self._lend(step, overdue, settings.overdue_share, reserve)
        on_time = shortest_first(classes, settings.short_slack)
        for prompt in on_time:
            if not step.take(prompt):
                break
        if decode.num_yielding and not step.num_yielding and settings.late_share > 0:
            self._lend(step, self._not_on_time(), settings.late_share, reserve)
        if decode.num_yielding and not step.num_yielding:
            if step.is_empty or step.has_room(yield_s):
                step.add_yielding(decode, decode.num_yielding)
            elif settings.splits_yielding:
                step.add_yielding(decode, step.most_yielding(decode))
        if step.num_yielding == decode.num_yielding:
            limit_s = settings.yielding_load * tpot_s - yield_s
            step.keep(reserve)
            waiting = () if oldest is None else islice(self._not_on_time(), settings.max_late_looked_at)
            for prompt in waiting:
                if (prompt.load_s <= limit_s or not decode.num_yielding) and not step.take(prompt):
                    break
        if step.is_empty:
            for prompt in chain(on_time, self._not_on_time()):
                if step.force(prompt, max(tpot_s, settings.max_idle_step_s)):
                    break
        if oldest is None or step.has(oldest):
            self._aged_at = now
        chunks = step.chunks
        self.planned_late_s = None if oldest is None else self._late_s(chunks, on_time)
        return StepPlan(chunks, step.num_yielding)

    def _not_on_time(self) -> Iterable[P]:
        return chain(self._late, self._demoted, self._batch)

    def _oldest(self) -> P | None:
        """Of those that are not on time."""
        if self._late or self._batch:
            return min([queue[0] for queue in (self._late, self._batch) if queue], key=_deadline)
        return self._demoted[0] if self._demoted else None

    def _lend(self, step: StepFilling[P], prompts: Iterable[P], share: float, reserve: int) -> None:
        """This share of what is left of the step's budget."""
        end_s = step.end_of_share_s(share)
        step.keep(reserve)
        for prompt in islice(prompts, self.settings.max_late_looked_at):
            if not step.take(prompt, end_s):
                break
        step.keep(-reserve)

    def _overdue(self, now: float) -> list[P]:
        """Oldest first; batch work never is."""
        if not self._late:
            return []
        since_s = now - self.settings.overdue_s
        late = islice(self._late, self.settings.max_late_looked_at)
        return [prompt for prompt in late if prompt.deadline_s <= since_s]

    def _late_s(self, chunks: list[tuple[P, int]], on_time: Sequence[P]) -> float:
        """What these chunks compute of prompts that are not on time."""
        ids = set(map(id, on_time))
        model = self.model
        return sum(
            prefill_s(model, prompt.num_computed + count, prompt.num_computed)
            for prompt, count in chunks
            if id(prompt) not in ids
        )

    def _expire(self, now: float) -> None:
        if not self._waiting or self._waiting[0].deadline_s > now:
            self.newly_late = []
            return
        count = 0
        for prompt in self._waiting:
            if prompt.deadline_s > now:
                break
            count += 1
        self.newly_late = self._waiting[:count]
        self._late.extend(self.newly_late)
        del self._waiting[:count]

    def _earn(self, now: float, is_owed: bool) -> None:
        """What those that are not on time may claim: a share of the time since somebody has waited."""
        if not is_owed:
            self._credit_s = 0.0
        elif self._is_owed:
            self._credit_s += (now - self._planned_at) * self.settings.aged_share
        self._is_owed, self._planned_at = is_owed, now

    def _age(self, oldest: P, step: StepFilling[P], tpot_s: float, now: float, *, may_claim: bool) -> None:
        """A chunk for the oldest one, from the share it has waited for, or because it has paused long enough.
        While rows yield, the share is theirs."""
        rest_s = prefill_s(self.model, oldest.num_tokens, oldest.num_computed)
        wanted_s = min(rest_s, tpot_s / 4)
        new_tokens = oldest.new_kv_tokens
        if may_claim and 0 < new_tokens > step.room and self._credit_s >= rest_s + oldest.decode_s:
            step.keep(step.room)  # it has waited for all it costs: nobody else begins before it
            return
        is_paid = may_claim and self._credit_s >= wanted_s
        if (is_paid or now - self._aged_at >= self.settings.max_pause_s) and step.force(oldest, wanted_s):
            self._credit_s = max(0.0, self._credit_s - wanted_s)


def _deadline(prompt: Prompt) -> float:
    return prompt.deadline_s
