"""What goes into a search for the maximum goodput, and what comes out. Rates are requests per second."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from enum import Enum

import msgspec

from cluster.errors import ConfigError

MIN_SEEDS = 3  # for an interval to rely on


class SearchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in requests per second."""

    start_rate: float
    targets: tuple[float, ...] = (0.9, 0.99)  # shares of all offered requests
    seeds: tuple[int, ...] = (0, 1, 2)
    growth: float = 2.0
    tolerance: float = 0.05  # highest passing and lowest failing rate differ by at most this share
    max_probes: int = 60
    min_rate: float = 0.01
    max_rate: float = 10_000.0
    alone_at_min_rate: bool = False  # requests hardly overlap there: what fails there fails at any rate
    one_seed_below: float = 0.0  # a first seed that ends below this at the lowest target is enough

    def __post_init__(self) -> None:
        checks = (
            (
                bool(self.targets) and all(0 < x <= 1 for x in self.targets),
                "targets",
                "shares above 0, up to 1",
            ),
            (len(set(self.targets)) == len(self.targets), "targets", "no target twice"),
            (
                bool(self.seeds) and len(set(self.seeds)) == len(self.seeds),
                "seeds",
                "different seeds, 3 or more",
            ),
            (1 < self.growth < math.inf, "growth", "a factor above 1"),
            (0 < self.tolerance < 1, "tolerance", "a share between 0 and 1, such as 0.05"),
            (self.max_probes >= 1, "max_probes", "1 or more"),
            (
                0 < self.min_rate <= self.max_rate < math.inf,
                "min_rate and max_rate",
                "0 < min_rate <= max_rate",
            ),
            (
                self.min_rate <= self.start_rate <= self.max_rate,
                "start_rate",
                "a rate from min_rate to max_rate",
            ),
            (0 <= self.one_seed_below < math.inf, "one_seed_below", "a rate of 0 or more"),
        )
        for is_right, name, wanted in checks:
            if not is_right:
                raise ConfigError(f"max-goodput search: {name} cannot work; give {wanted}")


class Probe(msgspec.Struct, frozen=True):
    rate: float
    seed: int


class ProbeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    attainment: float | None  # good / offered, of the window; None if nothing was offered in it
    num_offered: int
    valid: bool = True


class End(Enum):
    """Why the search of one seed ended."""

    FOUND = "found"  # between a passing and a failing rate, within the tolerance
    NOTHING_PASSED = "nothing_passed"  # not even min_rate; the answer is 0
    OUT_OF_REACH = "out_of_reach"  # the same, where requests hardly overlap at min_rate: no rate would do
    MAX_RATE = "max_rate"  # max_rate itself passed; the answer is a lower bound
    UNFINISHED = "unfinished"  # stopped, or out of probes; the answer is the highest rate that passed so far
    NOT_SEARCHED = "not_searched"  # no probe of this seed: it has no answer


NOTHING = frozenset({End.NOTHING_PASSED, End.OUT_OF_REACH})
DONE = NOTHING | {End.FOUND}  # a finding, or a bracket within the tolerance


class SeedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    rate: float | None  # highest passing rate below the lowest failing one; None: nothing is known to pass
    failing_rate: float | None  # the lowest failing rate
    attainment: float | None  # measured at `rate`
    num_offered: int  # at `rate`
    end: End
    failing_attainment: float | None = None  # measured at `failing_rate`; None: that was not measured
    failing_num_offered: int = 0  # at `failing_rate`

    @property
    def is_converged(self) -> bool:
        return self.end in DONE


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """The one number of a target, and what it rests on."""

    rate: float | None  # None: no rate has passed yet
    is_lower_bound: bool
    seeds: tuple[int, ...]


def figure_of(seeds: Sequence[SeedAnswer]) -> Figure:
    """The rule for every figure of max goodput.

    It is the mean of the highest passing rates over the seeds whose search ended. Where none has ended, over
    those of which a rate has passed: a lower bound. A seed that was begun and has not ended is otherwise in
    no figure; but where all such seeds have passed the figure already, that is a lower bound, too.
    """
    done = [one for one in seeds if one.end in DONE]
    unended = [one for one in seeds if one.end not in DONE and one.end is not End.NOT_SEARCHED]
    counted = done or [one for one in unended if one.rate is not None]
    if not counted:
        return Figure(rate=None, is_lower_bound=False, seeds=())
    rate = statistics.fmean(one.rate or 0.0 for one in counted)
    have_passed = all(one.rate is not None and one.rate >= rate for one in unended)
    return Figure(
        rate=rate,
        is_lower_bound=not done or (bool(unended) and have_passed),
        seeds=tuple(one.seed for one in counted),
    )


class TargetAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Max goodput at one target.

    `rate`, `is_lower_bound` and the seeds that they rest on are those of `figure_of`. Seeds without a probe
    are listed with the end `not_searched`.

    `bracket_low`, `bracket_high`: from the lowest passing to the highest failing rate of the seeds that
    `rate` rests on. Of one seed: its highest passing and its lowest failing rate. `bracket_high` is None
    where a seed has not failed.

    `ci_low`, `ci_high`: 95 % interval of the mean over seeds, None with fewer than three of them or where one
    did not end `found`. It is the bracket from the mean passing to the mean failing rate, widened at each end
    by t · s / √n, where s is the deviation of those rates over the n seeds and t is Student's quantile (4.3
    for three seeds). With few seeds it may thus reach beyond rates that failed: it says how well the mean is
    known, the bracket says what was seen.
    """

    target: float
    rate: float | None
    is_lower_bound: bool
    num_seeds_searched: int
    bracket_low: float | None
    bracket_high: float | None
    ci_low: float | None
    ci_high: float | None
    attainment_low: float | None  # Wilson 95 % of the attainment pooled over seeds, each at its own answer
    attainment_high: float | None
    seeds: tuple[SeedAnswer, ...]
    is_converged: bool  # every seed that is worth a search ended found, or with nothing passed
    notes: tuple[str, ...]  # of this target; what holds for all of them is in the search's notes


def seed_notes(
    target: float, seeds: Sequence[SeedAnswer], settings: SearchSettings, num_probes: int
) -> tuple[str, ...]:
    """One sentence for each searched seed whose answer is not simply a rate found."""
    told = (one for one in seeds if one.end not in (End.FOUND, End.NOT_SEARCHED))
    return tuple(_note(one, target, settings, num_probes) for one in told)


def _note(one: SeedAnswer, target: float, settings: SearchSettings, num_probes: int) -> str:
    share = f"{one.failing_attainment or 0.0:.1%} of {one.failing_num_offered} requests"
    if one.end is End.OUT_OF_REACH:
        return (
            f"Seed {one.seed}: {target:.0%} is not reachable at any rate: at {settings.min_rate:.3g} "
            f"req/s, one at a time for the most part, only {share} met every SLO."
        )
    if one.end is End.NOTHING_PASSED:
        return (
            f"Seed {one.seed}: no rate reached {target:.0%}, down to the lowest allowed, "
            f"{settings.min_rate:g} req/s; the answer is 0 ({share} met every SLO there)."
        )
    if one.end is End.MAX_RATE:
        return (
            f"Seed {one.seed}: the highest rate allowed, {settings.max_rate:g} req/s, reached {target:.0%}; "
            "the true rate may be higher."
        )
    passed = "no rate has" if one.rate is None else f"{one.rate:.4g} req/s"
    failed = "none failed" if one.failing_rate is None else f"{one.failing_rate:.4g} req/s failed"
    return (
        f"Seed {one.seed}: the search stopped after {num_probes} of at most {settings.max_probes} probes; "
        f"so far {passed} passed and {failed}."
    )
