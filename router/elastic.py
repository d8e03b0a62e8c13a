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
     share of a step that decode leaves there once all that is queued, or on its way there, decodes; KV it
     lacks is waited for, but a small prompt passes larger ones that have no room. So a loaded decode worker
     is slow, and one that is full, of work or of KV, is never chosen. Nor is one whose rows hold so much of
     its KV that they had better leave soon: chunks would lengthen their steps, and others would have to
     decode elsewhere.
  2. *D*: of the workers whose predicted step, with all that is on its way there, stays within the TPOT (and
     gap) target, and whose KV has room: the one where decode costs least. The cost of a second is what that
     worker could do with it instead: (decode seconds per token) x (its prefill speed) x (the share of recent
     prompts that it would have in time if it were idle). So of unequal kinds each does what it is
     comparatively good at, and decode leaves those that alone are quick enough for first tokens. Where it
     costs that anybody decodes at a worker at all, since mixed steps have a price or long prompts would be
     late beside decode, rows share that cost: they gather on few workers, unless answers are so short that
     they would end before the hand-off is made up for. Among equal ones P itself, which
     needs no transfer; else the one whose steps, with the hand-off spread over the answer and the KV newly
     taken, are shortest: what a D has cached need neither move nor be held twice. With a gap limit, the
     exposed transfer must fit into it, with the rest of a step in flight.
  3. When D has no room within the target anywhere, the request decodes where it adds least above the target.

Load is that of the moment when the prefill will have ended: rows leave at the rate at which rows end, and all
that was placed will have come. Where queues take longer than a row decodes, those that come first will have
ended by then: of rows on their way, as many count as decode at the same time.

A prompt is not split between P and D: every worker that may do both lets chunks ride beside its decode rows,
so what a D has free is already offered as a P.

Order: where the session was last, if no prefix is known; the least recently placed; the lower index.

When nothing fits: workers without KV room are taken only if all are full; for good, if no worker could ever
hold it. Overload demotes, on the worker (`cluster.slo_schedule`), rather than rejects: a demoted request
still runs, at the rate that such prompts get there (`Formulas.late_s`). It is rejected only when it would
wait for others longer than `max_wait_s` everywhere, with the time after which their backlog will have drained
enough: what it takes itself would be no less then.

Bounds: O(workers), one by one or in a few vector operations (`router.choosing`); no state, no clock. How
long recent prompts are is in the fleet's columns (`router.prompt_lengths`), worked out now and then.
"""

from __future__ import annotations

from operator import attrgetter

import msgspec
import numpy as np

from cluster.slo_classes import Targets
from router.choosing import NONE, Figures, Pool, pool_of
from router.fleet import Column, Flags, Fleet, Worker
from router.reckoning import Ask as Ask
from router.reckoning import ElasticSettings as ElasticSettings
from router.reckoning import Formulas


class Place(msgspec.Struct, frozen=True, gc=False):
    prefill: int
    decode: int
    ttft_s: float


class TurnAway(msgspec.Struct, frozen=True, gc=False):
    """`retry_after_s` None: never; it is too large for every worker."""

    retry_after_s: float | None


_TTFT_S = attrgetter("ttft_s")
_CAN_SEND = attrgetter("can_send")


def place(fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> Place | TurnAway:
    """See the module."""
    able = ask.may_prefill
    if able is None:
        able = fleet.can_prefill & (fleet.kv_tokens >= ask.num_tokens + 1)
    return _Decision(fleet, ask, targets, settings).place(able)


def choose_decode(
    fleet: Fleet, ask: Ask, prefill: int, targets: Targets, settings: ElasticSettings, wait_s: float
) -> int:
    """The worker where a prompt that worker `prefill` will have computed in `wait_s` should decode."""
    return _Decision(fleet, ask, targets, settings).choose_decode(prefill, wait_s)


def predicted_ttft_s(fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> Column:
    """Per worker, in the order of the fleet."""
    everyone = np.ones(fleet.num_workers, dtype=np.bool_)
    decision = _Decision(fleet, ask, targets, settings)
    return np.array(decision.predicted_ttft_s(everyone))


class _Decision:
    """One request's. What only some decisions need is worked out when it is asked for, once."""

    def __init__(self, fleet: Fleet, ask: Ask, targets: Targets, settings: ElasticSettings) -> None:
        self._pool: Pool = pool_of(fleet)
        self._fleet = fleet
        self._ask = ask
        self._targets = targets
        self._settings = settings
        self._of = Formulas(self._pool, ask, targets, settings, fleet.work_s, fleet.dearest())
        self._decodes = self._pool.column(fleet.can_decode if ask.may_decode is None else ask.may_decode)
        self._moving = None if ask.cached is None else float(ask.num_tokens) - ask.cached
        self._staying = 1.0  # see `Formulas.staying`
        self._step_s: Figures | None = None
        self._decode_s: Figures | None = None

    def place(self, may_prefill: Flags) -> Place | TurnAway:
        pool, ask, of, ttft_s = self._pool, self._ask, self._of, self._targets.ttft_s
        able = pool.map(of.may_compute, pool.workers, pool.column(may_prefill), self._decodes)
        if not pool.any(able):
            return TurnAway(None)
        waits = self._waits(able)
        first_s = in_time_s = pool.map(_TTFT_S, waits)
        soonest_s = pool.lowest(in_time_s)
        if soonest_s > ttft_s:
            first_s = pool.map(of.late_s, pool.workers, able, waits)
            if pool.lowest(first_s) > ask.max_wait_s:
                others_s = pool.lowest(pool.map(of.others_s, pool.workers, able))
                if others_s > ask.max_wait_s:
                    return TurnAway(others_s - ask.max_wait_s)
        wait_s = min(soonest_s, ttft_s)
        self._staying = of.staying(wait_s)
        prefill = pool.only(able)
        if prefill == NONE:
            prefill = self._choose_prefill(able, in_time_s, waits)
        return Place(prefill, self.choose_decode(prefill, wait_s), float(first_s[prefill]))

    def predicted_ttft_s(self, able: Flags) -> Figures:
        return self._pool.map(_TTFT_S, self._waits(self._pool.column(able)))

    def _waits(self, able: Figures) -> Figures:
        pool = self._pool
        cached, moving = pool.column(self._ask.cached), pool.column(self._moving)
        return pool.map(self._of.waits, pool.workers, able, cached, moving)

    def _choose_prefill(self, able: Figures, ttft_s: Figures, waits: Figures) -> int:
        """Where the prompt costs least decode elsewhere, of the workers well in time; else the soonest."""
        pool, of, settings, preferred = self._pool, self._of, self._settings, self._ask.near_prefill
        in_time = pool.map(of.is_in_time, waits)
        if not pool.any(in_time):
            near = pool.near(ttft_s, settings.tie, able)
            return pool.oldest_of(near, ttft_s, settings.tie, preferred)
        if not pool.all(pool.map(_CAN_SEND, pool.workers)):  # some decode what they compute
            good = pool.map(of.is_good, pool.workers, in_time, self._step_of_each())
            in_time = good if pool.any(good) else in_time
        if (alone := pool.only(in_time)) != NONE:
            return alone
        cost = pool.map(of.prefill_cost, pool.workers, waits, self._decode_of_each())
        return pool.oldest_of(pool.near(cost, settings.near, in_time), ttft_s, settings.tie, preferred)

    def choose_decode(self, prefill: int, wait_s: float) -> int:
        pool, ask, of, settings, decodes = self._pool, self._ask, self._of, self._settings, self._decodes
        if not self._fleet.can_send[prefill]:
            return prefill
        self._staying = of.staying(wait_s)
        if decodes[prefill] and self._is_best_where_computed(pool.worker(prefill)):
            return prefill
        if (alone := pool.only(decodes)) not in (NONE, prefill):
            return alone
        step_s, gap_s = self._step_of_each(), self._targets.gap_s * settings.safety
        num_bytes = (ask.num_tokens if self._moving is None else self._moving) * ask.kv_bytes_per_token
        moving_s = pool.column(self._fleet.exposed_s(prefill, num_bytes, settings.handoff_s))
        token_s = pool.same(self._fleet.per_token_s.item(prefill))
        can = pool.map(of.can_decode, pool.workers, decodes, step_s, moving_s, token_s)
        spread_s = pool.map(of.spread_s, step_s, moving_s)
        good = pool.map(of.has_room, pool.workers, can, step_s, spread_s)
        if decodes[prefill]:  # it has the prompt's KV already
            can[prefill] = step_s[prefill] <= gap_s
            good[prefill] = can[prefill] and step_s[prefill] <= of.limit_s * settings.local_bonus
            spread_s[prefill] = step_s[prefill]
        if not pool.any(good):
            can = can if pool.any(can) else decodes
            near = pool.near(step_s, settings.tie, can)
            best = pool.oldest_of(near, step_s, settings.tie, ask.near_decode)
            is_near = can[prefill] and step_s[prefill] <= step_s[best] * settings.local_bonus
            return prefill if is_near else best
        miss = pool.same(of.miss_cost(pool.worker(prefill)))
        cost = pool.map(of.decode_cost, pool.workers, self._decode_of_each(), step_s, spread_s, miss)
        near = pool.near(cost, settings.near, good)
        if decodes[prefill] and prefill in near:
            return prefill
        taken_s = pool.map(of.with_kv_taken, pool.workers, spread_s, pool.column(self._moving))
        return pool.oldest_of(near, taken_s, settings.tie, ask.near_decode)

    def _is_best_where_computed(self, at: Worker) -> bool:
        """No other worker is cheaper by more than `near`, and this one has room within the target: what the
        whole comparison would say too, at the price of a few numbers (in a pool of equals, nearly always)."""
        num_tokens, settings = self._ask.num_tokens, self._settings
        if at.mixed_s + at.haste * self._of.limit_s > self._of.least_price_s:
            return False  # rows gather elsewhere, maybe
        reading, worth = self._fleet.least()
        least = (1 + reading * num_tokens) * worth
        if (1 + at.reading * num_tokens) * at.worth > least * (1 + settings.near):
            return False
        step_s = self._of.step_s(at, True, self._staying)
        return bool(step_s <= self._of.limit_s * settings.local_bonus)

    def _step_of_each(self) -> Figures:
        if self._step_s is None:
            pool = self._pool
            staying = pool.same(self._staying)
            self._step_s = pool.map(self._of.step_s, pool.workers, self._decodes, staying)
        return self._step_s

    def _decode_of_each(self) -> Figures:
        if self._decode_s is None:
            self._decode_s = self._pool.map(self._of.decode_s, self._pool.workers)
        return self._decode_s
