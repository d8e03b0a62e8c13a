"""A simulated pool of equals whose mixed steps are dear: workers are dedicated, and that serves more."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from bench.load.figures.slo import parse_slos
from bench.load.plans.trace_formats import TraceRow
from bench.simulator.fleet.policies import parse_policy
from bench.simulator.fleet.trial import Setup, run_trial
from bench.simulator.hardware import parse_pool
from router.dedication import Dedication

LENGTHS = ((300, 8), (900, 24), (1_500, 30), (2_200, 40), (3_500, 20), (5_000, 50))


def setup(price_s: float) -> Setup:
    pool = parse_pool("h100-llama3-8b:4", None)
    dear = replace(pool[0], model=msgspec.structs.replace(pool[0].model, mixed_s=price_s))
    rows = tuple(TraceRow(0.01 * index, *LENGTHS[index % len(LENGTHS)]) for index in range(600))
    return Setup(rows, [dear] * 4, parse_policy("elastic", 4), parse_slos("ttft=0.5s,tpot=8ms"))


def test_dedicated_workers_serve_what_four_that_do_both_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = run_trial(setup(5e-3), 38.0, 0).attainment
    monkeypatch.setattr(Dedication, "ended", lambda *_: False)
    assert apart > 0.9 > 0.8 > run_trial(setup(5e-3), 38.0, 0).attainment


def test_where_mixed_steps_are_free_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = run_trial(setup(0.0), 60.0, 0)
    monkeypatch.setattr(Dedication, "ended", lambda *_: False)
    assert msgspec.structs.replace(run_trial(setup(0.0), 60.0, 0), wall_s=0) == msgspec.structs.replace(
        with_it, wall_s=0
    )
