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

Bounds: O(workers), one by one or in a few vector operations (`router.choosing`); no state, no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter

import msgspec
import numpy as np

from cluster.slo_classes import AGED_SHARE, LATE_SHARE, OVERDUE_SHARE, Targets
from router.choosing import NONE, Figure, Figures, Pool, pool_of
from router.fleet import Column, Flags, Fleet, Worker

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
    """Seconds from now until the first token. `own_s`: of its uncached tokens; `ttft_s`: of a prompt that is
    in time there, infinite where it may not be computed; `lacks_kv`: the prompt's KV has no room yet."""

    own_s: Figure
    ttft_s: Figure
    lacks_kv: Figure
    mine_s: Figure
    start_s: Figure


_NEVER = _Waits(math.inf, math.inf, False, math.inf, math.inf)
_TTFT_S = attrgetter("ttft_s")
_CAN_SEND = attrgetter("can_send")


def place(fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> Place | TurnAway:
    """See the module."""
    able = ask.may_prefill
    if able is None:
        able = fleet.can_prefill & (fleet.kv_tokens >= ask.num_tokens + 1)
    decision = _Decision(fleet, ask, targets, settings)
    return decision.place(able)


def choose_decode(
    fleet: Fleet, ask: Ask, prefill: int, targets: Targets, settings: ElasticSettings, wait_s: float
) -> int:
    """The worker where a prompt that worker `prefill` will have computed in `wait_s` should decode."""
    return _Decision(fleet, ask, targets, settings).choose_decode(prefill, wait_s)


def predicted_ttft_s(fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> Column:
    """Per worker, in the order of the fleet."""
    decision = _Decision(fleet, ask, targets, settings)
    pool = decision.pool
    everyone = pool.column(np.ones(fleet.num_workers, dtype=np.bool_))
    waits = pool.map(decision.waits, pool.workers, everyone, pool.column(ask.cached))
    return np.array(pool.map(_TTFT_S, waits))


class _Decision:
    """One request's. The formulas are written for figures of a worker or of all (`router.choosing`)."""

    def __init__(self, fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> None:
        self.pool: Pool = pool_of(fleet)
        self.fleet = fleet
        self.ask = ask
        self.targets = targets
        self.settings = settings
        self.limit_s = min(targets.tpot_s, targets.gap_s) * settings.safety  # of a step
        self.decodes = self.pool.column(fleet.can_decode if ask.may_decode is None else ask.may_decode)

    def place(self, may_prefill: Flags) -> Place | TurnAway:
        pool, ask, targets, workers = self.pool, self.ask, self.targets, self.pool.workers
        able = pool.map(self.may_compute, workers, pool.column(may_prefill), self.decodes)
        if not pool.any(able):
            return TurnAway(None)
        waits = pool.map(self.waits, workers, able, pool.column(ask.cached))
        first_s = ttft_s = pool.map(_TTFT_S, waits)
        soonest_s = pool.lowest(ttft_s)
        if soonest_s > targets.ttft_s:
            first_s = pool.map(self.late_s, workers, able, waits)
            if (least_s := pool.lowest(first_s)) > ask.max_wait_s:
                return TurnAway(least_s - ask.max_wait_s)
        wait_s = min(soonest_s, targets.ttft_s)
        step_s = None
        if not pool.all(
            pool.map(_CAN_SEND, workers)
        ):  # some decode what they compute: how long would steps be
            step_s = pool.map(self.step_s, workers, self.decodes, pool.same(self.staying(wait_s)))
        decode_s = pool.map(self.decode_s, workers)
        prefill = self._choose_prefill(ttft_s, waits, step_s, decode_s)
        decode = self.choose_decode(prefill, wait_s, step_s, decode_s)
        return Place(prefill, decode, float(first_s[prefill]))

    def _choose_prefill(
        self, ttft_s: Figures, waits: Figures, step_s: Figures | None, decode_s: Figures
    ) -> int:
        """Where the prompt costs least decode elsewhere, of the workers well in time; else the soonest."""
        pool, settings, workers = self.pool, self.settings, self.pool.workers
        in_time = pool.map(self.is_in_time, waits)
        if not pool.any(in_time):
            rows = pool.near(ttft_s, settings.tie)
            return pool.oldest_of(rows, ttft_s, settings.tie, self.ask.near_prefill)
        if step_s is not None:
            good = pool.map(self.is_good, workers, in_time, step_s)
            in_time = good if pool.any(good) else in_time
        if (alone := pool.only(in_time)) != NONE:
            return alone
        cost = pool.map(self.prefill_cost, workers, in_time, waits, decode_s)
        rows = pool.near(cost, settings.near)
        return pool.oldest_of(rows, ttft_s, settings.tie, self.ask.near_prefill)

    def choose_decode(
        self, prefill: int, wait_s: float, step_s: Figures | None = None, decode_s: Figures | None = None
    ) -> int:
        """`step_s`, `decode_s`: of every worker, if they are known."""
        pool, ask, settings, workers = self.pool, self.ask, self.settings, self.pool.workers
        at = pool.worker(prefill)
        if not at.can_send:
            return prefill
        decodes, limit_s, staying = self.decodes, self.limit_s, self.staying(wait_s)
        if decodes[prefill] and self._is_best_where_computed(at, staying):
            return prefill
        if (alone := pool.only(decodes)) not in (NONE, prefill):
            return alone
        if step_s is None:
            step_s = pool.map(self.step_s, workers, decodes, pool.same(staying))
        moving = ask.num_tokens if ask.cached is None else ask.num_tokens - ask.cached
        moving_s = pool.column(
            self.fleet.exposed_s(prefill, moving * ask.kv_bytes_per_token, settings.handoff_s)
        )
        can = pool.map(self.can_decode, workers, decodes, step_s, moving_s)
        can[prefill] = decodes[prefill] and (  # it has the prompt's KV already
            math.isinf(self.targets.gap_s) or step_s[prefill] <= self.targets.gap_s * settings.safety
        )
        spread_s = pool.map(self.spread_s, step_s, moving_s)
        good = pool.map(self.has_room, can, spread_s)
        good[prefill] = can[prefill] and step_s[prefill] <= limit_s * settings.local_bonus
        if not pool.any(good):
            if not pool.any(can):
                can = decodes
            over_s = pool.map(self.masked, step_s, can)
            rows = pool.near(over_s, settings.tie)
            best = pool.oldest_of(rows, over_s, settings.tie, ask.near_decode)
            is_near = can[prefill] and step_s[prefill] <= over_s[best] * settings.local_bonus
            return prefill if is_near else best
        if decode_s is None:
            decode_s = pool.map(self.decode_s, workers)
        cost = pool.map(self.decode_cost, workers, good, decode_s)
        if cost[prefill] <= pool.lowest(cost) * (1 + settings.near):
            return prefill
        taken_s = pool.map(self.with_kv_taken, workers, spread_s, pool.column(ask.cached))
        return pool.oldest_of(pool.near(cost, settings.near), taken_s, settings.tie, ask.near_decode)

    def _is_best_where_computed(self, at: Worker, staying: float) -> bool:
        """No other worker is cheaper by more than `near`, and this one has room within the target: what the
        whole comparison would say too, at the price of a few numbers (in a pool of equals, nearly always)."""
        num_tokens, settings = self.ask.num_tokens, self.settings
        least = 1 + self.fleet.least_reading() * num_tokens
        if 1 + at.reading * num_tokens > least * (1 + settings.near):
            return False
        return bool(self.step_s(at, True, staying) <= self.limit_s * settings.local_bonus)

    # ---- formulas

    def may_compute(self, worker: Figure, able: Figure, decodes: Figure) -> Figure:
        """For somebody: it hands over, or goes on itself."""
        return able & (worker.can_send | decodes)

    def waits(self, worker: Figure, able: Figure, cached: Figure) -> _Waits:
        """One operation a line, in place where it is an array: most of the time of a decision goes here."""
        pool, ask, settings, limit_s = self.pool, self.ask, self.settings, self.limit_s
        if pool.is_out(able):
            return _NEVER
        own_s = self.own_s(worker, cached)
        mine_s = worker.work_s + own_s
        staying = pool.at_most(mine_s, min(self.targets.ttft_s, ask.life_s / 2))  # then 1 - that / life
        staying /= -ask.life_s
        staying += 1
        reading_s = worker.context * staying
        reading_s += ask.num_tokens
        reading_s *= worker.per_context_s
        reading_s += worker.fixed_s
        share = worker.rows * staying  # then 1 - the load of decode / step
        share += 1
        share *= worker.per_token_s
        reading_s += worker.queued_load_s
        share += reading_s
        share /= -limit_s
        share += 1
        reading_s += worker.floor_s
        share = pool.instead(share, reading_s > limit_s, 0.0)
        share *= worker.on_time_share
        share = pool.at_least(share, settings.min_share)
        start_s: Figure = limit_s / 2
        is_idle = worker.rows + worker.queued_load_s == 0
        if pool.is_some(is_idle):
            share = pool.instead(share, is_idle, 0.95 * worker.on_time_share)
            start_s = pool.instead(start_s, is_idle, worker.fixed_s + worker.floor_s)
        held = worker.kv_used + worker.kv_promised
        lacking = held - worker.kv_tokens
        lacks_kv: Figure = lacking > -(ask.num_tokens + 1)
        if pool.is_some(lacks_kv):  # what is held goes within the life of a row, or with the prompts before
            lacks_kv = lacks_kv & (held > 0)
            lacking += ask.num_tokens + 1
            hold_s = pool.instead(worker.work_s, worker.can_decode, min(ask.life_s, _LONG_S))
            start_s = start_s + pool.instead(0.0, lacks_kv, hold_s * lacking / pool.at_least(held, 1.0))
        ttft_s = mine_s / share
        ttft_s += start_s
        return _Waits(own_s, pool.instead(ttft_s, able ^ True, math.inf), lacks_kv, mine_s, start_s)

    def own_s(self, worker: Figure, cached: Figure) -> Figure:
        """Seconds of its uncached tokens."""
        num_tokens = self.ask.num_tokens
        if cached is None:
            each_s = worker.per_attention_s * ((num_tokens + 1) / 2)
            each_s += worker.per_token_s
            each_s *= num_tokens
            return each_s
        keys = cached + (num_tokens + 1)
        keys /= 2  # on average, of an uncached token
        keys *= worker.per_attention_s
        keys += worker.per_token_s
        keys *= num_tokens - cached
        return keys

    def late_s(self, worker: Figure, able: Figure, waits: Figure) -> Figure:
        """Seconds until the first token of a prompt that is not in time there: behind all that waits.

        As the worker's scheduler works (`cluster.slo_schedule`): of a step, rows with a target leave

            left = 1 - (fixed + per_token * rows + per_context * context) / step

        and rows that yield, half of those coming among them by then, take no more than 1 - `LATE_SHARE` of it
        from these prompts, which have `AGED_SHARE` in any case. Prompts on time that come later take from it,
        but for `OVERDUE_SHARE`: nobody knows how many. A worker that measured a higher rate is believed;
        where it was lower, the mean of both is taken.
        """
        pool, limit_s = self.pool, self.limit_s
        if pool.is_out(able):
            return math.inf
        load_s = worker.fixed_s + worker.per_token_s * worker.rows + worker.per_context_s * worker.context
        left = 1 - load_s / limit_s
        yielding = (worker.yield_s + worker.coming_rows * worker.per_token_s / 2) / limit_s
        rate = left - pool.at_most(yielding, (1 - LATE_SHARE) * left)
        lately = pool.at_most(rate, pool.at_least(worker.late_rate, OVERDUE_SHARE * left))
        rate = pool.instead(rate, worker.late_rate > 0, (rate + lately) / 2)
        rate = pool.at_least(pool.at_least(rate, worker.late_rate), AGED_SHARE)
        seconds = (waits.mine_s + worker.late_s) / rate + waits.start_s
        return pool.instead(pool.at_least(seconds, self.targets.ttft_s), able ^ True, math.inf)

    def staying(self, wait_s: float) -> float:
        """Share of the rows that will still decode after so long."""
        return max(0.5, 1 - wait_s / self.ask.life_s)

    def step_s(self, worker: Figure, decodes: Figure, staying: float) -> Figure:
        """A step with this request, and all that is on its way there, in the batch."""
        pool = self.pool
        if pool.is_out(decodes):
            return math.inf
        step_s = worker.rows * staying
        step_s += worker.coming_rows
        step_s += 1
        step_s *= worker.per_token_s
        step_s = pool.at_least(step_s, worker.floor_s)
        step_s += worker.fixed_s
        reading_s = worker.context * staying
        reading_s += worker.coming_context
        reading_s += self.ask.num_tokens
        reading_s *= worker.per_context_s
        step_s += reading_s
        return step_s

    def decode_s(self, worker: Figure) -> Figure:
        """Seconds of one token of it in a step."""
        seconds = worker.per_context_s * self.ask.num_tokens
        seconds += worker.per_token_s
        return seconds

    def is_in_time(self, waits: Figure) -> Figure:
        return (waits.ttft_s <= self.settings.early * self.targets.ttft_s) & (waits.lacks_kv ^ True)

    def is_good(self, worker: Figure, in_time: Figure, step_s: Figure) -> Figure:
        """It may decode what it computes, or need not."""
        good = step_s <= self.limit_s * self.settings.local_bonus
        return in_time & (good | worker.can_send)

    def prefill_cost(self, worker: Figure, in_time: Figure, waits: Figure, decode_s: Figure) -> Figure:
        cost = waits.own_s / decode_s
        cost = self.pool.instead(cost, worker.can_decode ^ True, cost * self.settings.prefill_only_worth)
        return self.pool.instead(cost, in_time ^ True, math.inf)

    def can_decode(self, worker: Figure, decodes: Figure, step_s: Figure, moving_s: Figure) -> Figure:
        """It has room for the KV, and the hand-off fits into a gap."""
        room = worker.kv_tokens * (1 - self.settings.kv_headroom)
        room -= worker.kv_used
        room -= worker.kv_promised
        can = decodes & (room >= self.ask.num_tokens + self.ask.expected_output)
        return can & (step_s + moving_s <= self.targets.gap_s * self.settings.safety)

    def spread_s(self, step_s: Figure, moving_s: Figure) -> Figure:
        """A step, with the hand-off spread over the answer."""
        return step_s + (moving_s + self.limit_s) / max(1.0, 0.5 * self.ask.expected_output)

    def has_room(self, can: Figure, spread_s: Figure) -> Figure:
        """For a row computed elsewhere, within the target."""
        return can & (spread_s <= self.settings.far_fill * self.limit_s)

    def decode_cost(self, worker: Figure, good: Figure, decode_s: Figure) -> Figure:
        return self.masked(decode_s / worker.per_token_s, good)

    def with_kv_taken(self, worker: Figure, spread_s: Figure, cached: Figure) -> Figure:
        moving = self.ask.num_tokens if cached is None else self.ask.num_tokens - cached
        share = self.settings.kv_worth * self.limit_s * moving / self.pool.at_least(worker.kv_tokens, 1.0)
        return spread_s + share

    def masked(self, figure: Figure, flag: Figure) -> Figure:
        """Where the flag is not set: never the least."""
        return self.pool.instead(figure, flag ^ True, math.inf)
