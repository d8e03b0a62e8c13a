"""The short strings that name an arrival on the command line.

`poisson`, `constant`, `gamma:0.5` (burstiness), `ramp:1-20@60` and `ramp:1-20@60,exponential` (requests/s
over seconds), `piecewise:5@30,20@10` (requests/s @ seconds, one after another), `burst`, `trace`.
"""

from __future__ import annotations

from bench.load import arrivals
from bench.load.plan import Arrival
from cluster.errors import ConfigError

_FORMS = "poisson, constant, gamma:B, ramp:R1-R2@SECONDS[,exponential], piecewise:R@SECONDS,…, burst or trace"


def parse_arrival(text: str, rate: float | None, seed: int) -> Arrival:
    """The arrival that `text` names, at `rate` requests per second where the form has no rate of its own.

    Raises:
        ConfigError: not one of the forms; a rate missing, or given where the form has its own.
    """
    kind, _, rest = text.strip().partition(":")
    takes_rest = kind in ("gamma", "ramp", "piecewise")
    if bool(rest) != takes_rest:
        raise ConfigError(f"Arrival `{text}` is not understood: use {_FORMS}.")
    if kind in ("ramp", "piecewise", "burst") and rate is not None:
        raise ConfigError(f"Arrival `{text}` does not take a rate of {rate:g}: leave the rate out.")
    match kind:
        case "poisson":
            return arrivals.poisson(_needed(rate, text), seed)
        case "constant":
            return arrivals.constant(_needed(rate, text), seed)
        case "gamma":
            return arrivals.gamma(_needed(rate, text), _number(rest, text), seed)
        case "ramp":
            return _ramp(rest, text, seed)
        case "piecewise":
            return arrivals.piecewise([_piece(item, text) for item in rest.split(",")], seed)
        case "burst":
            return arrivals.burst()
        case "trace":
            return arrivals.trace_times(rate)
        case _:
            raise ConfigError(f"Arrival `{text}` is not understood: use {_FORMS}.")


def _ramp(rest: str, text: str, seed: int) -> Arrival:
    ends, _, shape = rest.partition(",")
    rates, _, over_s = ends.partition("@")
    start, _, end = rates.partition("-")
    return arrivals.ramp(
        _number(start, text), _number(end, text), _number(over_s, text), shape.strip() or "linear", seed
    )


def _piece(item: str, text: str) -> tuple[float, float]:
    rate, _, duration_s = item.partition("@")
    return _number(duration_s, text), _number(rate, text)


def _needed(rate: float | None, text: str) -> float:
    if rate is None:
        raise ConfigError(f"Arrival `{text}` needs a rate in requests per second.")
    return rate


def _number(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"Arrival `{text}`: `{value}` is not a number; use {_FORMS}.") from None
