"""SLOs: `ttft=200ms,tpot=50ms,gap=150ms,itl=…,e2e=5s`: what they bound, and whether a request met them.

1. `parse_slos` reads the text of a flag; `format_slos` writes it back.
2. `evaluate` holds one request against each bound.
3. `metrics` counts: a request is good when it ended OK and met every bound, and all offered requests count.

`tpot` of a one-token answer does not exist, so that answer meets any tpot bound; likewise `itl` and `gap` of
an answer that came in one chunk. A failed request meets no bound, and neither does an answer without a token:
its reader waited for nothing.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from bench.load.figures.latency import Latency
from bench.load.records import Status
from cluster.errors import ConfigError


class SloMetric(Enum):
    TTFT = "ttft"  # scheduled time to first chunk with content
    TPOT = "tpot"  # (e2e - ttft) / (output tokens - 1)
    ITL = "itl"  # mean gap between chunks of the request
    GAP = "gap"  # worst gap between two chunks of the request
    E2E = "e2e"  # scheduled time to last byte


class Slo(msgspec.Struct, frozen=True):
    metric: SloMetric
    bound_s: float


ALIASES: Mapping[str, SloMetric] = {"e2el": SloMetric.E2E}  # vLLM's name
EXAMPLE = "ttft=200ms,tpot=50ms"
# unit -> (factor, divisor) to seconds. Dividing keeps 200ms == 0.2 exactly.
UNITS: Mapping[str, tuple[float, float]] = {
    "us": (1.0, 1e6),
    "µs": (1.0, 1e6),  # micro sign
    "μs": (1.0, 1e6),  # Greek mu
    "ms": (1.0, 1e3),
    "s": (1.0, 1.0),
    "m": (60.0, 1.0),
    "": (1.0, 1e3),
}
_DURATION = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([^\W\d_]*)", re.IGNORECASE)
_AROUND_EQUALS = re.compile(r"\s*([=:])\s*")
_BEFORE_UNIT = re.compile(r"(?<=[\d.])\s+(?=(?:us|µs|μs|ms|s|m)(?:[\s,]|$))")


def parse_slos(text: str) -> tuple[Slo, ...]:
    """Bounds such as `ttft=200ms,tpot=50ms`, in the order given.

    `=` or `:`, commas or blanks; units us, ms, s, m; a plain number is milliseconds (`ttft:200 tpot:50
    e2el:5000`, as vLLM writes them).

    Raises:
        ConfigError: an empty text or part, an unknown metric or unit, a metric given twice, or a bound that
        is not
            a finite number above zero. The message names the part.
    """
    compact = _BEFORE_UNIT.sub("", _AROUND_EQUALS.sub(r"\1", text.strip()))
    if not compact:
        raise ConfigError(
            f"SLO: the text is empty; write bounds such as `{EXAMPLE}`, or leave the option out"
        )
    slos: dict[SloMetric, Slo] = {}
    for part in re.split(r"\s*,\s*|\s+", compact):
        slo = _parse_part(part, text)
        if slo.metric in slos:
            raise ConfigError(f"SLO `{part}`: `{slo.metric.value}` is given twice; keep one bound per metric")
        slos[slo.metric] = slo
    return tuple(slos.values())


def _parse_part(part: str, text: str) -> Slo:
    if not part:
        raise ConfigError(f"SLO `{text.strip()}`: a part between commas is empty; write it like `{EXAMPLE}`")
    pieces = re.split(r"[=:]", part)
    if len(pieces) != 2:
        raise ConfigError(f"SLO `{part}`: not of the form metric=bound; write it like `{EXAMPLE}`")
    name, bound = pieces[0].lower(), pieces[1]
    return Slo(_parse_metric(name, part), _parse_bound(bound, part))


def _parse_metric(name: str, part: str) -> SloMetric:
    known = {metric.value: metric for metric in SloMetric}
    metric = known.get(name) or ALIASES.get(name)
    if metric is not None:
        return metric
    close = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
    meant = f" (did you mean `{close[0]}`?)" if close else ""
    raise ConfigError(f"SLO `{part}`: unknown metric `{name}`{meant}; known are {', '.join(known)}")


def _parse_bound(bound: str, part: str) -> float:
    match = _DURATION.fullmatch(bound)
    if match is None:
        raise ConfigError(
            f"SLO `{part}`: `{bound}` is not a time; write a number and a unit, such as `200ms` or `5s`"
        )
    number, unit = match.groups()
    if unit.lower() not in UNITS:
        raise ConfigError(f"SLO `{part}`: unknown unit `{unit}`; use us, ms, s or m (a plain number is ms)")
    factor, divisor = UNITS[unit.lower()]
    bound_s = float(number) * factor / divisor
    if not math.isfinite(bound_s) or bound_s <= 0:
        raise ConfigError(f"SLO `{part}`: the bound must be a finite time above zero, such as `200ms`")
    return bound_s


def format_slos(slos: Sequence[Slo]) -> str:
    """The text that `parse_slos` reads back to exactly these bounds."""
    return ",".join(f"{slo.metric.value}={_format_bound(slo.bound_s)}" for slo in slos)


def _format_bound(bound_s: float) -> str:
    unit, divisor = ("s", 1.0) if bound_s >= 1 else ("ms", 1e3) if bound_s >= 1e-3 else ("us", 1e6)
    text = f"{bound_s * divisor:.12g}"
    exact = float(text) / divisor == bound_s
    return f"{text}{unit}" if exact else f"{bound_s!r}s"


def slos_to_ms(slos: Sequence[Slo]) -> dict[str, float]:
    """`slos_ms` of the result file."""
    return {slo.metric.value: float(f"{slo.bound_s * 1e3:.12g}") for slo in slos}


def slos_from_ms(slos_ms: Mapping[str, float]) -> tuple[Slo, ...]:
    return tuple(Slo(SloMetric(name), bound_ms / 1e3) for name, bound_ms in slos_ms.items())


def evaluate(slos: Sequence[Slo], status: Status, latency: Latency) -> tuple[bool, ...]:
    """Whether the request met each bound, in the order of `slos`."""
    has_token = latency.ttft_s is not None
    return tuple(status is Status.OK and has_token and _meets(slo, latency) for slo in slos)


def is_good(status: Status, met: Sequence[bool]) -> bool:
    """Ended OK and met every bound."""
    return status is Status.OK and all(met)


def _meets(slo: Slo, latency: Latency) -> bool:
    match slo.metric:
        case SloMetric.TTFT:
            value = latency.ttft_s
        case SloMetric.E2E:
            value = latency.e2e_s
        case SloMetric.TPOT:
            value = 0.0 if latency.output_len <= 1 else latency.tpot_s
        case SloMetric.ITL:
            value = latency.itl_s or 0.0
        case SloMetric.GAP:
            value = latency.gap_s or 0.0
    return value is not None and value <= slo.bound_s
