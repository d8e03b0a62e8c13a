"""When requests arrive: an `Arrival` as a value, and the schedule it gives.

1. A constructor here (or `arrival_text.parse_arrival`) makes an `Arrival`, checked.
2. `schedule` draws unit gaps (mean 1): exponential for Poisson, gamma with shape b and scale 1/b (vLLM's
   `burstiness`; the coefficient of variation is 1/√b), or equal ones.
3. Their running sum is the expected number of arrivals Λ(t) at each arrival; the rate curve's inverse Λ⁻¹
   turns it into seconds (time rescaling). A constant rate is the curve Λ(t) = rate · t.

Nothing is rescaled afterwards: the number of arrivals within a duration varies as the process says. The
first arrival of a random process comes after its first gap; that of a constant one at 0.
"""

from __future__ import annotations

import math

import numpy as np

from bench.load.plan import Arrival
from bench.load.plans.randomness import generator
from bench.load.plans.rate_curves import (
    ConstantRate,
    ExponentialRamp,
    Floats,
    LinearRamp,
    PiecewiseRate,
    RateCurve,
)
from cluster.errors import ConfigError

MAX_REQUESTS = 5_000_000  # of one plan; it is held in memory
MIN_RATE, MAX_RATE = 1e-9, 1e9  # requests per second


def poisson(rate: float, seed: int) -> Arrival:
    return Arrival(kind="poisson", seed=seed, rate=check_rate(rate))


def gamma(rate: float, burstiness: float, seed: int) -> Arrival:
    """Gaps are gamma with shape `burstiness` (1 is Poisson, below 1 burstier) and mean 1 / rate."""
    if not 0 < burstiness <= 1e6:
        raise ConfigError(
            f"Burstiness {burstiness:g} cannot be a gamma shape: use a number above 0 (1 is Poisson)."
        )
    return Arrival(kind="gamma", seed=seed, rate=check_rate(rate), burstiness=burstiness)


def constant(rate: float, seed: int = 0) -> Arrival:
    """Request i at i / rate."""
    return Arrival(kind="constant", seed=seed, rate=check_rate(rate))


def ramp(start_rate: float, end_rate: float, over_s: float, shape: str, seed: int) -> Arrival:
    """A Poisson process whose rate goes from `start_rate` to `end_rate` over `over_s`; `shape`: linear,
    exponential.
    """
    if shape not in ("linear", "exponential"):
        raise ConfigError(f"Ramp shape `{shape}` is unknown: use `linear` or `exponential`.")
    if not (0 < over_s < math.inf):
        raise ConfigError(f"A ramp over {over_s:g} s is no ramp: use a time above 0.")
    needs_both = shape == "exponential"
    ends = [rate for rate in (start_rate, end_rate) if needs_both or rate != 0]
    if not ends or not all(MIN_RATE <= rate <= MAX_RATE for rate in ends):
        raise ConfigError(
            f"A ramp from {start_rate:g} to {end_rate:g} requests/s cannot be offered: linear ramps need "
            "one rate above 0 and none below, exponential ones both above 0."
        )
    details = {"start_rate": start_rate, "end_rate": end_rate, "over_s": over_s, "shape": shape}
    arrival = Arrival(kind="ramp", seed=seed, details=details)
    mean = rate_curve(arrival).expected(over_s) / over_s
    return Arrival(kind="ramp", seed=seed, rate=mean, details=details)


def piecewise(pieces: list[tuple[float, float]], seed: int) -> Arrival:
    """A Poisson process with a rate per piece: `(duration_s, rate)`."""
    sound = all(
        0 < duration_s < math.inf and (rate == 0 or MIN_RATE <= rate <= MAX_RATE)
        for duration_s, rate in pieces
    )
    if not sound or not any(rate > 0 for _, rate in pieces):
        raise ConfigError(
            f"The rate pieces {pieces} cannot be offered: each needs a duration above 0 s and a rate of 0 "
            "or more, and one rate must be above 0."
        )
    mean = sum(duration * rate for duration, rate in pieces) / sum(duration for duration, _ in pieces)
    details = {"pieces": [[duration_s, rate] for duration_s, rate in pieces]}
    return Arrival(kind="piecewise", seed=seed, rate=mean, details=details)


def burst() -> Arrival:
    """Everything at 0."""
    return Arrival(kind="burst", seed=0)


def closed_loop(num_in_flight: int) -> Arrival:
    if num_in_flight < 1:
        raise ConfigError(
            f"A closed loop of {num_in_flight} sends nothing: use 1 or more requests in flight."
        )
    return Arrival(kind="closed-loop", seed=0, closed_loop=num_in_flight)


def trace_times(rate: float | None = None) -> Arrival:
    """The trace's own timestamps; with `rate`, sped up so that the mean of the rows taken is `rate`."""
    return Arrival(kind="trace", seed=0, rate=None if rate is None else check_rate(rate))


def rate_curve(arrival: Arrival) -> RateCurve:
    """The curve behind a random or constant arrival."""
    details = arrival.details
    match arrival.kind:
        case "ramp":
            shape = LinearRamp if details["shape"] == "linear" else ExponentialRamp
            return shape(details["start_rate"], details["end_rate"], details["over_s"])
        case "piecewise":
            return PiecewiseRate(tuple((duration_s, rate) for duration_s, rate in details["pieces"]))
        case _:
            assert arrival.rate is not None, f"{arrival.kind} has no rate"
            return ConstantRate(arrival.rate)


def schedule(arrival: Arrival, num_requests: int | None, duration_s: float | None) -> list[float]:
    """Arrival times in seconds, ascending: the first `num_requests`, and only those before `duration_s`.

    A piecewise process (or a ramp down to 0) ends by itself; then `num_requests` is an upper limit.

    Raises:
        ConfigError: neither limit says how many, or the schedule is empty or too long.
    """
    if num_requests is not None and not 1 <= num_requests <= MAX_REQUESTS:
        raise ConfigError(f"{num_requests} requests cannot be planned: use 1 to {MAX_REQUESTS}.")
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise ConfigError(f"A duration of {duration_s:g} s cannot be planned: use a time above 0.")
    if arrival.kind in ("burst", "closed-loop"):
        if num_requests is None or duration_s is not None:
            raise ConfigError(
                f"How many requests a {arrival.kind} run gets done in a duration is not known before: give "
                "--requests N, and no --duration."
            )
        return [0.0] * num_requests
    assert arrival.kind != "trace", "a trace brings its own times: `replay.select`"
    if num_requests is None and duration_s is None and arrival.kind != "piecewise":
        raise ConfigError("The run has no end: give a number of requests or a duration.")
    times_s = _draw(arrival, rate_curve(arrival), num_requests, duration_s)
    if not times_s:
        raise ConfigError(
            "The schedule is empty: no request arrives within the duration; use a higher rate or more time."
        )
    return times_s


def _draw(
    arrival: Arrival, curve: RateCurve, num_requests: int | None, duration_s: float | None
) -> list[float]:
    horizon_s = math.inf if duration_s is None else duration_s
    if arrival.kind == "piecewise":
        horizon_s = min(horizon_s, sum(duration for duration, _ in arrival.details["pieces"]))
    target = math.inf if num_requests is None else num_requests
    mean = min(target, curve.expected(horizon_s)) if math.isfinite(horizon_s) else target
    if mean > MAX_REQUESTS:
        raise ConfigError(f"About {mean:.0f} requests would arrive: a plan holds at most {MAX_REQUESTS}.")
    if arrival.kind == "constant":
        times = curve.invert(np.arange(int(mean) + 1, dtype=np.float64))
    else:
        times = _random_times(arrival, curve, int(mean), target, horizon_s)
    times = times[: None if num_requests is None else num_requests]
    kept: list[float] = times[times < horizon_s].tolist()
    return kept


def _random_times(arrival: Arrival, curve: RateCurve, mean: int, target: float, horizon_s: float) -> Floats:
    """At least `target` arrivals, or up to past `horizon_s`. Drawing more never moves the earlier ones."""
    rng = generator(arrival.seed, "arrivals")
    shape = arrival.burstiness
    gaps = np.empty(0, dtype=np.float64)
    num_more = mean + 16
    while True:
        gaps = np.concatenate((gaps, rng.gamma(shape, 1 / shape, size=num_more)))
        times = curve.invert(np.cumsum(gaps))
        if len(times) >= target or times[-1] >= horizon_s:
            return times
        num_more = max(64, len(gaps) // 4)


def check_rate(rate: float) -> float:
    """`rate`, if it is one.

    Raises:
        ConfigError: it is not.
    """
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ConfigError(
            f"A rate of {rate:g} requests/s cannot be offered: use {MIN_RATE:g} to {MAX_RATE:g}."
        )
    return rate
