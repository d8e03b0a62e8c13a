"""How fast one router process is: `python -m bench.router_speed [--out FILE]`.

1. For each offered rate a fresh router process, pinned to one core, and scripted engines: 256 chats stream at
   once, read by the load test's client. The last row is the first rate that is not sustained.
2. At half of that, streams and tokens/s: the time a token spends between its engine and the client's read.
   Then all streams at half the rate, and between them the first byte of requests that are refused.
3. An idle router: refused requests; then /health while 32 prompts of 100 kB are tokenized.

Client, engines and this process share the other core, so beyond a rate it is they who cannot go on:
`client_cpu` and `engines_cpu` tell. `router_us_per_token` is CPU time and says what the router could do if
they could. `stolen_ms` is what the machine's host took of the cores meanwhile: a pause of all, which is
nobody's here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.machine import cpu_facts
from bench.router_speed.probes import Refusals, health_while_tokenizing
from bench.router_speed.site import Site, SiteSettings
from bench.router_speed.streams import OPENING_S, figures, offer_streams
from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import prepare_model
from kernels.reference import ReferenceBackend

REQUIRED_TOKENS_PER_S = 15_000
RATES = (7_500, 15_000, 20_000, 25_000)
REFUSED_AFTER_S = OPENING_S + 1.5  # all streams are open by then
IDLE_S = 3.0


def measure_rate(
    settings: SiteSettings, tokens_per_s: float, duration_s: float, *, with_refusals: bool = False
) -> dict[str, Any]:
    """One row."""
    num_streams = settings.num_streams
    settings = replace(settings, step_s=num_streams / tokens_per_s)
    tokens_per_stream = max(3, round(tokens_per_s * duration_s / num_streams))
    with Site(settings) as site:
        refusals = Refusals(site.target, after_s=REFUSED_AFTER_S) if with_refusals else None
        if refusals is not None:
            refusals.start()
        run = offer_streams(site, num_streams, tokens_per_stream, settings.other_core)
        refused = None if refusals is None else refusals.stop()
    assert site.engines is not None
    row = figures(run, site.engines, site.watch, tokens_per_s)
    return row if refused is None else row | {"refused_first_byte_ms": refused}


def measure_refusals(settings: SiteSettings) -> dict[str, dict[str, float]]:
    """By a router that has nothing else to do."""
    with Site(settings) as site:
        refusals = Refusals(site.target)
        refusals.start()
        time.sleep(IDLE_S)  # how long is measured
        return refusals.stop()


def measure_tokenizing(settings: SiteSettings) -> dict[str, Any]:
    with Site(settings) as site:
        return health_while_tokenizing(site.target)


@contextmanager
def going_first(asked: bool) -> Iterator[None]:
    """What is started inside runs before everything that is not, so that others cannot delay it.

    Raises:
        PermissionError: this user may not say so.
    """
    if asked:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    try:
        yield
    finally:
        if asked:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def print_row(row: dict[str, Any]) -> None:
    added = row["added_latency_ms"]
    print(
        f"{row['num_streams']:>4} streams, {row['offered_tokens_per_s']:>6} offered "
        f"{row['tokens_per_s']:>6} tokens/s; "
        f"router {row['router_cpu']:.0%} of a core, {row['router_us_per_token']} us/token; "
        f"added p50 {added['p50']} ms, p99 {added['p99']} ms; "
        f"client {row['client_cpu']:.0%}, engines {row['engines_cpu']:.0%}; "
        f"{row['stolen_ms']} ms taken by the host",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.router_speed", description="speed of one router process"
    )
    parser.add_argument("--model", default="demo", help="whose tokenizer is used")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="offered tokens/s, rising")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--halves", type=int, default=3, help="how often half the load is measured")
    parser.add_argument("--workers", type=int, default=16, help="decode workers that share the streams")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds that each rate is offered")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="for a machine that others use: the streaming processes go before all others",
    )
    parser.add_argument("--profile", type=Path, help="sample the router at the first rate into this file")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    cores: list[int | None] = [*sorted(os.sched_getaffinity(0))]
    router_core, other_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    settings = SiteSettings(
        model_dir=prepare_model(given.model, Dtype.BF16, ReferenceBackend()).directory,
        num_workers=given.workers,
        num_streams=given.streams,
        step_s=1.0,
        router_core=router_core,
        other_core=other_core,
        profile=given.profile,
    )
    if given.profile is not None:
        print_row(measure_rate(settings, given.rates[0], given.duration))
        print(given.profile.read_text())
        return 0
    if other_core is not None:
        os.sched_setaffinity(0, {other_core})  # what follows a run must not hold up what it measures
    with going_first(given.real_time):
        rate = REQUIRED_TOKENS_PER_S / 2
        halves = []
        for _ in range(given.halves):
            halves.append(
                measure_rate(replace(settings, num_streams=given.streams // 2), rate, given.duration)
            )
            print_row(halves[-1])
        slow = measure_rate(settings, rate, given.duration, with_refusals=True)
        print_row(slow)
        rows = []
        for rate in given.rates:
            rows.append(measure_rate(settings, rate, given.duration))
            print_row(rows[-1])
            if not rows[-1]["is_sustained"]:
                break
        refused = measure_refusals(settings)
    tokenizing = measure_tokenizing(settings)  # never first: its threads' priorities are part of it
    print(
        json.dumps(
            {"halves": halves, "slow": slow, "refused_when_idle": refused, "tokenizing": tokenizing}, indent=2
        )
    )
    if given.out is not None:
        cpu, isa = cpu_facts()
        result = {
            "cpu": cpu,
            "isa": isa,
            "cores": {"router": router_core, "client_and_engines": other_core},
            "load_average": os.getloadavg()[0],
            "real_time": given.real_time,
            "num_workers": given.workers,
            "num_streams": given.streams,
            "rows": rows,
            "half_of_required": halves,
            "half_the_rate_with_refusals": slow,
            "refused_first_byte_ms_when_idle": refused,
            "tokenizing": tokenizing,
        }
        given.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
