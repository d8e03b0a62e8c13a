"""What placement works out of a worker, for one request: the formulas of `router.elastic`.

Each is written once, for figures of one worker or of all (`router.choosing`), one operation a line where it
matters: in place where the figures are arrays, so that a thousand workers cost little more than one.

Seconds; load is that of the moment when the prefill will have ended. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from cluster.slo_classes import AGED_SHARE, LATE_SHARE, OVERDUE_SHARE, Targets
from router.choosing import NONE, Figure, Pool, highest
from router.fleet import Column, Flags, Worker

_LONG_S = 1e6  # for "it never ends", where numbers must stay finite


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    safety: float = 0.985  # share of the targets that predictions must stay within
    min_share: float = 0.003  # of a step, assumed for prompts when decode leaves less: next to nothing
    kv_share: float = 0.5  # of the pool: rows that hold more have shorter steps, so that they leave sooner
    early: float = 0.6  # share of the TTFT target within which a worker is well in time
    near: float = 0.05  # costs within this share of the least are equal
    tie: float = 0.02  # predictions within this share of the best are equal
    local_bonus: float = 1.2  # so much longer may a step be where the prompt's KV is already
    far_fill: float = 0.95  # share of the target up to which a worker takes rows computed elsewhere
    prefill_only_worth: float = 0.25  # of a second of a worker that cannot decode, against one that can
    handoff_s: float = 0.002
    kv_headroom: float = 0.05  # of the pool, for growth
    price_from: float = 0.05  # of a step: what it costs that anybody decodes there is ignored if less ...
    lag_over: float = 0.25  # ... or less than half a step spread over this share of an answer
    gather_fill: float = 0.95  # share of a step up to which rows gather where mixed steps have a price
    may_miss: float = 0.1  # share of requests
    kv_worth: float = 0.5  # of a whole pool of KV newly taken, against a step as long as the target


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What placement knows of a request. `cached[w]`: tokens of its prefix on worker w; None: nowhere.

    `may_prefill` and `may_decode` narrow the workers for this request; None: as the fleet says.
    """

    num_tokens: int
    expected_output: float
    cached: Column | None = None
    kv_bytes_per_token: float = 131_072
    life_s: float = math.inf  # mean time a row decodes
    paced_life_s: float = 0.0  # the same on a full worker, where each step takes as long as it may
    growth: float = 0.0  # KV that each row may yet take: prompts must leave it, where workers see to that
    max_wait_s: float = math.inf  # for what others wait for, whatever the target
    may_prefill: Flags | None = None
    may_decode: Flags | None = None
    near_prefill: int = NONE  # rows where its session was last
    near_decode: int = NONE


class Waits(msgspec.Struct, frozen=True, gc=False):
    """Seconds from now until the first token. `own_s`: of its uncached tokens; `ttft_s`: of a prompt that is
    in time there, infinite where it may not be computed; `lacks_kv`: the prompt's KV has no room yet."""

    own_s: Figure
    ttft_s: Figure
    lacks_kv: Figure
    mine_s: Figure
    start_s: Figure
    mixed_s: Figure


_NEVER = Waits(math.inf, math.inf, False, math.inf, math.inf, 0.0)


class Formulas:
    """Of one request, in one pool."""

    def __init__(
        self,
        pool: Pool,
        ask: Ask,
        targets: Targets,
        settings: ElasticSettings,
        work_s: Column,
        dearest: tuple[float, float],
    ) -> None:
        """`work_s`: of all workers; `dearest`: as `Fleet.dearest`."""
        self.pool = pool
        self.ask = ask
        self.targets = targets
        self.settings = settings
        self.limit_s = min(targets.tpot_s, targets.gap_s) * settings.safety  # of a step
        self.num_tokens = pool.number(ask.num_tokens)
        begin_s = self.limit_s / 2 / max(1.0, settings.lag_over * ask.expected_output)
        self.least_price_s = max(settings.price_from * self.limit_s, begin_s)
        self.coming = self._coming_at_once(work_s)
        mixed_s, haste = dearest
        self.has_price = mixed_s > 0
        self.none_gathers = mixed_s <= self.least_price_s and haste <= 0

    def _coming_at_once(self, work_s: Column) -> float:
        """Share of the rows on their way to a worker that will decode there at the same time.

        They come for as long as the queues take in which they are, and end as they come. The mean prompt that
        waits does so in a queue of (sum of w^2) / (sum of w) seconds, w a worker's. What is asked is whether
        the worker would be full, so rows live as long as they do there.
        """
        life_s = max(self.ask.life_s, self.ask.paced_life_s)
        if math.isinf(life_s) or not len(work_s) or highest(work_s) <= life_s:
            return 1.0
        return min(1.0, life_s * float(work_s.sum() / work_s.dot(work_s)))

    def may_compute(self, worker: Figure, able: Figure, decodes: Figure) -> Figure:
        """For somebody: it hands over, or goes on itself."""
        return able & (worker.can_send | decodes)

    def waits(self, worker: Figure, able: Figure, cached: Figure, moving: Figure) -> Waits:
        """Most of the time of a decision goes here."""
        pool, ask = self.pool, self.ask
        if pool.is_out(able):
            return _NEVER
        own_s = self.own_s(worker, cached, moving)
        mine_s = worker.work_s + own_s
        load = worker.rows + worker.queued_load_s  # nothing of either: it is idle
        if pool.least(load) > 0:
            share, start_s, mixed_s = self._share(worker, mine_s), self.limit_s / 2, worker.mixed_s
        else:
            is_idle = load == 0
            share = pool.at_least(0.95 * worker.on_time_share, self.settings.min_share)
            start_s, mixed_s = worker.fixed_s + worker.floor_s, 0.0
            if not pool.is_every(is_idle):
                share = pool.unless(share, is_idle, self._share(worker, mine_s))
                start_s = pool.unless(start_s, is_idle, self.limit_s / 2)
                mixed_s = pool.unless(mixed_s, is_idle, worker.mixed_s)
        held = worker.kv_used + worker.kv_promised
        if ask.growth:
            held += worker.rows * ask.growth
        lacking = held - worker.kv_tokens
        lacks_kv: Figure = False
        if pool.most(lacking) > -(ask.num_tokens + 1):
            # what is held goes within the life of a row, or with the prompts before
            lacks_kv = (lacking > -(ask.num_tokens + 1)) & (held > 0)
            lacking = pool.instead(lacking, self._passes(worker), self._unpromised(worker, lacking))
            lacking += ask.num_tokens + 1
            hold_s = pool.instead(worker.work_s, worker.can_decode, min(ask.life_s, _LONG_S))
            start_s = start_s + pool.instead(0.0, lacks_kv, hold_s * lacking / pool.at_least(held, 1.0))
        ttft_s = (mine_s + mixed_s if self.has_price else mine_s) / share
        ttft_s += start_s
        return Waits(own_s, pool.unless(ttft_s, able, math.inf), lacks_kv, mine_s, start_s, mixed_s)

    def _share(self, worker: Figure, mine_s: Figure) -> Figure:
        """Of a step, what decode leaves to prompts on time, once all that is queued or will come decodes.

        Chunks lengthen steps, so rows hold their KV for longer. Where they hold much of it, KV is scarcer
        than time: only what leaves the rows within `kv_share` is offered.
        """
        pool, ask, limit_s = self.pool, self.ask, self.limit_s
        staying = pool.at_most(mine_s, min(self.targets.ttft_s, ask.life_s / 2)) / -ask.life_s
        staying += pool.one  # 1 - that / life
        reading_s = worker.context * staying
        reading_s += self.num_tokens
        reading_s *= worker.per_context_s
        reading_s += worker.fixed_s
        share = worker.rows * staying  # then 1 - the load of decode / step
        share += pool.one
        share *= worker.per_token_s
        reading_s += worker.queued_load_s
        reading_s += worker.far_load_s if self.coming == 1 else worker.far_load_s * self.coming
        share += reading_s
        held = worker.context + worker.coming_context
        bearable = worker.kv_tokens * self.settings.kv_share
        if pool.most(held - bearable) > 0:  # a step is shorter by as much
            share *= pool.at_least(held / pool.at_least(bearable, 1.0), 1.0)
        share /= -limit_s
        share += pool.one
        reading_s += worker.floor_s
        if pool.most(reading_s) > limit_s:
            share = pool.instead(share, reading_s > limit_s, 0.0)
        share *= worker.on_time_share
        return pool.at_least(share, self.settings.min_share)

    def _passes(self, worker: Figure) -> Figure:
        """It is much smaller than what comes: where those have no room for their KV, they let it pass."""
        return worker.coming_context > 2 * (self.num_tokens + 1) * worker.coming_rows

    def _unpromised(self, worker: Figure, lacking: Figure) -> Figure:
        """`lacking` by what is held, and what is promised within the room that this leaves."""
        pool = self.pool
        return pool.at_least(pool.at_most(lacking, 0.0), lacking - worker.kv_promised)

    def own_s(self, worker: Figure, cached: Figure, moving: Figure) -> Figure:
        """Seconds of its uncached tokens, `moving`; all of them where it is None, as `cached` is."""
        num_tokens = self.ask.num_tokens
        if cached is None:
            each_s = worker.per_attention_s * ((num_tokens + 1) / 2)
            each_s += worker.per_token_s
            each_s *= num_tokens
            return each_s
        keys = cached + (num_tokens + 1.0)
        keys /= 2.0  # on average, of an uncached token
        keys *= worker.per_attention_s
        keys += worker.per_token_s
        keys *= moving
        return keys

    def late_s(self, worker: Figure, able: Figure, waits: Figure) -> Figure:
        """Seconds until the first token of a prompt that is not in time there: behind all that waits."""
        pool = self.pool
        if pool.is_out(able):
            return math.inf
        seconds = (waits.mine_s + worker.late_s) / self._late_rate(worker) + waits.start_s
        return pool.unless(pool.at_least(seconds, self.targets.ttft_s), able, math.inf)

    def others_s(self, worker: Figure, able: Figure) -> Figure:
        """Of that, what the prompts take that wait there."""
        if self.pool.is_out(able):
            return math.inf
        return self.pool.unless((worker.work_s + worker.late_s) / self._late_rate(worker), able, math.inf)

    def _late_rate(self, worker: Figure) -> Figure:
        """Seconds of such prompts' work that are done there in a second.

        As the worker's scheduler works (`cluster.slo_schedule`): of a step, rows with a target leave

            left = 1 - (fixed + per_token * rows + per_context * context) / step

        and rows that yield, half of those coming among them by then, take no more than 1 - `LATE_SHARE` of it
        from these prompts, which have `AGED_SHARE` in any case. Prompts on time that come later take from it,
        but for `OVERDUE_SHARE`: nobody knows how many. A worker that measured a higher rate is believed;
        where it was lower, the mean of both is taken.
        """
        pool, limit_s = self.pool, self.limit_s
        load_s = worker.fixed_s + worker.per_token_s * worker.rows + worker.per_context_s * worker.context
        left = 1 - load_s / limit_s
        yielding = (worker.yield_s + worker.coming_rows * worker.per_token_s / 2) / limit_s
        rate = left - pool.at_most(yielding, (1 - LATE_SHARE) * left)
        lately = pool.at_most(rate, pool.at_least(worker.late_rate, OVERDUE_SHARE * left))
        rate = pool.instead(rate, worker.late_rate > 0, (rate + lately) / 2)
        return pool.at_least(pool.at_least(rate, worker.late_rate), AGED_SHARE)

    def staying(self, wait_s: float) -> float:
        """Share of the rows that will still decode after so long."""
        return max(0.5, 1 - wait_s / self.ask.life_s)

    def step_s(self, worker: Figure, decodes: Figure, staying: float) -> Figure:
        """A step with this request, and all that is on its way there, in the batch."""
        pool = self.pool
        if pool.is_out(decodes):
            return math.inf
        step_s = worker.rows * staying
        step_s += worker.coming_rows if self.coming == 1 else worker.coming_rows * self.coming
        step_s += pool.one
        step_s *= worker.per_token_s
        step_s = pool.at_least(step_s, worker.floor_s)
        step_s += worker.fixed_s
        reading_s = worker.context * staying
        reading_s += worker.coming_context if self.coming == 1 else worker.coming_context * self.coming
        reading_s += self.num_tokens
        reading_s *= worker.per_context_s
        step_s += reading_s
        return step_s

    def decode_s(self, worker: Figure) -> Figure:
        """Seconds of one token of it in a step."""
        seconds = worker.per_context_s * self.num_tokens
        seconds += worker.per_token_s
        return seconds

    def is_in_time(self, waits: Figure) -> Figure:
        in_time = waits.ttft_s <= self.settings.early * self.targets.ttft_s
        return in_time if waits.lacks_kv is False else in_time & (waits.lacks_kv ^ True)

    def is_good(self, worker: Figure, in_time: Figure, step_s: Figure) -> Figure:
        """It may decode what it computes, or need not."""
        most_s = self.limit_s * self.settings.local_bonus
        if self.pool.most(step_s) <= most_s:
            return in_time
        return in_time & ((step_s <= most_s) | worker.can_send)

    def prefill_cost(self, worker: Figure, waits: Figure, decode_s: Figure) -> Figure:
        cost = (waits.own_s + waits.mixed_s if self.has_price else waits.own_s) / decode_s
        cost *= self.pool.either(worker.can_decode, 1.0, self.settings.prefill_only_worth)
        return cost

    def can_decode(
        self, worker: Figure, decodes: Figure, step_s: Figure, moving_s: Figure, token_s: Figure
    ) -> Figure:
        """It has room for the KV, and the hand-off fits into a gap: the transfer, the rest of the step in
        flight, which may have only begun (with chunks, where prompts wait, or come to rows that gather), and
        the first with the row. `token_s`: of who computes the prompt; others come to who is no slower."""
        room = worker.kv_tokens * (1 - self.settings.kv_headroom)
        room -= worker.kv_used
        room -= worker.kv_promised
        can = decodes & (room >= float(self.ask.num_tokens + self.ask.expected_output))
        if math.isinf(self.targets.gap_s):
            return can
        prefills = worker.work_s + worker.late_s > 0
        if not self.none_gathers:  # rows gather there, and prompts come to them before this one does
            gathers = worker.can_prefill & (worker.mixed_s > self.least_price_s)
            prefills = prefills | (gathers & (worker.per_token_s <= token_s))
        flying_s = self.pool.instead(step_s, prefills, self.pool.at_least(step_s, self.limit_s))
        return can & (flying_s + step_s + moving_s <= self.targets.gap_s * self.settings.safety)

    def spread_s(self, step_s: Figure, moving_s: Figure) -> Figure:
        """A step, with the hand-off spread over the answer: the transfer, and the rest of a step in flight,
        half of one in the mean."""
        return step_s + (moving_s + self.limit_s / 2) / max(1.0, self.ask.expected_output)

    def has_room(self, worker: Figure, can: Figure, step_s: Figure, spread_s: Figure) -> Figure:
        """For a row computed elsewhere, within the target: if it has to wait for a step with chunks and its
        answer is half as long as is expected, too. Where rows gather, what that costs is weighed."""
        late_s = self.limit_s / max(1.0, self.ask.expected_output)
        strict_s = 2 * spread_s
        strict_s -= step_s
        if not self.none_gathers:
            gathers = worker.haste * self.limit_s + worker.mixed_s > self.least_price_s
            strict_s = self.pool.instead(strict_s, gathers, spread_s - late_s)
        return can & (strict_s <= self.settings.far_fill * self.limit_s - late_s)

    def decode_cost(
        self, worker: Figure, decode_s: Figure, step_s: Figure, spread_s: Figure, miss: Figure
    ) -> Figure:
        if self.none_gathers:
            return decode_s / worker.per_token_s * worker.worth
        price_s, missing = self._price(worker, step_s, spread_s)
        cost = (decode_s + price_s) / worker.per_token_s
        cost *= worker.worth
        return cost + missing * miss

    def miss_cost(self, computed_at: Worker) -> float:
        """What it costs, per token, if the answer misses its target: the work of a request in vain, and of as
        many as must be served for each that may miss. As other costs, in tokens computed there."""
        num_tokens, answer = self.ask.num_tokens, self.ask.expected_output
        work_s = num_tokens * (computed_at.per_token_s + computed_at.per_attention_s * num_tokens / 2)
        work_s += answer * (computed_at.per_token_s + computed_at.per_context_s * num_tokens)
        work_s *= computed_at.worth / computed_at.per_token_s
        return work_s / (self.settings.may_miss * max(1.0, answer))

    def _price(self, worker: Figure, step_s: Figure, spread_s: Figure) -> tuple[Figure, Figure]:
        """A row's share of what it costs that anybody decodes there: the price of mixed steps, and prompts
        that are in time only if nobody does. So rows gather, and prompts elsewhere have all of a step. But
        rows computed elsewhere begin late, by half a step, and where answers are short that costs more: the
        share of answers that end before it is made up for misses the target."""
        pool, least_s = self.pool, self.least_price_s
        price_s = worker.haste * self.limit_s
        price_s += worker.mixed_s
        shared_s = price_s / (worker.rows + worker.coming_rows + 1)
        shared_s = pool.instead(shared_s, spread_s > self.settings.gather_fill * self.limit_s, price_s)
        left_s = pool.at_least(self.limit_s - step_s, 1e-9)
        missing = (spread_s - step_s) / left_s
        missing -= 0.5 / max(1.0, self.ask.expected_output)  # it waits for half a step without chunks
        missing = pool.at_most(pool.at_least(missing, 0.0), 1.0)
        has_price = price_s > least_s
        return pool.unless(shared_s, has_price, 0.0), pool.unless(missing, has_price, 0.0)

    def with_kv_taken(self, worker: Figure, spread_s: Figure, moving: Figure) -> Figure:
        moving = self.ask.num_tokens if moving is None else moving
        share = self.settings.kv_worth * self.limit_s * moving / self.pool.at_least(worker.kv_tokens, 1.0)
        return spread_s + share
