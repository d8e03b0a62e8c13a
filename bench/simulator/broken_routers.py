"""Rules that routers keep, each with a way to break it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bench.simulator.mutation import Broken, Mutation, Patch
from cluster.sampling import TokenOutput
from cluster.wire.messages import TokenRow
from router.attempt import AttemptRecord, LiveRequest, Order
from router.conductor import Conductor
from router.leases import LeaseKeeper
from router.legs import Legs
from router.live_requests import LiveRequests
from router.quotas.book import QuotaBook
from router.quotas.slices import Short, SliceBook
from router.worker_book import WorkerBook


def _any_attempt(original: Broken) -> Broken:
    def take(self: Legs, worker: Any, live: LiveRequest, message: Any, now: float) -> Any:
        attempt = live.attempt
        if attempt is None:
            return original(self, worker, live, message, now)
        number, attempt.number = attempt.number, message.attempt
        try:
            return original(self, worker, live, message, now)
        finally:
            attempt.number = number

    return take


def _every_row_is_new(_: Broken) -> Broken:
    def take_row(self: AttemptRecord, row: TokenRow) -> tuple[Order, Sequence[TokenOutput]]:
        self.next_row += len(row.outputs)
        return Order.NEW, row.outputs

    return take_row


def _rows_before_token_0(original: Broken) -> Broken:
    def take_row(self: Legs, live: LiveRequest, attempt: AttemptRecord, row: TokenRow) -> Any:
        had, attempt.has_first_token = attempt.has_first_token, True
        try:
            return original(self, live, attempt, row)
        finally:
            attempt.has_first_token = had

    return take_row


def _prompt_only(_: Broken) -> Broken:
    return lambda self: list(self.spec.token_ids)


def _no_renewals(original: Broken) -> Broken:
    def pop_due(self: LeaseKeeper, now: float) -> list[Any]:
        original(self, now)
        return []

    return pop_due


def _tell_nobody(original: Broken) -> Broken:
    def let_go(self: Legs, live: LiveRequest, abort_reason: str | None) -> None:
        if live.attempt is not None:
            live.attempt.prefill_holds = live.attempt.decode_holds = False
        original(self, live, abort_reason)

    return let_go


def _no_last_attempt(original: Broken) -> Broken:
    def retry(self: Conductor, live: LiveRequest, *rest: Any, **named: Any) -> None:
        live.num_failed = 0
        original(self, live, *rest, **named)

    return retry


def _stay_with_the_dead(original: Broken) -> Broken:
    def leave(self: WorkerBook, worker: Any) -> list[Any]:
        original(self, worker)
        return []

    return leave


def _no_deadline(_: Broken) -> Broken:
    return lambda self, live, until: self._deadlines.set(live.request, until)


def _one_number(original: Broken) -> Broken:
    def reserve(self: Legs, live: LiveRequest, *rest: Any) -> Any:
        live.num_reserves = 0
        return original(self, live, *rest)

    return reserve


def _token_0_twice(original: Broken) -> Broken:
    def take_first_token(self: Legs, live: LiveRequest, attempt: AttemptRecord, *rest: Any) -> Any:
        attempt.has_first_token = False
        return original(self, live, attempt, *rest)

    return take_first_token


def _admit_without_lease(original: Broken) -> Broken:
    def take(self: SliceBook, name: str, limits: Any, demand: Any, now: float) -> Any:
        verdict = original(self, name, limits, demand, now)
        if not isinstance(verdict, Short):
            return verdict
        return self._sharers[name].tenant.hold(name, demand.num_tokens, now)

    return take


def _never_settle(_: Broken) -> Broken:
    def settle(self: QuotaBook, hold: Any, num_tokens: int, now: float, *, counts: bool = True) -> None:
        return

    return settle


ROUTER_MUTATIONS: Final[tuple[Mutation, ...]] = (
    Mutation("skip the attempt check", [Patch(Legs, "take", _any_attempt)]),
    Mutation("keep a quota's place when the request is over", [Patch(QuotaBook, "settle", _never_settle)]),
    Mutation("forget to renew leases", [Patch(LeaseKeeper, "pop_due", _no_renewals)]),
    Mutation("take every row as new", [Patch(AttemptRecord, "take_row", _every_row_is_new)]),
    Mutation("deliver rows before token 0", [Patch(Legs, "_take_row", _rows_before_token_0)]),
    Mutation("give every attempt the same number", [Patch(Legs, "reserve", _one_number)]),
    Mutation("take token 0 twice", [Patch(Legs, "_take_first_token", _token_0_twice)]),
    Mutation("try without end", [Patch(Conductor, "_retry", _no_last_attempt)]),
    Mutation("leave requests with dead workers", [Patch(WorkerBook, "leave", _stay_with_the_dead)]),
    Mutation("ignore a request's own deadline", [Patch(LiveRequests, "wait", _no_deadline)]),
    Mutation("admit before a limit was leased", [Patch(SliceBook, "take", _admit_without_lease)]),
    Mutation("resume from the prompt alone", [Patch(LiveRequest, "input_ids", _prompt_only)]),
    Mutation("let go without telling the workers", [Patch(Legs, "let_go", _tell_nobody)]),
)
