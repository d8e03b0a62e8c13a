import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.plan import Arrival
from bench.load.plans import arrivals
from bench.load.plans.arrival_text import parse_arrival
from bench.load.plans.arrivals import schedule
from bench.load.plans.rate_curves import ConstantRate, ExponentialRamp, LinearRamp, PiecewiseRate, RateCurve
from cluster.errors import ConfigError

positive = st.floats(0.01, 1000)
zero_or_more = st.one_of(st.just(0.0), st.floats(arrivals.MIN_RATE, 1000))
CURVES = st.one_of(
    st.builds(ConstantRate, positive),
    st.builds(LinearRamp, zero_or_more, positive, positive),
    st.builds(LinearRamp, positive, zero_or_more, positive),
    st.builds(ExponentialRamp, positive, positive, positive),
    st.builds(
        PiecewiseRate,
        st.lists(st.tuples(positive, st.sampled_from([0.0, 0.5, 20.0])), min_size=1, max_size=6)
        .filter(lambda pieces: any(rate for _, rate in pieces))
        .map(tuple),
    ),
)


@given(CURVES, st.floats(0.001, 0.999))
def test_the_inverse_undoes_the_integral(curve: RateCurve, share: float) -> None:
    end_s = curve.over_s if isinstance(curve, LinearRamp | ExponentialRamp) else 500.0
    for time_s in (share * end_s, end_s * (1 + share)):
        expected = curve.expected(time_s)
        found_s = curve.invert(np.array([expected]))[0]
        if math.isfinite(found_s):
            assert curve.expected(found_s) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_integrals_by_hand() -> None:
    linear = LinearRamp(2, 6, 10)
    assert [linear.expected(t) for t in (0, 5, 10, 12)] == [0, 15, 40, 52]
    assert linear.invert(np.array([0.0, 15.0, 40.0, 52.0])).tolist() == pytest.approx([0, 5, 10, 12])
    down = LinearRamp(4, 0, 10)
    assert down.invert(np.array([20.0, 20.001])).tolist() == [10, math.inf]
    exponential = ExponentialRamp(1, math.e, 10)
    assert exponential.expected(10) == pytest.approx(10 * (math.e - 1))
    assert exponential.invert(np.array([10 * (math.e - 1) + math.e])).tolist() == pytest.approx([11])
    pieces = PiecewiseRate(((10, 1), (5, 0), (10, 2)))
    assert [pieces.expected(t) for t in (5, 12, 15, 20, 99)] == [5, 10, 10, 20, 30]
    times_s = pieces.invert(np.array([0.0, 5.0, 10.0, 10.5, 30.0, 30.5]))
    assert times_s.tolist() == [0, 5, 10, 15.25, 25, math.inf]


def test_rescaled_gaps_are_the_gaps_of_the_unit_process() -> None:
    """The same seed at a constant rate and at a ramp: Λ of each arrival is the same running sum."""
    ramp = arrivals.ramp(1, 20, 100, "exponential", seed=3)
    plain = schedule(arrivals.poisson(1.0, seed=3), 500, None)
    ramped = schedule(ramp, 500, None)
    curve = arrivals.rate_curve(ramp)
    assert [curve.expected(time_s) for time_s in ramped] == pytest.approx(plain)


def test_poisson_rate_and_spread() -> None:
    times_s = schedule(arrivals.poisson(50, seed=1), None, 400)
    # 20,000 expected, standard deviation 141
    assert abs(len(times_s) - 20_000) < 4 * 141
    gaps = np.diff(times_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)
    per_second = np.histogram(times_s, bins=400, range=(0, 400))[0]
    assert per_second.var() / per_second.mean() == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, 100.0])
def test_gamma_spread_is_one_over_root_burstiness(burstiness: float) -> None:
    gaps = np.diff(schedule(arrivals.gamma(10, burstiness, seed=2), 50_000, None))
    assert gaps.mean() == pytest.approx(0.1, rel=4 / math.sqrt(50_000 * burstiness))
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_constant_starts_at_zero() -> None:
    assert schedule(arrivals.constant(4), 5, None) == [0, 0.25, 0.5, 0.75, 1.0]
    assert schedule(arrivals.constant(4), None, 1.0) == [0, 0.25, 0.5, 0.75]


def test_piecewise_follows_its_rates_and_ends() -> None:
    pieces = [(100.0, 30.0), (50.0, 0.0), (100.0, 60.0)]
    times_s = np.array(schedule(arrivals.piecewise(pieces, seed=5), None, None))
    counts = np.histogram(times_s, bins=[0, 100, 150, 250])[0]
    assert counts[1] == 0
    assert abs(counts[0] - 3000) < 4 * math.sqrt(3000)
    assert abs(counts[2] - 6000) < 4 * math.sqrt(6000)
    assert len(schedule(arrivals.piecewise(pieces, seed=5), 10_000_00, None)) == len(times_s)


def test_a_ramp_down_to_zero_ends() -> None:
    times_s = schedule(arrivals.ramp(100, 0, 20, "linear", seed=5), 5000, None)
    assert abs(len(times_s) - 1000) < 4 * math.sqrt(1000)
    assert max(times_s) <= 20


def test_mean_rates() -> None:
    assert arrivals.ramp(2, 6, 10, "linear", 0).rate == pytest.approx(4)
    assert arrivals.ramp(1, math.e, 10, "exponential", 0).rate == pytest.approx(math.e - 1)
    assert arrivals.piecewise([(10, 1), (30, 5)], 0).rate == pytest.approx(4)


def test_burst_and_closed_loop_start_at_zero() -> None:
    assert schedule(arrivals.burst(), 3, None) == [0, 0, 0]
    assert schedule(arrivals.closed_loop(8), 3, None) == [0, 0, 0]
    for num_requests in (None, 3):
        with pytest.raises(ConfigError, match="give --requests N, and no --duration"):
            schedule(arrivals.closed_loop(8), num_requests, 60)


ARRIVALS = st.sampled_from(
    [
        arrivals.poisson(7, 11),
        arrivals.gamma(7, 0.3, 11),
        arrivals.constant(7),
        arrivals.ramp(1, 9, 20, "linear", 11),
        arrivals.ramp(9, 1, 20, "exponential", 11),
        arrivals.piecewise([(20, 3), (20, 9)], 11),
    ]
)


@given(ARRIVALS, st.integers(1, 300), st.floats(1, 60))
@settings(max_examples=60)
def test_limits_cut_one_and_the_same_sequence(arrival: Arrival, num: int, duration_s: float) -> None:
    long = schedule(arrival, 600, None)
    by_number = schedule(arrival, num, None)
    assert by_number == long[:num]
    assert by_number == sorted(by_number)
    expected = [time_s for time_s in long if time_s < duration_s]
    if 0 < len(expected) < len(long):
        assert schedule(arrival, None, duration_s) == expected
        assert schedule(arrival, num, duration_s) == expected[:num]


def test_seeds_differ() -> None:
    first, second = (schedule(arrivals.poisson(5, seed), 10, None) for seed in (1, 2))
    assert first != second


def test_a_small_number_under_a_long_duration_is_quick() -> None:
    assert len(schedule(arrivals.poisson(1, 0), 10, 1e9)) == 10


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: arrivals.poisson(0, 0), "rate of 0"),
        (lambda: arrivals.poisson(math.nan, 0), "rate of nan"),
        (lambda: arrivals.poisson(math.inf, 0), "rate of inf"),
        (lambda: arrivals.gamma(1, 0, 0), "Burstiness 0"),
        (lambda: arrivals.ramp(0, 0, 10, "linear", 0), "cannot be offered"),
        (lambda: arrivals.ramp(-1, 5, 10, "linear", 0), "cannot be offered"),
        (lambda: arrivals.ramp(0, 5, 10, "exponential", 0), "cannot be offered"),
        (lambda: arrivals.ramp(math.nan, 5, 10, "linear", 0), "cannot be offered"),
        (lambda: arrivals.ramp(1, 5, 0, "linear", 0), "above 0"),
        (lambda: arrivals.ramp(1, 5, 10, "square", 0), "`square`"),
        (lambda: arrivals.piecewise([], 0), "cannot be offered"),
        (lambda: arrivals.piecewise([(10, 0)], 0), "above 0"),
        (lambda: arrivals.piecewise([(0, 5)], 0), "above 0"),
        (lambda: arrivals.closed_loop(0), "closed loop of 0"),
        (lambda: schedule(arrivals.poisson(1, 0), None, None), "no end"),
        (lambda: schedule(arrivals.poisson(1, 0), 0, None), "0 requests"),
        (lambda: schedule(arrivals.poisson(1, 0), None, math.inf), "duration of inf"),
        (lambda: schedule(arrivals.poisson(1e9, 0), None, 3600), "at most"),
        (lambda: schedule(arrivals.poisson(1e-9, 0), None, 1), "empty"),
    ],
)
def test_impossible_arrivals_are_named(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=named):
        make()


def test_arrival_strings() -> None:
    assert parse_arrival("poisson", 3, 1) == arrivals.poisson(3, 1)
    assert parse_arrival("constant", 3, 1) == arrivals.constant(3, 1)
    assert parse_arrival("gamma:0.5", 3, 1) == arrivals.gamma(3, 0.5, 1)
    assert parse_arrival("ramp:1-20@60", None, 1) == arrivals.ramp(1, 20, 60, "linear", 1)
    assert parse_arrival("ramp:1-20@60,exponential", None, 1) == arrivals.ramp(1, 20, 60, "exponential", 1)
    assert parse_arrival("piecewise:5@30,20@10", None, 1) == arrivals.piecewise([(30, 5), (10, 20)], 1)
    assert parse_arrival("burst", None, 1) == arrivals.burst()
    assert parse_arrival("trace", None, 1) == arrivals.trace_times()
    assert parse_arrival("trace", 3, 1) == arrivals.trace_times(3)


@pytest.mark.parametrize(
    ("text", "rate", "named"),
    [
        ("poisson", None, "needs a rate"),
        ("poisson:3", 3.0, "not understood"),
        ("gamma", 3.0, "not understood"),
        ("gamma:x", 3.0, "`x` is not a number"),
        ("ramp:1-20", None, "`` is not a number"),
        ("ramp:1-20@60,cubic", None, "`cubic`"),
        ("ramp:1-20@60", 5.0, "leave the rate out"),
        ("piecewise:5@30,,", None, "is not a number"),
        ("sometimes", 1.0, "not understood"),
    ],
)
def test_wrong_arrival_strings_are_named(text: str, rate: float | None, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_arrival(text, rate, 0)
