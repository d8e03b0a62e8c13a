"""Where a request is computed and where it decodes: the elastic policy, router side.

1. The router keeps one `Fleet`: a column per figure, an entry per worker. Workers report their load after
   each step or heartbeat; what has been placed since is added by the router.
2. `place(fleet, request, targets)` gives the pair (P, D), or a rejection. P == D: D prefills itself.
3. When a prompt begins, `choose_decode` may be asked again, with the load of that moment.

Algorithm:
  1. *P*: of the workers well in time for the TTFT target, the one whose seconds are worth least as decode;
     of equal ones, or if none is in time, the one with the soonest first token. Its queue (work of prompts
     expected in time) and this prompt's uncached tokens are divided by the share of a step that decode leaves
     there once all that is queued decodes. So a loaded decode worker is slow, a full one never chosen.
  2. *D*: of the workers whose predicted step, with all that is on its way there, stays within the TPOT (and
     gap) target, and whose KV has room: the one where decode costs least. The cost of a second is what that
     worker could do with it instead: (decode seconds per token) x (its prefill speed). So of unequal kinds
     each does what it is comparatively good at. Among equal ones P itself, which needs no transfer; else the
     least loaded. With a gap limit, the exposed transfer must fit into it as well.
  3. When D has no room within the target anywhere, the request decodes where it adds least above the target.

A prompt is not split between P and D: every worker that may do both lets chunks ride beside its decode rows,
so what a D has free is already offered as a P.

Order: ties go to the lower index.

When nothing fits: workers without KV room are taken only if all are full; `TOO_LARGE` if no worker could
ever hold it. Overload demotes, on the worker (`cluster.slo_schedule`), rather than rejects: a demoted request
still runs in what is left. It is rejected only when even that would take longer than `max_wait_s`, with the
time after which the backlog will have drained enough as `retry_after_s`.

Bounds: O(workers) in a few vector operations; no state, no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.slo_classes import Targets
from cluster.step_model import StepModel

Column = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Fleet:
    """The view, in columns: what workers are (fixed) and how they are loaded. Decisions only read it."""

    def __init__(self, models: list[StepModel], kv_tokens: list[int], bytes_s: list[float]) -> None:
        self.num_workers = len(models)
        self.fixed_s = np.array([model.fixed_s for model in models])
        self.floor_s = np.array([model.floor_s for model in models])
        self.per_token_s = np.array([model.per_token_s for model in models])
        self.per_context_s = np.array([model.per_context_s for model in models])
        self.per_attention_s = np.array([model.per_attention_s for model in models])
        ratios = self.per_context_s / self.per_token_s
        self.least_reading = float(ratios.min()) if models else 0.0  # of a key, in tokens computed, anywhere
        self.kv_tokens = np.array(kv_tokens, dtype=np.float64)
        self.bytes_s = np.array(bytes_s)
        count = self.num_workers
        self.can_prefill: Flags = np.ones(count, dtype=np.bool_)
        self.can_decode: Flags = np.ones(count, dtype=np.bool_)
        self.work_s: Column = np.zeros(count)  # prefill queued there, of prompts expected in time
        self.queued_load_s: Column = np.zeros(count)  # what that work will add to each step as decode, there
        self.rows: Column = np.zeros(count)  # decoding there
        self.context: Column = np.zeros(count)
        self.coming_rows: Column = np.zeros(count)  # placed there to decode, and not there yet
        self.coming_context: Column = np.zeros(count)
        self.kv_used: Column = np.zeros(count)
        self.late_s: Column = np.zeros(count)  # work of prompts that are late or demoted


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    safety: float = 0.985  # share of the targets that predictions must stay within
    min_share: float = 0.03  # of a step, assumed for prompts when decode leaves less
    early: float = 0.6  # share of the TTFT target within which a worker is well in time
    near: float = 0.05  # costs within this share of the least are equal
    local_bonus: float = 1.2  # so much longer may a step be where the prompt's KV is already
    far_fill: float = 0.95  # share of the target up to which a worker takes rows computed elsewhere
    max_wait_s: float = math.inf
    handoff_s: float = 0.002
    kv_headroom: float = 0.05  # of the pool, for growth


@dataclass(frozen=True, slots=True)
class Ask:
    """What placement knows of a request. `cached[w]`: tokens of its prefix on worker w; None: nowhere."""

    num_tokens: int
    expected_output: float
    cached: Column | None = None
    kv_bytes_per_token: int = 131_072
    life_s: float = math.inf  # mean time a row decodes


@dataclass(frozen=True, slots=True)
class Place:
    prefill: int
    decode: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class TurnAway:
    """`retry_after_s` None: never; it is too large for every worker."""

    retry_after_s: float | None


def place(fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> Place | TurnAway:
    """See the module."""
    fits = fleet.kv_tokens >= ask.num_tokens + 1
    if not fits.any():
        return TurnAway(None)
    ttft_s = predicted_ttft_s(fleet, ask, targets, settings)
    ttft_s = np.where(fits & fleet.can_prefill, ttft_s, np.inf)
    prefill = _choose_prefill(fleet, ask, ttft_s, targets, settings)
    soonest_s = float(ttft_s[prefill])
    if math.isfinite(settings.max_wait_s):
        late_s = float(np.where(fleet.can_prefill, fleet.late_s, np.inf).min())
        if soonest_s > targets.ttft_s and late_s > settings.max_wait_s:
            return TurnAway(late_s - settings.max_wait_s)
    decode = choose_decode(fleet, ask, prefill, targets, settings, min(soonest_s, targets.ttft_s))
    return Place(prefill, decode, soonest_s)


def _choose_prefill(
    fleet: Fleet, ask: Ask, ttft_s: Column, targets: Targets, settings: ElasticSettings
) -> int:
    """Where the prompt costs least decode elsewhere, of the workers well in time; else the soonest."""
    soonest = int(ttft_s.argmin())
    in_time = ttft_s <= settings.early * targets.ttft_s
    if not in_time[soonest]:
        return soonest
    cost = _own_s(fleet, ask) / (fleet.per_token_s + fleet.per_context_s * ask.num_tokens)
    cost = np.where(in_time, cost, np.inf)
    return int(np.where(cost <= float(cost.min()) * (1 + settings.near), ttft_s, np.inf).argmin())


def _own_s(fleet: Fleet, ask: Ask) -> Column:
    """Seconds of its uncached tokens, per worker."""
    start: Column | float = 0.0 if ask.cached is None else ask.cached
    rest = ask.num_tokens - start
    own_s: Column = rest * (fleet.per_token_s + fleet.per_attention_s * (start + (rest + 1) / 2))
    return own_s


def predicted_ttft_s(fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> Column:
    """Per worker, in the order of the fleet."""
    step_s = min(targets.tpot_s, targets.gap_s) * settings.safety
    own_s = _own_s(fleet, ask)
    staying = np.maximum(0.5, 1 - np.minimum(fleet.work_s + own_s, targets.ttft_s) / ask.life_s)
    reading_s = fleet.fixed_s + fleet.per_context_s * (fleet.context * staying + ask.num_tokens)
    load_s = reading_s + fleet.per_token_s * (fleet.rows * staying + 1) + fleet.queued_load_s
    share = 1 - load_s / step_s
    share = np.where(reading_s + fleet.queued_load_s + fleet.floor_s > step_s, 0.0, share)
    idle = (fleet.rows + fleet.queued_load_s) == 0
    share = np.where(idle, 0.95, np.maximum(share, settings.min_share))
    return (fleet.work_s + own_s) / share + np.where(idle, fleet.fixed_s + fleet.floor_s, step_s / 2)


def choose_decode(
    fleet: Fleet, ask: Ask, prefill: int, targets: Targets, settings: ElasticSettings, wait_s: float
) -> int:
    """The worker where a prompt that worker `prefill` has computed in `wait_s` should decode."""
    step_limit_s = min(targets.tpot_s, targets.gap_s) * settings.safety
    staying = max(0.5, 1 - wait_s / ask.life_s)
    if _is_best_where_computed(fleet, ask, prefill, step_limit_s, staying, settings):
        return prefill
    rows = fleet.rows * staying + fleet.coming_rows + 1
    context = fleet.context * staying + fleet.coming_context + ask.num_tokens
    busy_s = fleet.per_token_s * rows
    step_s = fleet.fixed_s + np.maximum(fleet.floor_s, busy_s) + fleet.per_context_s * context
    room = fleet.kv_tokens * (1 - settings.kv_headroom) - fleet.kv_used - fleet.coming_context
    fits = room >= ask.num_tokens + ask.expected_output
    fits[prefill] = True  # it has the prompt's KV already
    can = fits & fleet.can_decode
    if math.isfinite(targets.gap_s):
        moving_s = settings.handoff_s + ask.num_tokens * ask.kv_bytes_per_token / fleet.bytes_s * 0.1
        moving_s[prefill] = 0.0
        can &= step_s + moving_s <= targets.gap_s * settings.safety
    lag_s = settings.handoff_s + ask.num_tokens * ask.kv_bytes_per_token / fleet.bytes_s * 0.1 + step_limit_s
    far_limit_s = settings.far_fill * step_limit_s - lag_s / max(1.0, 0.5 * ask.expected_output)
    good = can & (step_s <= far_limit_s)
    good[prefill] = can[prefill] and step_s[prefill] <= step_limit_s * settings.local_bonus
    if not good.any():
        if not can.any():
            can = fleet.can_decode
        over_s = np.where(can, step_s, np.inf)
        best = int(over_s.argmin())
        is_near = can[prefill] and step_s[prefill] <= over_s[best] * settings.local_bonus
        return prefill if is_near else best
    cost = (fleet.per_token_s + fleet.per_context_s * ask.num_tokens) / fleet.per_token_s
    cost = np.where(good, cost, np.inf)
    near = float(cost.min()) * (1 + settings.near)
    if cost[prefill] <= near:
        return prefill
    return int(np.where(cost <= near, step_s, np.inf).argmin())


def _is_best_where_computed(
    fleet: Fleet, ask: Ask, at: int, limit_s: float, staying: float, settings: ElasticSettings
) -> bool:
    """No other worker is cheaper by more than `near`, and this one has room within the target: what the whole
    comparison would say too, at the price of a few numbers (in a pool of equals, nearly always)."""
    ratio = float(fleet.per_context_s[at] / fleet.per_token_s[at])
    least = 1 + fleet.least_reading * ask.num_tokens
    if not fleet.can_decode[at] or 1 + ratio * ask.num_tokens > least * (1 + settings.near):
        return False
    rows = float(fleet.rows[at]) * staying + float(fleet.coming_rows[at]) + 1
    context = float(fleet.context[at]) * staying + float(fleet.coming_context[at]) + ask.num_tokens
    busy_s = max(float(fleet.floor_s[at]), float(fleet.per_token_s[at]) * rows)
    step_s = float(fleet.fixed_s[at]) + busy_s + float(fleet.per_context_s[at]) * context
    return step_s <= limit_s * settings.local_bonus
