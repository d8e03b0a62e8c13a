"""Whole runs: exact without faults, exact with them, the same for the same seed, each fault happens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from bench.simulator import every_moment
from bench.simulator.scenario import draw
from bench.simulator.simulation import Report, Simulation
from bench.simulator.verdict import Outcome

EXACT, STOPPED = Outcome.EXACT.value, Outcome.STOPPED.value


def simulate(seed: int, num_requests: int = 60, *, faults: bool = True) -> Report:
    return Simulation(draw(seed, num_requests=num_requests, faults=faults)).run()


@pytest.mark.parametrize("seed", range(10))
def test_without_faults_every_request_is_exact(seed: int) -> None:
    report = simulate(seed, faults=False)
    assert report.violation is None
    assert report.outcomes[EXACT] + report.outcomes[STOPPED] == 60
    assert not report.faults


@pytest.mark.parametrize("first", range(20, 80, 10))
def test_with_faults_every_rule_holds(first: int) -> None:
    """A slice of what `make simulate-faults` runs a million requests of."""
    for seed in range(first, first + 10):
        report = simulate(seed, 60)
        assert report.violation is None, f"seed {seed}: {report.violation}"
        assert sum(report.outcomes.values()) == 60


@pytest.mark.parametrize("num_decode", [1, 3])
def test_several_routers_share_their_workers(num_decode: int) -> None:
    """Each sees the whole capacity of a worker, which decides by itself; none ends another's streams."""
    for seed in range(4):
        for faults in (False, True):
            scenario = draw(seed, num_requests=60, faults=faults)
            report = Simulation(replace(scenario, num_routers=3, num_decode=num_decode)).run()
            assert report.violation is None, f"seed {seed}: {report.violation}"
            if not faults:
                assert report.outcomes[EXACT] + report.outcomes[STOPPED] == 60


def test_edges_made_beforehand_change_no_answer_and_every_rule_holds() -> None:
    """Their dials meet workers that die, restart or are busy, and attempts that wait for them."""
    counters = Counter[str]()
    for seed in range(300, 312):
        for faults in (False, True):
            scenario = draw(seed, num_requests=60, faults=faults)
            warm = replace(scenario, prefill=replace(scenario.prefill, warm_edges=8))
            report = Simulation(warm).run()
            assert report.violation is None, f"seed {seed}: {report.violation}"
            if not faults:
                assert report.outcomes[EXACT] + report.outcomes[STOPPED] == 60
            counters.update(report.counters)
    assert counters["warm dials"] > 20


@pytest.mark.parametrize("alone", [False, True])
def test_workers_that_change_roles_lose_nothing_and_every_rule_holds(alone: bool) -> None:
    """Also among all other faults: they die while they drain, or hang and the next epoch runs beside."""
    num_shifted, num_touched = 0, 0
    for seed in range(400, 420):
        scenario = replace(draw(seed, num_requests=60, faults=True), shifts_roles=True, num_prefill=2)
        simulation = Simulation(scenario)
        if alone:
            simulation.injector.kinds = {"shift role": simulation.injector.kinds["shift role"]}
        report = simulation.run()
        assert report.violation is None, f"seed {seed}: {report.violation}"
        assert sum(report.outcomes.values()) == 60
        num_shifted += report.counters.get("shifted", 0)
        num_touched += sum(report.touched.get("shift role", {}).values())
    assert num_shifted > (20 if alone else 0)
    assert num_touched > num_shifted


def test_guesses_right_and_wrong_change_no_answer_and_every_rule_holds() -> None:
    """Steps with several tokens of a request meet stops, aborts, preemptions and all other faults."""
    counters = Counter[str]()
    for seed in range(500, 516):
        for faults in (False, True):
            scenario = draw(seed, num_requests=60, faults=faults)
            report = Simulation(replace(scenario, decode=replace(scenario.decode, speculates=True))).run()
            assert report.violation is None, f"seed {seed}: {report.violation}"
            if not faults:
                assert report.outcomes[EXACT] + report.outcomes[STOPPED] == 60
            counters.update(report.counters)
    assert counters["drafts"] > counters["right drafts"] > 1000
    assert counters["preemptions"] > 0


def test_the_rare_things_happen() -> None:
    outcomes, faults, counters = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(14):
        report = simulate(seed, 150)
        assert report.violation is None, f"seed {seed}: {report.violation}"
        outcomes.update(report.outcomes)
        faults.update(report.faults)
        counters.update(report.counters)
    assert outcomes[EXACT] + outcomes[STOPPED] > 0.7 * sum(outcomes.values())
    for name in (
        "rate limited",
        "preemptions",
        "drained",
        "found hung",
        "refused",
        "stale messages",
        "pieces",
    ):
        assert counters[name] > 0, name
    assert len(faults) >= 15


def test_equal_seeds_give_equal_runs() -> None:
    first, second, other = simulate(5), simulate(5), simulate(6)
    assert first == second
    assert other.digest != first.digest


def test_a_run_does_not_depend_on_how_python_hashes_texts() -> None:
    code = (
        "from bench.simulator.scenario import draw\n"
        "from bench.simulator.simulation import Simulation\n"
        "print(Simulation(draw(5, num_requests=60, faults=True)).run().digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout.strip()
        for salt in ("1", "2")
    }
    assert digests == {str(simulate(5).digest)}


def test_the_log_tells_every_event_and_does_not_change_the_run() -> None:
    lines: list[str] = []
    report = Simulation(draw(5, num_requests=20, faults=True), lines.append).run()
    assert report.digest == simulate(5, 20).digest
    assert any("Reserve(request=" in line for line in lines)
    assert any(line.endswith("exact") for line in lines)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "staged"])
@pytest.mark.parametrize("kind", every_moment.KINDS)
def test_one_fault_at_any_moment_loses_nothing(kind: str, in_place: bool) -> None:
    """A slice of `baton simulate --every-moment`: it strikes at every 20th event, another target each."""
    struck = 0
    for moment in range(0, every_moment.num_moments(in_place), 20):
        report = every_moment.run(every_moment.Strike(in_place, moment, kind, moment // 20))
        assert report.violation is None, f"{report.label}: {report.violation}"
        struck += report.faults.get(kind, 0)
    assert struck > 2


def test_strikes_name_every_moment_and_every_target() -> None:
    strikes = list(every_moment.strikes(True, ["crash decode", "cut KV stream"]))
    crashes = [strike for strike in strikes if strike.kind == "crash decode"]
    assert len(crashes) == 2 * every_moment.num_moments(True)
    assert {strike.choice for strike in crashes} == {0, 1}
    assert any(strike.kind == "cut KV stream" for strike in strikes)


@pytest.mark.parametrize(
    "kind", [kind for kind in Simulation(draw(0, num_requests=1, faults=True)).injector.kinds]
)
def test_each_kind_of_fault_alone_hits_requests_and_breaks_nothing(kind: str) -> None:
    hit = 0
    for seed in range(2):
        scenario = replace(
            draw(seed, num_requests=60, faults=True),
            num_routers=2,
            num_prefill=2,
            num_decode=2,
            fault_every=150,
        )
        simulation = Simulation(scenario)
        only = simulation.injector.kinds[kind]
        simulation.injector.kinds.clear()
        simulation.injector.kinds[kind] = only
        report = simulation.run()
        assert report.violation is None, f"seed {seed}: {report.violation}"
        assert set(report.faults) <= {kind}
        hit += sum(report.touched.get(kind, {}).values())
    assert hit > 0
