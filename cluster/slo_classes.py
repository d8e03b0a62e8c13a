"""Who will be on time, if prompts are computed in order of deadline: what the scheduler's classes rest on.

1. `Prompt` is what planning reads of a prompt, `DecodeBatch` of what decodes beside.
2. `classify` finds the most prompts that can be on time; the rest is demoted. See `cluster.slo_schedule`.
3. `shortest_first` lets short prompts go before longer ones that can bear it.

Pure: no state, no clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from cluster.step_model import StepModel, chunk_attention


class Targets(msgspec.Struct, frozen=True):
    """What a request is promised, in seconds."""

    ttft_s: float
    tpot_s: float  # mean over the answer
    gap_s: float = math.inf  # between any two tokens


DEFAULT_TARGETS = Targets(ttft_s=2.0, tpot_s=0.1)

# What a live worker gives to prompts that are not on time; routers predict waits by it.
AGED_SHARE = 0.05  # of its time, in any case
LATE_SHARE = 1.0  # of what is left beside work on time, before rows that yield
OVERDUE_SHARE = 0.25  # of what rows with a target leave, once one has waited four times its target


class Prompt(Protocol):
    """What planning reads of a prompt; it changes nothing."""

    @property
    def is_batch(self) -> bool: ...  # it takes what the others leave
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


class DecodeBatch(msgspec.Struct, frozen=True):
    """What decodes here.

    `budget_s`: how long the next step may take, the least `step_budget_s` of the streams; None without one.
    `target_s`: the time per step to aim at for those streams; None: as the scheduler's targets say.
    `bearable_s`: how long a step may take after which all streams but a few are still in time.
    `longest_s`: of a step, for the sake of gaps between tokens.
    """

    num_rows: int = 0
    context: int = 0
    budget_s: float | None = None
    target_s: float | None = None
    num_yielding: int = 0  # rows that are late or batch work: they need not be in every step
    yielding_context: int = 0
    paused_s: float = 0.0  # since the row that yields longest was in a step
    life_s: float = math.inf  # mean time a row decodes here
    longest_s: float = math.inf
    bearable_s: float = 0.0


def prefill_s(model: StepModel, num_tokens: int, num_computed: int) -> float:
    """Seconds that the rest of a prompt adds to steps beyond the ridge."""
    rest = num_tokens - num_computed
    return model.per_token_s * rest + model.per_attention_s * chunk_attention(num_computed, rest)


class Classes(msgspec.Struct, Generic[P], frozen=True):
    on_time: Sequence[P]  # by deadline
    demoted: Sequence[P]  # by deadline
    work_s: float  # prefill of those on time
    load_s: float  # what their decode will add to each step here
    slack_s: Sequence[float]  # of those on time: from when they are expected until they are due
    own_s: Sequence[float]  # what each of those on time makes the ones behind it wait


def classify(
    prompts: Iterable[P],
    now: float,
    model: StepModel,
    decode: DecodeBatch,
    tpot_s: float,
    min_share: float,
    shared: float = 1.0,
) -> Classes[P]:
    """Who will be on time; see the module.

    Args:
        prompts: by deadline.
        tpot_s: length of a step.
        shared: of what decode leaves of a step, the share of those on time.
    """
    kept: list[tuple[float, int, float, float, P]] = []  # (-total cost, order, prefill, load, prompt)
    dropped: list[tuple[int, P]] = []
    slack_s: list[float] = []  # by order, as `own_s`
    own_s: list[float] = []
    per_token_s, per_attention_s = model.per_token_s, model.per_attention_s
    reading_s = model.per_context_s * decode.context
    leaving = 1 / decode.life_s
    mixed_s = model.mixed_s if decode.num_rows else 0.0
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
        share = max(share * shared, min_share)
        wait_s = (work_s + mixed_s) / share
        if decode.num_rows and num_kept > 1 and wait_s > tpot_s:
            wait_s += tpot_s / 2  # a first token comes when its step ends, with those of others
        own_s.append(cost_s / share)
        if now + wait_s > prompt.deadline_s:
            _, index, cost_s, extra_s, victim = heapq.heappop(kept)
            num_kept -= 1
            work_s -= cost_s
            added_s -= extra_s
            wait_s = min(wait_s, prompt.deadline_s - now)
            dropped.append((index, victim))
        slack_s.append(prompt.deadline_s - now - wait_s)
    if len(kept) > 1:
        kept.sort(key=lambda entry: entry[1])
    if len(dropped) > 1:
        dropped.sort(key=lambda entry: entry[0])
    return Classes(
        [entry[4] for entry in kept],
        [prompt for _, prompt in dropped],
        work_s,
        added_s,
        [slack_s[entry[1]] for entry in kept],
        [own_s[entry[1]] for entry in kept],
    )


def shortest_first(classes: Classes[P], share: float) -> list[P]:
    """The prompts on time; in front those that are shorter than the earliest one and make nobody late by it.

    Taken shortest first, each if it and those before it take at most `share` of the slack of every prompt
    that they overtake.
    """
    on_time = list(classes.on_time)
    if len(on_time) < 2 or share <= 0:
        return on_time
    least_s, overtaken_s = math.inf, []  # the least slack of those with earlier deadlines
    for slack_s in classes.slack_s:
        overtaken_s.append(least_s)
        least_s = min(least_s, slack_s)
    first, used_s = [], 0.0
    for index in sorted(range(1, len(on_time)), key=classes.own_s.__getitem__):
        own_s = classes.own_s[index]
        if own_s >= classes.own_s[0]:
            break
        if used_s + own_s <= share * overtaken_s[index]:
            first.append(index)
            used_s += own_s
    chosen = set(first)
    return [on_time[index] for index in (*first, *(i for i in range(len(on_time)) if i not in chosen))]
