"""Runs and searches of `baton simulate --trace` that are left early, and how far they say they are."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from bench.load.figures.slo import parse_slos
from bench.simulator import cli_fleet_runs
from bench.simulator.cli_screen import Progress
from bench.simulator.fleet import search
from bench.simulator.fleet.policies import parse_policy
from bench.simulator.fleet.trial import Setup, run_trial
from bench.simulator.fleet.workload import read_rows
from bench.simulator.hardware import parse_pool
from tests.bench.simulator.fleet_commands import SLO, searching, simulate, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl")


def leave_after(monkeypatch: pytest.MonkeyPatch, module: Any, num_runs: int) -> None:
    """The user presses Ctrl-C in the run after so many."""
    ended = []

    def run(*arguments: Any) -> Any:
        if len(ended) == num_runs:
            raise KeyboardInterrupt
        ended.append(arguments)
        return run_trial(*arguments)

    monkeypatch.setattr(module, "run_trial", run)


def test_a_search_that_is_left_tells_the_seeds_that_ended(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = searching(trace, num_seeds=3)
    out = tmp_path / "whole.json"
    code, text = simulate(*given, "--out", str(out))
    assert code == 0, text
    whole = json.loads(out.read_text())
    assert whole["is_complete"] is True
    num_of_first = [probe["seed"] for probe in whole["search"]["probes"]].count(0)

    leave_after(monkeypatch, search, num_of_first + 1)
    out = tmp_path / "left.json"
    code, text = simulate(*given, "--out", str(out))
    assert code == 130
    assert "Interrupted: 1 of 3 seeds searched to the end." in text
    first = whole["max_goodput_per_seed"][0]
    assert f"elastic: {first:.4g} req/s" in text or f"elastic: at least {first:.4g} req/s" in text
    left = json.loads(out.read_text())
    assert left["is_complete"] is False
    assert left["seeds"] == [0]
    assert left["max_goodput_per_seed"] == [first]


@pytest.mark.parametrize("how", [["--max-goodput"], ["--rate", "5"]])
def test_what_had_not_begun_to_end_is_not_written(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    leave_after(monkeypatch, search, 0)
    leave_after(monkeypatch, cli_fleet_runs, 0)
    out = tmp_path / "left.json"
    code, text = simulate("--trace", str(trace), "--workers", "1", *SLO, *how, "--out", str(out))
    assert code == 130
    assert "Interrupted: 0 of 3" in text
    assert not out.exists()


def test_runs_at_one_rate_that_are_left_are_summed_up(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_after(monkeypatch, cli_fleet_runs, 2)
    out = tmp_path / "left.json"
    given = ["--trace", str(trace), "--workers", "1", *SLO, "--rate", "5", "--first-seed", "7"]
    code, text = simulate(*given, "--out", str(out))
    assert code == 130
    assert "Interrupted: 2 of 3 runs had ended." in text
    left = json.loads(out.read_text())
    assert left["seeds"] == [7, 8]
    assert len(left["slo_attainment_per_seed"]) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "every_s"), [(io.StringIO, 15.0), (Terminal, 0.5)])
def test_a_long_run_says_how_far_it_is(stream: type[io.StringIO], every_s: float) -> None:
    now, shown = [0.0], stream()
    progress = Progress(shown, lambda: now[0])
    for percent in range(1, 5):
        now[0] = percent * every_s * 0.6
        progress.update(lambda percent=percent: f"{percent} %")
    told = shown.getvalue()
    assert [f"{percent} %" in told for percent in range(1, 5)] == [False, True, False, True]
    progress.clear()
    if stream is Terminal:
        assert shown.getvalue() == told + "\r\x1b[K"  # what is printed next begins an empty line
    else:
        assert told.splitlines() == ["2 %", "4 %"]
        assert shown.getvalue() == told


def test_telling_changes_nothing(trace: Path) -> None:
    rows = read_rows(trace)[0].rows
    pool = parse_pool("h100-llama3-8b:2", None)
    setup = Setup(rows, pool, parse_policy("elastic", 2), parse_slos(SLO[1]), 3.0)
    shares: list[float] = []
    told, plain = run_trial(setup, 200.0, 0, shares.append), run_trial(setup, 200.0, 0)
    assert told.distributions == plain.distributions
    assert told.num_steps == plain.num_steps
    assert shares == sorted(shares)
    assert len(shares) > 100
