"""Quotas of one router: what is reserved is settled or given back, waits are honest, nobody exceeds."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.errors import ConfigError
from router.quotas.book import Hold, QuotaBook, Wait
from router.quotas.limits import Demand, KeyLimits, Limit, parse_settings
from router.quotas.meter import Meter


def take(book: QuotaBook, limits: KeyLimits, now: float, prompt: int = 0, output: int = 0) -> Hold | Wait:
    return book.take("team", limits, Demand(prompt, output), now)


def taken(book: QuotaBook, limits: KeyLimits, now: float, prompt: int = 0, output: int = 0) -> Hold:
    hold = take(book, limits, now, prompt, output)
    assert isinstance(hold, Hold), hold
    return hold


# ---- each limit


def test_requests_per_minute() -> None:
    book, limits = QuotaBook(), KeyLimits(requests_per_min=3)
    for _ in range(3):
        book.settle(taken(book, limits, 0.0), 0, 0.0)
    assert take(book, limits, 0.0) == Wait(Limit.REQUESTS, 20.0)
    assert book.look("team", limits, 0.0) == Wait(Limit.REQUESTS, 20.0)
    assert take(book, limits, 19.0) == Wait(Limit.REQUESTS, pytest.approx(1.0))
    taken(book, limits, 20.0)
    told = book.standing("team", limits, 20.0)[Limit.REQUESTS]
    assert (told.limit, told.remaining, told.reset_s) == (3, 0, 60.0)
    told = book.standing("team", limits, 50.0)[Limit.REQUESTS]
    assert (told.remaining, told.reset_s) == (1, 30.0)
    assert book.look("other", limits, 20.0) is None


def test_tokens_are_reserved_and_settled() -> None:
    book, limits = QuotaBook(), KeyLimits(tokens_per_min=600)
    first = taken(book, limits, 0.0, 100, 400)
    assert take(book, limits, 0.0, 100, 100) == Wait(Limit.TOKENS, 10.0)
    book.settle(first, 150, 0.0)
    assert book.standing("team", limits, 0.0)[Limit.TOKENS].remaining == 450
    second = taken(book, limits, 0.0, 100, 100)
    book.settle(second, 0, 0.0, counts=False)
    assert book.standing("team", limits, 0.0)[Limit.TOKENS].remaining == 450
    with pytest.raises(KeyError):
        book.settle(second, 0, 0.0)


def test_more_than_a_minute_has_is_a_debt_and_a_longer_prompt_never_fits() -> None:
    book, limits = QuotaBook(), KeyLimits(tokens_per_min=600)
    assert take(book, limits, 0.0, 601) == Wait(Limit.TOKENS, None)
    large = taken(book, limits, 0.0, 500, 5000)
    book.settle(large, 1200, 0.0)
    assert book.look("team", limits, 0.0) == Wait(Limit.TOKENS, pytest.approx(60.1))
    assert book.standing("team", limits, 0.0)[Limit.TOKENS].remaining == 0
    taken(book, limits, 60.2, 1)


def test_concurrency_is_held_until_settled_and_its_wait_is_what_requests_last() -> None:
    book, limits = QuotaBook(), KeyLimits(concurrent=2)
    first = taken(book, limits, 0.0)
    taken(book, limits, 0.0)
    assert take(book, limits, 1.0) == Wait(Limit.CONCURRENT, 0.5)
    book.settle(first, 10, 8.0)
    taken(book, limits, 8.0)
    assert take(book, limits, 8.0) == Wait(Limit.CONCURRENT, 4.0)
    assert book.num_held("team") == 2


def test_a_request_that_we_failed_does_not_count() -> None:
    book, limits = QuotaBook(), KeyLimits(requests_per_min=1)
    book.settle(taken(book, limits, 0.0), 0, 0.0, counts=False)
    book.settle(taken(book, limits, 0.0), 0, 0.0)
    assert isinstance(take(book, limits, 0.0), Wait)


def test_limits_that_change_keep_what_was_used() -> None:
    book = QuotaBook()
    taken(book, KeyLimits(), 0.0, 10_000)
    book.settle(taken(book, KeyLimits(tokens_per_min=600), 0.0, 500), 500, 0.0)
    assert book.standing("team", KeyLimits(tokens_per_min=1000), 0.0)[Limit.TOKENS].remaining == 500
    assert take(book, KeyLimits(tokens_per_min=60), 0.0, 10) == Wait(Limit.TOKENS, 450.0)


def test_idle_tenants_are_forgotten() -> None:
    book, limits = QuotaBook(), KeyLimits(requests_per_min=6, tokens_per_min=60)
    for number in range(50):
        hold = book.take(f"team-{number}", limits, Demand(1, 1), 0.0)
        assert isinstance(hold, Hold)
        book.settle(hold, 2, 0.0)
    stays = book.take("stays", limits, Demand(1, 1), 1.0)
    book.take("other", limits, Demand(1, 1), 100.0)
    assert set(book._tenants) == {"stays", "other"}
    assert isinstance(stays, Hold)
    book.settle(stays, 2, 200.0)


# ---- properties


class Quotas(RuleBasedStateMachine):
    """Any sequence of requests against what a minute's limit means, computed from the list of what happened.

    Amounts are whole and the limits divide a minute, so time is in whole seconds.
    """

    LIMITS = KeyLimits(requests_per_min=10, tokens_per_min=600, concurrent=4)

    def __init__(self) -> None:
        super().__init__()
        self.book = QuotaBook()
        self.now = 0.0
        self.holds: list[Hold] = []
        self.admitted_at: list[float] = []
        self.reserved: list[tuple[float, float]] = []

    @rule(seconds=st.integers(0, 40))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule(prompt=st.integers(0, 700), output=st.integers(0, 700))
    def ask(self, prompt: int, output: int) -> None:
        before = self.book.standing("t", self.LIMITS, self.now)
        looked = self.book.look("t", self.LIMITS, self.now)
        demand = Demand(prompt, output)
        verdict = self.book.take("t", self.LIMITS, demand, self.now)
        if isinstance(verdict, Hold):
            assert looked is None or demand.num_tokens == 0
            self.holds.append(verdict)
            self.admitted_at.append(self.now)
            self.reserved.append((self.now, verdict.num_tokens))
            return
        assert self.book.standing("t", self.LIMITS, self.now) == before  # nothing was taken
        if verdict.retry_after_s is None:
            assert prompt > 600
        elif verdict.limit is not Limit.CONCURRENT and len(self.holds) < 4:
            early = QuotaBook()
            early._tenants["t"] = self.book._tenants["t"]  # the same meters, later
            meters = [Meter(m.used, m.at) for m in (early._tenants["t"].requests, early._tenants["t"].tokens)]
            costs = (1.0, min(demand.num_tokens, 600.0))
            at = self.now + verdict.retry_after_s
            waits = [m.wait_s(c, p, at) for m, c, p in zip(meters, costs, (10.0, 600.0), strict=True)]
            assert max(waits) == 0.0  # honest: then there is room

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), counts=st.booleans())
    def settle(self, data: st.DataObject, counts: bool) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        used = data.draw(st.integers(0, int(hold.num_tokens) if counts else 0))
        self.book.settle(hold, used, self.now, counts=counts)

    @invariant()
    def never_more_at_once_than_may_be(self) -> None:
        assert len(self.holds) <= 4
        assert self.book.num_held("t") == len(self.holds)
        assert self.book.quiet() == (not self.holds)

    @invariant()
    def everything_settled_drains_to_nothing(self) -> None:
        tenant = self.book._tenants.get("t")
        if tenant is not None:
            for meter, per_min in ((tenant.requests, 10.0), (tenant.tokens, 600.0)):
                assert Meter(meter.used, meter.at).drain(per_min, self.now + 60.0) == 0.0
                assert 0.0 <= meter.used <= per_min * (1 + 1e-6)


TestQuotas = Quotas.TestCase
TestQuotas.settings = hypothesis.settings(max_examples=40, stateful_step_count=30)


@hypothesis.given(
    waits=st.lists(st.floats(0, 30), max_size=80),
    costs=st.lists(st.integers(1, 100), min_size=80, max_size=80),
)
def test_no_window_has_more_than_the_limit_and_its_share(waits: list[float], costs: list[int]) -> None:
    """Over any t seconds at most per_min * (1 + t / 60)."""
    book, limits, now = QuotaBook(), KeyLimits(tokens_per_min=100), 0.0
    admitted: list[tuple[float, int]] = []
    for wait_s, cost in zip(waits, costs, strict=False):
        now += wait_s
        hold = book.take("t", limits, Demand(cost, 0), now)
        if isinstance(hold, Hold):
            admitted.append((now, cost))
            book.settle(hold, cost, now)
    for begin, (start, _) in enumerate(admitted):
        total = 0
        for at, cost in admitted[begin:]:
            total += cost
            assert total <= 100 * (1 + (at - start) / 60) + 1e-3


# ---- the words of the file


def test_settings_of_a_key() -> None:
    defaults = KeyLimits(requests_per_min=10, concurrent=3)
    words = ["name=team-a", "requests-per-min=none", "tokens-per-min=5000", "share=2"]
    assert parse_settings(words, "k", defaults) == ("team-a", KeyLimits(None, 5000, 3, 2))
    assert parse_settings([], "k", defaults) == ("k", defaults)
    assert not KeyLimits(share=3).is_limited
    assert defaults.is_limited


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("name=", "letters"),
        ("name=a/b", "letters"),
        ("name=a name=b", "twice"),
        ("requests-per-min=0", "whole number"),
        ("tokens-per-min=1.5", "whole number"),
        ("concurrent=-1", "whole number"),
        ("concurrent=", "whole number"),
        ("concurrent=" + "9" * 30, "whole number"),
        ("concurrent=\u0663", "whole number"),
        ("share=none", "share"),
        ("share=1001", "share"),
        ("rpm=5", "must be"),
        ("team-a", "must be"),
    ],
)
def test_settings_that_cannot_be(words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_settings(words.split(), "k", KeyLimits())
