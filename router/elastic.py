"""Where a request is computed and where it decodes: the elastic policy, router side.

1. The router keeps one `Fleet`: a column per figure, an entry per worker. Workers report their load after
   each step or heartbeat; what has been placed since is added by the router.
2. `place(fleet, ask, targets, settings)` gives the pair (P, D), or a rejection. P == D: D prefills itself.
3. When a prompt begins, `choose_decode` may be asked again, with the load of that moment.

The live router (`router.policy`) and the simulated pool (`bench.simulator.fleet`) call the same functions.

Algorithm:
  1. *P*: of the workers well in time for the TTFT target and with room for the prompt's KV, the one whose
     seconds are worth least as decode; of equal ones, or if none is in time, the one with the soonest first
     token. Its queue (work of prompts expected in time) and this prompt's uncached tokens are divided by the
     share of a step that decode leaves there once all that is queued decodes; KV it lacks is waited for. So a
     loaded decode worker is slow, and one that is full, of work or of KV, is never chosen.
  2. *D*: of the workers whose predicted step, with all that is on its way there, stays within the TPOT (and
     gap) target, and whose KV has room: the one where decode costs least. The cost of a second is what that
     worker could do with it instead: (decode seconds per token) x (its prefill speed). So of unequal kinds
     each does what it is comparatively good at. Among equal ones P itself, which needs no transfer; else the
     one whose steps, with the hand-off spread over the answer and the KV newly taken, are shortest: what a D
     has cached need neither move nor be held twice. With a gap limit, the exposed transfer must fit into it.
  3. When D has no room within the target anywhere, the request decodes where it adds least above the target.

Load is that of the moment when the prefill will have ended: rows leave at the rate at which rows end, and all
that was placed will have come.

A prompt is not split between P and D: every worker that may do both lets chunks ride beside its decode rows,
so what a D has free is already offered as a P.

Order: where the session was last, if no prefix is known; the least recently placed; the lower index.

When nothing fits: workers without KV room are taken only if all are full; for good, if no worker could ever
hold it. Overload demotes, on the worker (`cluster.slo_schedule`), rather than rejects: a demoted request
still runs, at the rate that such prompts get there (`_backlog_s`). It is rejected only when that would take
longer than `max_wait_s` everywhere, with the time after which the backlog will have drained enough.

Bounds: O(workers) in a few vector operations; no state, no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from cluster.slo_classes import AGED_SHARE, LATE_SHARE, OVERDUE_SHARE, Targets
from router.choosing import NONE, are_all, is_any, lowest, near, oldest, oldest_of, only
from router.fleet import Column, Flags, Fleet

_LONG_S = 1e6  # for "it never ends", where numbers must stay finite


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    safety: float = 0.985  # share of the targets that predictions must stay within
    min_share: float = 0.03  # of a step, assumed for prompts when decode leaves less
    early: float = 0.6  # share of the TTFT target within which a worker is well in time
    near: float = 0.05  # costs within this share of the least are equal
    tie: float = 0.02  # predictions within this share of the best are equal
    local_bonus: float = 1.2  # so much longer may a step be where the prompt's KV is already
    far_fill: float = 0.95  # share of the target up to which a worker takes rows computed elsewhere
    prefill_only_worth: float = 0.25  # of a second of a worker that cannot decode, against one that can
    handoff_s: float = 0.002
    kv_headroom: float = 0.05  # of the pool, for growth
    kv_worth: float = 0.5  # of a whole pool of KV newly taken, against a step as long as the target


class Ask(msgspec.Struct, frozen=True):
    """What placement knows of a request. `cached[w]`: tokens of its prefix on worker w; None: nowhere.

    `may_prefill` and `may_decode` narrow the workers for this request; None: as the fleet says.
    """

    num_tokens: int
    expected_output: float
    cached: Column | None = None
    kv_bytes_per_token: float = 131_072
    life_s: float = math.inf  # mean time a row decodes
    max_wait_s: float = math.inf  # for the first token, whatever the target
    may_prefill: Flags | None = None
    may_decode: Flags | None = None
    near_prefill: int = NONE  # rows where its session was last
    near_decode: int = NONE


class Place(msgspec.Struct, frozen=True):
    prefill: int
    decode: int
    ttft_s: float


class TurnAway(msgspec.Struct, frozen=True):
    """`retry_after_s` None: never; it is too large for every worker."""

    retry_after_s: float | None


class _Waits(msgspec.Struct, frozen=True):
    """Per worker, seconds from now until the first token. `own_s`: of its uncached tokens; `ttft_s`: of a
    prompt that is in time there; `lacks_kv`: the prompt's KV has no room yet."""

    own_s: Column
    ttft_s: Column
    lacks_kv: Flags | None  # None: nobody
    mine_s: Column
    start_s: Column | float


def place(fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> Place | TurnAway:
    """See the module."""
    decodes = fleet.can_decode if ask.may_decode is None else ask.may_decode
    able = ask.may_prefill
    if able is None:
        able = fleet.can_prefill & (fleet.kv_tokens >= ask.num_tokens + 1)
    able = able & (fleet.can_send | decodes)
    if not is_any(able):
        return TurnAway(None)
    unable = ~able
    waits = _predict(fleet, ask, targets, settings)
    ttft_s = waits.ttft_s
    np.copyto(ttft_s, np.inf, where=unable)
    soonest_s = lowest(ttft_s)
    first_s = ttft_s
    if soonest_s > targets.ttft_s:
        first_s = np.maximum(_backlog_s(fleet, waits, targets, settings), targets.ttft_s)
        np.copyto(first_s, np.inf, where=unable)
        if (least_s := lowest(first_s)) > ask.max_wait_s:
            return TurnAway(least_s - ask.max_wait_s)
    wait_s = min(soonest_s, targets.ttft_s)
    step_s = None
    if not are_all(fleet.can_send):  # some decode what they compute: how long their steps would be
        step_s = _decode_step_s(fleet, ask, _staying(ask, wait_s))
    decode_s = _decode_s(fleet, ask)
    prefill = _choose_prefill(fleet, ask, ttft_s, waits, step_s, decode_s, targets, settings)
    decode = choose_decode(fleet, ask, prefill, targets, settings, wait_s, step_s, decode_s)
    return Place(prefill, decode, float(first_s[prefill]))


def _choose_prefill(
    fleet: Fleet,
    ask: Ask,
    ttft_s: Column,
    waits: _Waits,
    step_s: Column | None,
    decode_s: Column,
    targets: Targets,
    settings: ElasticSettings,
) -> int:
    """Where the prompt costs least decode elsewhere, of the workers well in time; else the soonest."""
    in_time = ttft_s <= settings.early * targets.ttft_s
    if waits.lacks_kv is not None:
        in_time &= ~waits.lacks_kv
    if not is_any(in_time):
        return oldest(ttft_s, fleet, settings.tie, ask.near_prefill)
    if step_s is not None:
        good = step_s <= min(targets.tpot_s, targets.gap_s) * settings.safety * settings.local_bonus
        good |= fleet.can_send
        good &= in_time
        in_time = good if is_any(good) else in_time
    if (alone := only(in_time)) != NONE:
        return alone
    cost = waits.own_s / decode_s
    np.multiply(cost, settings.prefill_only_worth, out=cost, where=~fleet.can_decode)
    np.copyto(cost, np.inf, where=~in_time)
    return oldest_of(near(cost, settings.near), ttft_s, fleet, settings.tie, ask.near_prefill)


def _decode_s(fleet: Fleet, ask: Ask) -> Column:
    """Seconds of one token of it in a step, per worker."""
    seconds: Column = fleet.per_context_s * ask.num_tokens
    seconds += fleet.per_token_s
    return seconds


def _own_s(fleet: Fleet, ask: Ask) -> Column:
    """Seconds of its uncached tokens, per worker."""
    if ask.cached is None:
        each_s: Column = fleet.per_attention_s * ((ask.num_tokens + 1) / 2)
        each_s += fleet.per_token_s
        each_s *= ask.num_tokens
        return each_s
    keys = ask.cached + (ask.num_tokens + 1)
    keys /= 2  # on average, of an uncached token
    keys *= fleet.per_attention_s
    keys += fleet.per_token_s
    keys *= ask.num_tokens - ask.cached
    return keys


def _predict(fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> _Waits:
    """Written in place, one operation a line: most of the time of a decision is spent here."""
    step_s = min(targets.tpot_s, targets.gap_s) * settings.safety
    own_s = _own_s(fleet, ask)
    mine_s = fleet.work_s + own_s
    staying = np.minimum(mine_s, min(targets.ttft_s, ask.life_s / 2))  # then 1 - that / life
    staying /= -ask.life_s
    staying += 1
    reading_s = fleet.context * staying
    reading_s += ask.num_tokens
    reading_s *= fleet.per_context_s
    reading_s += fleet.fixed_s
    share = fleet.rows * staying  # then 1 - the load of decode / step
    share += 1
    share *= fleet.per_token_s
    reading_s += fleet.queued_load_s
    share += reading_s
    share /= -step_s
    share += 1
    reading_s += fleet.floor_s
    is_full = reading_s > step_s
    if is_any(is_full):
        share[is_full] = 0.0
    share *= fleet.on_time_share
    np.maximum(share, settings.min_share, out=share)
    start_s: Column | float = step_s / 2
    if lowest(fleet.rows) == 0:
        is_idle = (fleet.rows + fleet.queued_load_s) == 0
        np.copyto(share, 0.95 * fleet.on_time_share, where=is_idle)
        start_s = np.where(is_idle, fleet.fixed_s + fleet.floor_s, start_s)
    held = fleet.kv_used + fleet.kv_promised
    lacking = held - fleet.kv_tokens
    is_lacking: Flags = lacking > -(ask.num_tokens + 1)
    lacks_kv: Flags | None = None
    if is_any(is_lacking):  # what is held goes within the life of a row, or with the prompts before this one
        lacks_kv = is_lacking & (held > 0)
        lacking += ask.num_tokens + 1
        hold_s = np.where(fleet.can_decode, min(ask.life_s, _LONG_S), fleet.work_s)
        start_s = start_s + np.where(lacks_kv, hold_s * lacking / np.maximum(held, 1.0), 0.0)
    ttft_s = mine_s / share
    ttft_s += start_s
    return _Waits(own_s, ttft_s, lacks_kv, mine_s, start_s)


def _backlog_s(fleet: Fleet, waits: _Waits, targets: Targets, settings: ElasticSettings) -> Column:
    """Per worker, seconds until the first token of a prompt that is not in time there: behind all that waits.

    As the worker's scheduler works (`cluster.slo_schedule`): of a step, rows with a target leave

        left = 1 - (fixed + per_token * rows + per_context * context) / step

    and rows that yield, half of those coming among them by then, take no more than 1 - `LATE_SHARE` of it
    from these prompts, which have `AGED_SHARE` in any case. Prompts on time that come later take from it,
    but for `OVERDUE_SHARE`: nobody knows how many. A worker that measured a higher rate is believed; where
    it was lower, the mean of both is taken.
    """
    step_s = min(targets.tpot_s, targets.gap_s) * settings.safety
    left = 1 - (fleet.fixed_s + fleet.per_token_s * fleet.rows + fleet.per_context_s * fleet.context) / step_s
    yielding = (fleet.yield_s + fleet.coming_rows * fleet.per_token_s / 2) / step_s
    rate = left - np.minimum(yielding, (1 - LATE_SHARE) * left)
    lately = np.minimum(rate, np.maximum(fleet.late_rate, OVERDUE_SHARE * left))
    np.copyto(rate, (rate + lately) / 2, where=fleet.late_rate > 0)
    np.maximum(rate, fleet.late_rate, out=rate)
    np.maximum(rate, AGED_SHARE, out=rate)
    seconds: Column = (waits.mine_s + fleet.late_s) / rate + waits.start_s
    return seconds


def predicted_ttft_s(fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> Column:
    """Per worker, in the order of the fleet."""
    return _predict(fleet, ask, targets, settings).ttft_s


def _staying(ask: Ask, wait_s: float) -> float:
    """Share of the rows that will still decode after so long."""
    return max(0.5, 1 - wait_s / ask.life_s)


def _decode_step_s(fleet: Fleet, ask: Ask, staying: float) -> Column:
    """A step of each worker with this request, and all that is on its way there, in the batch."""
    step_s = fleet.rows * staying
    step_s += fleet.coming_rows
    step_s += 1
    step_s *= fleet.per_token_s
    np.maximum(step_s, fleet.floor_s, out=step_s)
    step_s += fleet.fixed_s
    reading_s = fleet.context * staying
    reading_s += fleet.coming_context
    reading_s += ask.num_tokens
    reading_s *= fleet.per_context_s
    step_s += reading_s
    return step_s


def choose_decode(
    fleet: Fleet,
    ask: Ask,
    prefill: int,
    targets: Targets,
    settings: ElasticSettings,
    wait_s: float,
    step_s: Column | None = None,
    decode_s: Column | None = None,
) -> int:
    """The worker where a prompt that worker `prefill` will have computed in `wait_s` should decode. `step_s`,
    `decode_s`: as `_decode_step_s` and `_decode_s`, if they are known."""
    if not fleet.can_send[prefill]:
        return prefill
    decodes = fleet.can_decode if ask.may_decode is None else ask.may_decode
    step_limit_s = min(targets.tpot_s, targets.gap_s) * settings.safety
    staying = _staying(ask, wait_s)
    if decodes[prefill] and _is_best_where_computed(fleet, ask, prefill, step_limit_s, staying, settings):
        return prefill
    if (alone := only(decodes)) not in (NONE, prefill):
        return alone
    if step_s is None:
        step_s = _decode_step_s(fleet, ask, staying)
    room = fleet.kv_tokens * (1 - settings.kv_headroom)
    room -= fleet.kv_used
    room -= fleet.kv_promised
    fits = room >= ask.num_tokens + ask.expected_output
    fits[prefill] = True  # it has the prompt's KV already
    can = fits & decodes
    moving = ask.num_tokens if ask.cached is None else ask.num_tokens - ask.cached
    moving_s = fleet.exposed_s(prefill, moving * ask.kv_bytes_per_token, settings.handoff_s)
    if math.isfinite(targets.gap_s):
        local = step_s[prefill] <= targets.gap_s * settings.safety and can[prefill]
        can &= step_s + moving_s <= targets.gap_s * settings.safety
        can[prefill] = local
    spread_s = step_s + (moving_s + step_limit_s) / max(1.0, 0.5 * ask.expected_output)
    good = can & (spread_s <= settings.far_fill * step_limit_s)
    good[prefill] = can[prefill] and step_s[prefill] <= step_limit_s * settings.local_bonus
    if not is_any(good):
        if not is_any(can):
            can = decodes
        over_s = np.where(can, step_s, np.inf)
        best = oldest(over_s, fleet, settings.tie, ask.near_decode)
        is_near = can[prefill] and step_s[prefill] <= over_s[best] * settings.local_bonus
        return prefill if is_near else best
    cost = (_decode_s(fleet, ask) if decode_s is None else decode_s) / fleet.per_token_s
    np.copyto(cost, np.inf, where=~good)
    if cost[prefill] <= lowest(cost) * (1 + settings.near):
        return prefill
    taken_s = settings.kv_worth * step_limit_s * moving / np.maximum(fleet.kv_tokens, 1.0)
    return oldest_of(near(cost, settings.near), spread_s + taken_s, fleet, settings.tie, ask.near_decode)


def _is_best_where_computed(
    fleet: Fleet, ask: Ask, at: int, limit_s: float, staying: float, settings: ElasticSettings
) -> bool:
    """No other worker is cheaper by more than `near`, and this one has room within the target: what the whole
    comparison would say too, at the price of a few numbers (in a pool of equals, nearly always)."""
    least = 1 + fleet.least_reading() * ask.num_tokens
    if 1 + float(fleet.reading[at]) * ask.num_tokens > least * (1 + settings.near):
        return False
    rows = float(fleet.rows[at]) * staying + float(fleet.coming_rows[at]) + 1
    context = float(fleet.context[at]) * staying + float(fleet.coming_context[at]) + ask.num_tokens
    busy_s = max(float(fleet.floor_s[at]), float(fleet.per_token_s[at]) * rows)
    step_s = float(fleet.fixed_s[at]) + busy_s + float(fleet.per_context_s[at]) * context
    return step_s <= limit_s * settings.local_bonus
