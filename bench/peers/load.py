"""What every peer is offered besides closed loops (`closed_loop`): the search for max goodput on a trace.

Prompts are random token ids, the same for every peer (one seed); each run has a salt of its own, so nothing
is found in a cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.load.figures.slo import Slo
from bench.load.figures.window import Window
from bench.load.goodput.probing import ProbedSearch
from bench.load.goodput.values import Probe, ProbeOutcome, SearchSettings
from bench.load.plans import arrivals
from bench.load.plans.build import build_plan
from bench.load.plans.settings import Oversize, PlanSettings, TraceReplay, at_rate
from bench.load.plans.traces import read_trace
from bench.load.runner import Measurement, RunSettings
from bench.peers.estimate import (
    MOST_ALONE,
    WARMUP_SHARE,
    Estimate,
    Lengths,
    estimate,
    lowest_rate,
    probe_length_s,
    start_rate,
)
from bench.peers.goodput import goodput_of
from bench.peers.measuring import MEANWHILE, measure_aware
from bench.peers.outcome import Goodput, PeerOutcome, mean_of
from bench.peers.server import Running
from cluster.errors import BatonError, ConfigError

INPUT_TOKENS, OUTPUT_TOKENS = 256, 128
MAX_RATE = 1000.0


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """The open-loop load of the goodput search."""

    path: Path
    scale: float  # divides the trace's lengths: what a machine of this size can serve
    slos: tuple[Slo, ...]
    probe_s: float  # arrivals of one probe; more at a low rate (`estimate.probe_length_s`)
    seeds: tuple[int, ...]
    targets: tuple[float, ...]
    max_probes: int  # per server, if the time allows so many
    tolerance: float  # the search ends when pass and fail differ by at most this share


def trace_settings(running: Running, load: TraceLoad, rate: float) -> PlanSettings:
    return PlanSettings(
        model=running.info.model,
        arrival=arrivals.trace_times(rate),
        workload=TraceReplay(path=str(load.path), scale=load.scale, random_offset=True),
        duration_s=load.probe_s,
        max_model_len=running.info.max_model_len,
        oversize=Oversize.CLAMP,
    )


def trace_lengths(load: TraceLoad) -> Lengths:
    """Of all rows, scaled."""
    rows = read_trace(load.path).rows
    inputs = sorted(max(1, int(row.input_tokens / load.scale)) for row in rows)
    return Lengths(
        mean_input=statistics.fmean(inputs),
        long_input=inputs[len(inputs) * 9 // 10],
        mean_output=statistics.fmean(max(1, int(row.output_tokens / load.scale)) for row in rows),
    )


def estimate_of(outcome: PeerOutcome, load: TraceLoad, lengths: Lengths) -> Estimate | None:
    """From this server's closed loops."""
    loads = sorted({run.concurrency for one in outcome.rounds for run in one})
    means = [mean for at in loads if (mean := mean_of(outcome, at)) is not None]
    return estimate(means, INPUT_TOKENS, OUTPUT_TOKENS, lengths, load.slos)


def probe_settings(base: PlanSettings, load: TraceLoad, probe: Probe, salt: int) -> PlanSettings:
    """One probe: its rate and seed, for as long as it takes to say something."""
    aimed = at_rate(base, probe.rate, probe.seed, salt)
    return msgspec.structs.replace(aimed, duration_s=probe_length_s(probe.rate, load.probe_s))


class ServerSearch:
    """The search for a running server's max goodput, probe by probe."""

    def __init__(
        self,
        running: Running,
        load: TraceLoad,
        found: Estimate | None,
        max_probes: int,
        one_seed_below: float,
        backend: str,
        tell: Callable[[str], None],
        first_rate: float | None = None,
    ) -> None:
        """
        Args:
            found: `estimate_of` this server.
            one_seed_below: rate below which one seed is enough, `values.SearchSettings`.
            first_rate: where to begin; None: as `found` says.

        Raises:
            BatonError: the trace is too short for any rate.
        """
        self._running, self._load, self._backend, self._tell = running, load, backend, tell
        self._base = trace_settings(running, load, rate=1.0)  # each probe has a rate of its own
        most_rows = len(read_trace(load.path).rows)
        max_rate = min(MAX_RATE, (most_rows - 1) / load.probe_s)
        settings = search_settings(load, found, max_probes, max_rate, one_seed_below)
        if first_rate is not None:
            first_rate = min(max(first_rate, settings.min_rate), max_rate)
            settings = msgspec.structs.replace(settings, start_rate=first_rate)
        self._search = ProbedSearch(settings)
        self._how = RunSettings(
            slos=load.slos,
            window=Window(warmup_s=WARMUP_SHARE * load.probe_s),
            timeout_s=max(60.0, load.probe_s),
        )

    @property
    def is_over(self) -> bool:
        return self._search.next() is None

    @property
    def is_interrupted(self) -> bool:
        return any(not one.run.is_complete for one in self._search.measurements)

    def step(self, ends_s: float) -> None:
        """The next probe; one that would end later than `ends_s`, by `time.monotonic`, ends the search.

        Raises:
            BatonError: it is the first one, and cannot be offered.
        """

        def offer(probe: Probe, number: int) -> Measurement:
            if time.monotonic() + probe_length_s(probe.rate, self._load.probe_s) > ends_s:
                raise BatonError("the time for this search is over")
            settings = probe_settings(self._base, self._load, probe, number + 1)
            return measure_aware(
                self._running, build_plan(settings, None), settings, self._how, self._backend
            )

        self._search.step(offer, self._told)

    def _told(self, probe: Probe, outcome: ProbeOutcome, _: object) -> None:
        share = outcome.attainment or 0.0
        self._tell(f"  {probe.rate:.3g} req/s, seed {probe.seed}: {share:.1%} of {outcome.num_offered} good")

    def account(self) -> dict[str, Any]:
        """The search's own, with how long each probe took and what the machine did meanwhile."""
        measured = self._search.measurements
        took_s = [round(one.run.wall_s, 1) for one in measured]
        meanwhile = [{name: one.result[name] for name in MEANWHILE} for one in measured]
        return self._search.account() | {"probe_wall_s": took_s, "probe_meanwhile": meanwhile}


def search_goodput(
    running: Running,
    load: TraceLoad,
    found: Estimate | None,
    max_probes: int,
    max_s: float,
    one_seed_below: float,
    backend: str,
    tell: Callable[[str], None],
) -> tuple[list[Goodput], dict[str, Any], bool]:
    """A whole search (`ServerSearch`) at once: max goodput per target share, the search's own account, and
    whether the user interrupted it. No probe begins that would end after `max_s`.

    Raises:
        BatonError: the first probe cannot be built, or there is no time for it.
    """
    search = ServerSearch(running, load, found, max_probes, one_seed_below, backend, tell)
    ends_s = time.monotonic() + max_s
    while not search.is_over:
        search.step(ends_s)
    account = search.account()
    return goodput_of(account), account, search.is_interrupted


def search_settings(
    load: TraceLoad,
    found: Estimate | None,
    max_probes: int,
    max_rate: float = MAX_RATE,
    one_seed_below: float = 0.0,
) -> SearchSettings:
    """Steps of twice the tolerance (on the log scale), so that one bisection ends a bracket.
    `max_rate`: at most what the trace has rows for.

    Raises:
        ConfigError: the trace is too short for any rate.
    """
    min_rate = lowest_rate(found, load.probe_s)
    if min_rate > max_rate:
        raise ConfigError(
            f"{load.path.name} has too few rows for probes of {load.probe_s:g} s: enough for {max_rate:.3g} "
            f"req/s, and the search goes down to {min_rate:.3g}; give a longer trace or --probe-seconds less"
        )
    return SearchSettings(
        start_rate=start_rate(found, min_rate, max_rate),
        min_rate=min_rate,
        max_rate=max_rate,
        targets=load.targets,
        seeds=load.seeds,
        max_probes=max_probes,
        tolerance=load.tolerance,
        growth=(1 + load.tolerance) ** 2,
        alone_at_min_rate=found is not None and min_rate * found.alone_s <= MOST_ALONE,
        one_seed_below=one_seed_below,
    )
