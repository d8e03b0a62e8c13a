"""Which part of a run is measured: all of it, without warm-up and cool-down, or an automatic steady window.

1. The runner names a `Window` or `SteadyWindow`.
2. `resolve` turns it into a `Span` of the run, with the rule in words; the result file states it.
3. A request belongs to the span by its scheduled time, whatever became of it later, so a slow server cannot
   push its worst requests out of the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from bench.load.records import RequestRecord, RunRecord, Status
from cluster.errors import ConfigError

STEADY_QUANTILE = 0.9
STEADY_MAX_TRIM = 0.25  # of the offering, at each side


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Leave out requests scheduled in the first `warmup_s` and the last `cooldown_s` of the offering.

    With both 0 this is the whole run.
    """

    warmup_s: float = 0.0
    cooldown_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("warm-up", self.warmup_s), ("cool-down", self.cooldown_s)):
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name}: {value} s is not a time; give 0 or more seconds")


class SteadyWindow(msgspec.Struct, frozen=True):
    """Leave out at each side the time after which 90 % of the requests are done (p90 of E2E).

    A server that starts empty reaches its load after about one request's life, and drains for as long after
    the last one was offered. At most a quarter of the offering is cut at each side: a server in overload
    never gets steady (the in-flight counts of the window's halves in the summary show it).
    """


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the run's start. The whole run contains every request."""

    start_s: float
    end_s: float
    is_whole_run: bool
    rule: str
    is_empty: bool = False  # more is left out than there was
    left_out: str = ""  # what the requests outside it are left out by: `the warm-up of 5 s`

    @property
    def length_s(self) -> float:
        return max(0.0, self.end_s - self.start_s)

    def contains(self, record: RequestRecord) -> bool:
        is_inside = not self.is_empty and self.start_s <= record.scheduled_s <= self.end_s
        return self.is_whole_run or is_inside


WHOLE_RUN = Window()


def resolve(window: Window | SteadyWindow, run: RunRecord) -> Span:
    """The span of this run that is measured.

    The whole run lasts from the first scheduled time to the last end. Otherwise the offering lasts from the
    first to the last scheduled time; what an interrupted run would have offered later is no part of it.
    """
    first_s = min((record.scheduled_s for record in run.records), default=0.0)
    last_end_s = max((record.end_s for record in run.records if record.end_s is not None), default=first_s)
    if window == WHOLE_RUN:
        rule = "whole run: first scheduled to last end"
        return Span(start_s=first_s, end_s=max(first_s, last_end_s), is_whole_run=True, rule=rule)
    last_s = min(max((record.scheduled_s for record in run.records), default=0.0), last_end_s)
    if isinstance(window, SteadyWindow):
        trim_s, why = _steady_trim(run.records, last_s - first_s)
        start_s, end_s, left_out = first_s + trim_s, last_s - trim_s, "the steady window"
        rule = f"steady window: without {trim_s:.3g} s at each side of the offering ({why})"
    else:
        start_s, end_s, left_out = first_s + window.warmup_s, last_s - window.cooldown_s, _left_out(window)
        rule = f"without {window.warmup_s:g} s of warm-up and {window.cooldown_s:g} s of cool-down"
    is_empty = start_s > end_s
    if not is_empty:
        rule += f": requests scheduled from {start_s:.3f} s to {end_s:.3f} s"
    else:
        rule += (
            f": nothing is left of the {max(0.0, last_s - first_s):.3g} s in which requests were scheduled"
        )
        end_s = start_s
    return Span(
        start_s=start_s, end_s=end_s, is_whole_run=False, rule=rule, is_empty=is_empty, left_out=left_out
    )


def _left_out(window: Window) -> str:
    parts = (("warm-up", window.warmup_s), ("cool-down", window.cooldown_s))
    return " and ".join(f"the {name} of {length_s:g} s" for name, length_s in parts if length_s)


def _steady_trim(records: Sequence[RequestRecord], offering_s: float) -> tuple[float, str]:
    limit_s = max(0.0, offering_s) * STEADY_MAX_TRIM
    lives_s = sorted(
        record.end_s - record.scheduled_s
        for record in records
        if record.status is Status.OK and record.end_s is not None
    )
    if not lives_s:
        return limit_s, "no request ended OK, so a quarter of it"
    life_s = lives_s[min(len(lives_s) - 1, math.ceil(STEADY_QUANTILE * len(lives_s)) - 1)]
    if life_s <= limit_s:
        return life_s, f"p90 of E2E over {len(lives_s)} requests"
    return limit_s, f"a quarter of it; p90 of E2E is longer, {life_s:.3g} s"
