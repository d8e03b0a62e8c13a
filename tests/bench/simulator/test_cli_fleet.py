"""`baton simulate --trace` and `baton plan`: what they write, and what they warn of."""

import json
from pathlib import Path

import pytest

from bench.simulator.fleet import planner
from router.planner import RolePlan, Roles
from tests.bench.simulator.fleet_commands import (
    CALIBRATION,
    RUN,
    SLO,
    Command,
    plan,
    searching,
    simulate,
    write_trace,
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl")


def test_max_goodput_is_written(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = searching(trace, num_seeds=2)
    code, text = simulate(*arguments, "--out", str(out))
    assert code == 0, text
    result = json.loads(out.read_text())
    assert result["max_goodput"] > 1
    assert len(result["max_goodput_per_seed"]) == 2
    assert result["max_goodput"] == pytest.approx(sum(result["max_goodput_per_seed"]) / 2)
    assert result["slo_attainment"] >= 0.9
    assert result["policy"] == "elastic"
    least = min(result["max_goodput_per_seed"])
    assert f"--duration 3 is too short at {least:.4g} req/s: a run has at least 1,000 requests" in text


def test_one_rate_gives_the_attainment(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    pool = ["--hardware", "h100-llama3-8b:1,h20-llama3-8b:1"]
    code, text = simulate(
        "--trace",
        str(trace),
        *pool,
        *SLO,
        "--rate",
        "5",
        "--seeds",
        "1",
        "--policy",
        "static:1p1d",
        "--out",
        str(out),
    )
    assert code == 0, text
    result = json.loads(out.read_text())
    assert result["slo_attainment"] == 1.0
    assert result["runs"][0]["distributions"]["ttft"]["p90_s"] > 0


def test_a_calibration_of_this_machine_is_hardware(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(CALIBRATION))
    code, text = simulate(
        "--trace",
        str(trace),
        "--hardware",
        f"{path}:2",
        "--slo",
        "ttft=2s,tpot=100ms",
        "--rate",
        "3",
        "--seeds",
        "1",
    )
    assert code == 0, text
    assert "100.0%" in text


@pytest.mark.parametrize("command", [simulate, plan])
def test_requests_that_fit_nowhere_are_counted(trace: Path, tmp_path: Path, command: Command) -> None:
    """Prompts of 100 to 803 tokens, answers of 20 to 28: those of 766 and 803 are too much for 780."""
    small, smaller, out = tmp_path / "small.json", tmp_path / "smaller.json", tmp_path / "out.json"
    small.write_text(json.dumps(CALIBRATION | {"kv_tokens": 780}))
    smaller.write_text(json.dumps(CALIBRATION | {"kv_tokens": 500}))
    given = ["--trace", str(trace), "--slo", "ttft=2s,tpot=100ms", *(RUN if command is simulate else [])]
    code, text = command(*given, "--hardware", f"{smaller}:1,{small}:1", "--out", str(out))
    assert code == 0, text
    expected = (
        "6 of the trace's 60 requests can never be served: prompt and answer are more than the 780 tokens"
    )
    assert expected in text
    assert expected in json.loads(out.read_text())["warnings"][0]
    code, text = command(*given, "--hardware", f"{smaller}:1,h100-llama3-8b:1")
    assert "never be served" not in text


def test_a_duration_of_too_few_requests_is_told(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    expected = "--duration 20 is too short at 5 req/s: a run has at least 1,000 requests, so about 200.0 s"
    code, text = simulate("--trace", str(trace), *SLO, *RUN, "--duration", "20", "--out", str(out))
    assert code == 0, text
    assert expected in text
    assert any(warning.startswith(expected) for warning in json.loads(out.read_text())["warnings"])
    for enough in (["--duration", "200"], []):
        code, text = simulate("--trace", str(trace), *SLO, *RUN, *enough)
        assert "too short" not in text


def test_holes_disorder_and_impossible_targets_are_warned_of(tmp_path: Path) -> None:
    times = [10 * index for index in range(200)] + [10**6, 5]
    path = tmp_path / "holes.jsonl"
    path.write_text(
        "\n".join(json.dumps({"timestamp": at, "input_length": 50, "output_length": 5}) for at in times)
    )
    code, text = simulate(
        "--trace", str(path), "--workers", "1", "--slo", "ttft=1s,tpot=5ms", "--rate", "2", "--seeds", "1"
    )
    assert code == 0
    assert "not in order of time" in text
    assert "hole" in text
    assert "shortest step takes 5.9 ms" in text


def test_plan_prints_roles_and_goodput_per_accelerator(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    pool = ["--hardware", "h100-llama3-8b:2,h20-llama3-8b:2"]
    code, text = plan("--trace", str(trace), *pool, *SLO, "--out", str(out))
    assert code == 0, text
    assert "per accelerator" in text
    written = json.loads(out.read_text())
    assert set(written["roles"]) == {"h100-llama3-8b", "h20-llama3-8b"}
    assert written["predicted_rate"] > 0


def test_calibrations_of_one_file_name_are_kinds_of_their_own(trace: Path, tmp_path: Path) -> None:
    for folder, floor_s in (("a", 2e-2), ("b", 3e-2), ("c", 2e-2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cal.json").write_text(json.dumps(CALIBRATION | {"floor_s": floor_s}))
    pool = ",".join(
        f"{tmp_path}/{folder}/cal.json:{count}" for folder, count in (("a", 1), ("b", 2), ("c", 3))
    )
    out = tmp_path / "plan.json"
    slo = ["--slo", "ttft=1s,tpot=25ms"]
    code, text = plan("--trace", str(trace), "--hardware", pool, *slo, "--out", str(out))
    assert code == 0, text
    roles = json.loads(out.read_text())["roles"]
    assert {name: sum(numbers.values()) for name, numbers in roles.items()} == {"cal": 4, "cal (2)": 2}
    code, text = simulate("--trace", str(trace), "--hardware", pool, *slo, *RUN)
    assert "cal (2): its shortest step takes 31 ms" in text
    assert text.count("its shortest step") == 1


def test_a_plan_for_impossible_targets_says_why(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    code, text = plan("--trace", str(trace), "--workers", "2", "--slo", "ttft=1s,tpot=5ms", "--out", str(out))
    assert code == 0, text
    assert "h100-llama3-8b: its shortest step takes 5.9 ms" in text
    assert "Predicted: 0 req/s" in text
    assert "No rate meets the SLO" in text
    assert len(json.loads(out.read_text())["warnings"]) == 2
    _, text = plan("--trace", str(trace), "--workers", "2", *SLO)
    assert "No rate" not in text


def test_roles_that_are_level_are_not_split(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split that is predicted to serve 1 % more is within what predictions err; one of 5 % is not."""
    both = RolePlan((Roles(0, 0, 4),), 100.0)
    out = tmp_path / "plan.json"
    for rate, num_prefill, is_told in ((101.0, 0, True), (105.0, 1, False), (100.0, 0, False)):
        best = RolePlan((Roles(1, 0, 3),), rate) if rate > both.rate else both
        monkeypatch.setattr(planner, "best_roles", lambda *_, best=best: (best, both))
        code, text = plan("--trace", str(trace), "--workers", "4", *SLO, "--out", str(out))
        assert code == 0, text
        assert ("The best split would serve 1.00% more: level" in text) is is_told
        written = json.loads(out.read_text())
        assert written["roles"]["h100-llama3-8b"]["prefill"] == num_prefill
        assert written["predicted_rate"] == (rate if num_prefill else both.rate)


def test_a_night_in_a_trace_is_told_with_what_it_does_to_its_rhythm(tmp_path: Path) -> None:
    """150 rows, a second apart, with a day in between: the mean rate is nothing of either half's."""
    times = [1000 * index + (86_400_000 if index >= 75 else 0) for index in range(150)]
    path = tmp_path / "night.jsonl"
    path.write_text(
        "\n".join(json.dumps({"timestamp": at, "input_length": 50, "output_length": 5}) for at in times)
    )
    given = ["--trace", str(path), "--workers", "1", *SLO, *RUN]
    code, text = simulate(*given, "--arrivals", "trace")
    assert code == 0
    assert "1 hole of the trace; the longest lasts 86,401 s, from 74 s on" in text
    assert "in between requests come 585 times as fast" in text
    for code, text in (simulate(*given), plan(*given[:6])):
        assert code == 0, text
        assert "1 hole of the trace" in text
        assert "Its times are not replayed." in text
