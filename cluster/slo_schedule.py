"""Which prompts a worker computes in its next step, and how much of each: the elastic policy, worker side.

1. A prompt arrives: `SloScheduler.add`. It has a deadline for its first token and an expected decode cost.
2. Before each step `plan(now, decode)` gives the chunks that ride in it.
3. `remove` takes a prompt out when it is computed, cancelled or moved.

Algorithm of `plan`:
  1. *Budget*: the step may last until the tightest stream in the batch is due: its mean TPOT so far says how
     long (`step_budget_s`), the worst-gap limit caps it.
  2. *Classes*: earliest deadline first, with the work summed up. Decode takes part of each step, and the
     queued prompts bring more of it once they decode, so work is divided by the share of a step that is then
     left. When a prompt would be late, the one that costs most in all (prefill and expected decode) among
     those up to it is demoted: the most requests on time (Moore and Hodgson). Classes are found anew for each
     step, so a demoted prompt is on time again as soon as there is room. A prompt past its deadline is late
     for good.
  3. *Chunks*: prompts on time, in order of deadline, as many tokens as fit the budget; then, of what is left,
     late and demoted ones, the oldest first, if their decode too leaves the batch within its target.

Order: deadline, then arrival. Nobody is demoted while the work fits.

When nothing fits: no chunk; the decode batch goes on alone.

Bounds: a prompt that is not on time has `aged_share` of the worker's time: the oldest of them runs in any
case once that share has paid for it, even if the step then takes longer than its budget; if there is no KV
for it by then, nobody else begins until there is. So it waits at most (what it and those demoted before it
cost) / aged_share, and for the KV of those that have begun. A plan is O(n log n) in the prompts looked at, at
most `max_looked_at`.

No IO, no clock.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

from cluster.step_model import StepModel, StepWork, chunk_attention


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request is promised, in seconds."""

    ttft_s: float
    tpot_s: float  # mean over the answer
    gap_s: float = math.inf  # between any two tokens


class Prompt(Protocol):
    """What planning reads of a prompt; it changes nothing."""

    @property
    def deadline_s(self) -> float: ...  # of the first token
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed(self) -> int: ...  # cached ones too
    @property
    def decode_s(self) -> float: ...  # expected decode, all of it, in seconds of this worker
    @property
    def load_s(self) -> float: ...  # what its decode adds to each step here; 0 if it decodes elsewhere
    @property
    def new_kv_tokens(self) -> int: ...  # KV it takes when it begins; 0 once it has begun


P = TypeVar("P", bound=Prompt)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """What decodes here. `slack_s`: from now until the tightest stream is due; inf without one."""

    num_rows: int = 0
    context: int = 0
    slack_s: float = math.inf
    num_yielding: int = 0  # rows whose first token was late: they need not be in every step
    yielding_context: int = 0
    life_s: float = math.inf  # mean time a row decodes here


@dataclass(frozen=True, slots=True)
class SloSettings:
    safety: float = 0.985  # share of the TPOT and gap targets that steps aim at
    max_idle_step_s: float = 0.05  # step without streams that have a target
    min_share: float = 0.03  # of a step, assumed for prompts when decode leaves less
    yielding_load: float = 0.25  # share of a step that rows which yield may take; more prompts do not begin
    aged_share: float = 0.01  # of the time, for those that are not on time
    bank_use: float = 0.25  # share of a stream's lead that one step may use
    catch_up: float = 0.1  # share of a stream's lag that one step makes up for
    max_looked_at: int = 256
    max_late_looked_at: int = 16


def step_budget_s(targets: Targets, slack_s: float, settings: SloSettings) -> float:
    """How long the next step may take.

    A stream in time is due one TPOT from now. One with a lead allows for more, one that lags for less: part
    of the difference is used per step, since the mean counts. Never above the gap limit, nor below half a
    TPOT.
    """
    tpot_s = targets.tpot_s * settings.safety
    lead_s = slack_s - targets.tpot_s
    if math.isinf(lead_s):
        budget_s = max(tpot_s, settings.max_idle_step_s)
    else:
        budget_s = tpot_s + lead_s * (settings.bank_use if lead_s > 0 else settings.catch_up)
        budget_s = max(budget_s, 0.5 * tpot_s)
    return min(budget_s, targets.gap_s * settings.safety)


def prefill_s(model: StepModel, num_tokens: int, num_computed: int) -> float:
    """Seconds that the rest of a prompt adds to steps beyond the ridge."""
    rest = num_tokens - num_computed
    return model.per_token_s * rest + model.per_attention_s * chunk_attention(num_computed, rest)


@dataclass(frozen=True, slots=True)
class Classes(Generic[P]):
    on_time: Sequence[P]  # by deadline
    demoted: Sequence[P]  # by deadline
    work_s: float  # prefill of those on time
    load_s: float  # what their decode will add to each step here


def classify(
    prompts: Iterable[P], now: float, model: StepModel, decode: DecodeBatch, tpot_s: float, min_share: float
) -> Classes[P]:
    """Who will be on time; see the module.

    Args:
        prompts: by deadline.
        tpot_s: length of a step.
    """
    kept: list[tuple[float, int, float, float, P]] = []  # (-total cost, order, prefill, load, prompt)
    dropped: list[tuple[int, P]] = []
    per_token_s, per_attention_s = model.per_token_s, model.per_attention_s
    reading_s = model.per_context_s * decode.context
    leaving = 1 / decode.life_s
    work_s = added_s = 0.0
    wait_s, num_kept = 0.0, 0
    load_s = model.per_token_s * decode.num_rows + reading_s
    for order, prompt in enumerate(prompts):
        start = prompt.num_computed
        rest = prompt.num_tokens - start
        cost_s = rest * (per_token_s + per_attention_s * (start + (rest + 1) / 2))
        extra_s = prompt.load_s
        heapq.heappush(kept, (-(cost_s + prompt.decode_s), order, cost_s, extra_s, prompt))
        num_kept += 1
        work_s += cost_s
        added_s += extra_s
        staying = max(0.5, 1 - wait_s * leaving)
        share = 1 - (model.fixed_s + load_s * staying + added_s) / tpot_s
        if model.fixed_s + model.floor_s + reading_s * staying + added_s - num_kept * per_token_s > tpot_s:
            share = 0.0
        wait_s = work_s / max(share, min_share)
        if now + wait_s > prompt.deadline_s:
            _, index, cost_s, extra_s, victim = heapq.heappop(kept)
            num_kept -= 1
            work_s -= cost_s
            added_s -= extra_s
            wait_s = min(wait_s, prompt.deadline_s - now)
            dropped.append((index, victim))
    kept.sort(key=lambda entry: entry[1])
    dropped.sort(key=lambda entry: entry[0])
    return Classes([entry[4] for entry in kept], [prompt for _, prompt in dropped], work_s, added_s)


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[P]):
    """(prompt, tokens) to compute, and whether the rows that yield are in the step."""

    chunks: list[tuple[P, int]]
    runs_yielding: bool


class SloScheduler(Generic[P]):
    """Owns the prompts that wait on one worker; see the module."""

    def __init__(self, model: StepModel, targets: Targets, settings: SloSettings | None = None) -> None:
        self.model = model
        self.targets = targets
        self.settings = settings or SloSettings()
        self.work_s = 0.0  # prefill of the prompts on time, as of the last plan and the prompts added since
        self.load_s = 0.0  # what their decode will add to each step
        self.num_demoted = 0
        self.newly_late: list[P] = []  # found past their deadlines by the last plan
        self._waiting: list[P] = []  # by deadline
        self._late: deque[P] = deque()  # past their deadlines, oldest first
        self._credit_s = 0.0
        self._planned_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._late)

    @property
    def num_late(self) -> int:
        return len(self._late)

    def add(self, prompt: P) -> None:
        insort(self._waiting, prompt, key=lambda other: other.deadline_s)
        self.work_s += prefill_s(self.model, prompt.num_tokens, prompt.num_computed)
        self.load_s += prompt.load_s

    def remove(self, prompt: P) -> None:
        """Raises ValueError if it is not here."""
        for index, other in enumerate(self._waiting):
            if other is prompt:
                del self._waiting[index]
                return
        self._late.remove(prompt)

    def plan(self, now: float, decode: DecodeBatch, room: int, reserve: int = 0) -> StepPlan[P]:
        """The step that begins now. `room`: tokens of KV that prompts not yet begun may take; a prompt begins
        only if all of it fits, and one that is not on time leaves `reserve` of them."""
        self._expire(now)
        settings, model = self.settings, self.model
        tpot_s = min(self.targets.tpot_s, self.targets.gap_s) * settings.safety
        looked_at = self._waiting[: settings.max_looked_at]
        classes = classify(looked_at, now, model, decode, tpot_s, settings.min_share)
        self.work_s, self.load_s, self.num_demoted = classes.work_s, classes.load_s, len(classes.demoted)
        step: _Step[P] = _Step(model, decode, step_budget_s(self.targets, decode.slack_s, settings), room)
        yield_s = model.per_token_s * decode.num_yielding + model.per_context_s * decode.yielding_context
        oldest = self._late[0] if self._late else classes.demoted[0] if classes.demoted else None
        self._earn(now, is_owed=oldest is not None or decode.num_yielding > 0)
        if decode.num_yielding and self._credit_s >= yield_s:
            step.add_rows(decode.num_yielding, decode.yielding_context)
            self._credit_s -= yield_s
        elif oldest is not None and not decode.num_yielding:
            self._age(oldest, step, tpot_s)
        for prompt in classes.on_time:
            if not step.take(prompt):
                break
        if decode.num_yielding and not step.has_yielding and step.has_room(yield_s):
            step.add_rows(decode.num_yielding, decode.yielding_context)
        if not decode.num_yielding or step.has_yielding:
            limit_s = settings.yielding_load * tpot_s - yield_s
            step.keep(reserve)
            for prompt in islice(chain(self._late, classes.demoted), settings.max_late_looked_at):
                if (prompt.load_s <= limit_s or not decode.num_yielding) and not step.take(prompt):
                    break
        return StepPlan(step.chunks, step.has_yielding)

    def _expire(self, now: float) -> None:
        count = 0
        for prompt in self._waiting:
            if prompt.deadline_s > now:
                break
            count += 1
        self.newly_late = self._waiting[:count]
        self._late.extend(self.newly_late)
        del self._waiting[:count]

    def _earn(self, now: float, is_owed: bool) -> None:
        """What those that are not on time may claim."""
        earned_s = (now - self._planned_at) * self.settings.aged_share if is_owed else -self._credit_s
        self._credit_s, self._planned_at = self._credit_s + earned_s, now

    def _age(self, oldest: P, step: _Step[P], tpot_s: float) -> None:
        """A chunk for the oldest one, from the share it has waited for."""
        rest_s = prefill_s(self.model, oldest.num_tokens, oldest.num_computed)
        wanted_s = min(rest_s, tpot_s / 4)
        if oldest.new_kv_tokens > step.room and self._credit_s >= rest_s + oldest.decode_s:
            step.keep(step.room)  # it has waited for all it costs: nobody else begins before it
            return
        if self._credit_s >= wanted_s and step.force(oldest, wanted_s):
            self._credit_s -= wanted_s


class _Step(Generic[P]):
    """The chunks of one step as they are chosen."""

    def __init__(self, model: StepModel, decode: DecodeBatch, budget_s: float, room: int) -> None:
        self.chunks: list[tuple[P, int]] = []
        self.has_yielding = False
        self._model = model
        self._budget_s = budget_s
        self.room = room
        self._tokens = decode.num_rows
        self._context = decode.context
        self._attention = 0.0

    def has_room(self, seconds: float) -> bool:
        """Whether more work of so many seconds keeps the budget (beyond the ridge)."""
        return self._model.step_s(self._work) + seconds <= self._budget_s

    def add_rows(self, num_rows: int, context: int) -> None:
        """Rows that yield, all of them."""
        self._tokens += num_rows
        self._context += context
        self.has_yielding = True

    def keep(self, num_tokens: int) -> None:
        """KV that whoever comes now must leave."""
        self.room -= num_tokens

    @property
    def _work(self) -> StepWork:
        return StepWork(self._tokens, self._context, self._attention)

    def take(self, prompt: P) -> bool:
        """False: the step is full."""
        return self._take(prompt, self._budget_s)

    def force(self, prompt: P, wanted_s: float) -> bool:
        """A chunk of at most `wanted_s`, within the budget or not. False: there is no KV for it."""
        count = len(self.chunks)
        self._take(prompt, self._model.step_s(self._work) + wanted_s)
        return len(self.chunks) > count

    def _take(self, prompt: P, budget_s: float) -> bool:
        start = prompt.num_computed
        new_tokens = prompt.new_kv_tokens
        if new_tokens > self.room:
            return True  # others may be smaller
        if self.chunks and self.chunks[0][0] is prompt:
            return True  # it has its chunk
        count = self._model.most_chunk_tokens(self._work, start, prompt.num_tokens - start, budget_s)
        if count <= 0:
            return False
        self.chunks.append((prompt, count))
        self.room -= new_tokens
        self._tokens += count
        self._attention += chunk_attention(start, count)
        return True
