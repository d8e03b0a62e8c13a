"""`baton simulate --trace` and `baton plan`: what they write, and one clear sentence for each bad input."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.simulator.cli_fleet import app, plan_app
from bench.simulator.cli_screen import visible

SLO = ["--slo", "ttft=0.5s,tpot=25ms"]
RUN = ["--rate", "5", "--seeds", "1"]
CALIBRATION = {
    "fixed_s": 1e-3,
    "floor_s": 2e-2,
    "per_token_s": 2e-4,
    "per_context_s": 1e-7,
    "per_attention_s": 1e-8,
}
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        json.dumps(
            {
                "timestamp": 100 * index,
                "input_length": 100 + 37 * (index % 20),
                "output_length": 20 + index % 9,
            }
        )
        for index in range(60)
    ]
    path.write_text("\n".join(lines))
    return path


def simulate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(plan_app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


def test_max_goodput_is_written(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [
        "--trace",
        str(trace),
        "--workers",
        "1",
        *SLO,
        "--max-goodput",
        "--seeds",
        "2",
        "--duration",
        "3",
    ]
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


BAD = {
    "no workers": (["--workers", "0", *SLO, "--rate", "1"], "at least one worker"),
    "a kind without workers": (
        ["--hardware", "h100-llama3-8b:0", *SLO, "--rate", "1"],
        "at least one worker",
    ),
    "unknown hardware": (["--hardware", "b300", *SLO, "--rate", "1"], "`b300` is unknown"),
    "counts with a sign too many": (
        ["--hardware", "h100-llama3-8b:--5", *SLO, "--rate", "1"],
        "`h100-llama3-8b:--5` is unknown",
    ),
    "a name no file can have": (["--hardware", "x" * 5000, *SLO, "--rate", "1"], "is unknown"),
    "counts that differ": (
        ["--hardware", "h100-llama3-8b:2", "--workers", "3", *SLO, "--rate", "1"],
        "has 2 workers",
    ),
    "unknown policy": (["--workers", "2", *SLO, "--rate", "1", "--policy", "best"], "`best` is unknown"),
    "a split of another pool": (
        ["--workers", "2", *SLO, "--rate", "1", "--policy", "static:2p2d"],
        "pool has 2",
    ),
    "a split without decode": (
        ["--workers", "2", *SLO, "--rate", "1", "--policy", "static:2p0d"],
        "each role",
    ),
    "no chunk": (["--workers", "2", *SLO, "--rate", "1", "--policy", "colocated:0"], "number of tokens"),
    "a chunk no integer can be": (
        ["--workers", "2", *SLO, "--rate", "1", "--policy", f"colocated:{'9' * 5000}"],
        "number of tokens",
    ),
    "a split no integer can be": (
        ["--workers", "2", *SLO, "--rate", "1", "--policy", f"static:{'9' * 5000}p1d"],
        "is no split",
    ),
    "half an SLO": (["--workers", "2", "--slo", "ttft=1s", "--rate", "1"], "lacks `tpot`"),
    "a broken SLO": (
        ["--workers", "2", "--slo", "ttft=soon,tpot=1ms", "--rate", "1"],
        "`soon` is not a time",
    ),
    "an SLO it does not know": (
        ["--workers", "2", "--slo", "ttft=1s,tpot=9ms,e2e=3s", "--rate", "1"],
        "leave it out",
    ),
    "nothing to do": (["--workers", "2", *SLO], "--max-goodput"),
    "a negative rate": (["--workers", "2", *SLO, "--rate", "-1"], "above 0"),
    "no seeds": (["--workers", "2", *SLO, "--rate", "1", "--seeds", "0"], "1 or more"),
    "less than no seeds": (["--workers", "2", *SLO, "--rate", "1", "--seeds", "-1"], "--seeds -1: give 1"),
    "too long": (["--workers", "2", *SLO, "--rate", "1", "--duration", "1e7"], "above 0, up to 1e6"),
    "too many workers": (
        ["--workers", "1000000000", *SLO, "--rate", "1"],
        "--workers 1000000000: a pool has at most 100,000 workers",
    ),
    "too many workers of two kinds": (
        ["--hardware", "h100-llama3-8b:60000,h20-llama3-8b:60000", *SLO, "--rate", "1"],
        "60000`: a pool has at most 100,000 workers",
    ),
    "unknown arrivals": (["--workers", "2", *SLO, "--rate", "1", "--arrivals", "burst"], "poisson or trace"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(trace: Path, name: str) -> None:
    arguments, expected = BAD[name]
    code, text = simulate("--trace", str(trace), *arguments)
    assert code == 2, text
    assert expected in text
    assert text.endswith(".")
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ("hello,world\n1,2", "none of the formats"),
        ('{"timestamp": 0, "input_length": "x", "output_length": 1}', ":1:"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 0}', "nothing to offer"),
    ],
)
def test_bad_traces_name_the_file(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    code, text = simulate("--trace", str(path), "--workers", "1", *SLO, "--rate", "1")
    assert code == 2
    assert expected in text
    assert "bad.jsonl" in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not a calibration"),
        ("[]", "not a calibration"),
        ('{"fixed_s": 1}', "lacks `floor_s`"),
        ('{"fixed_s": 1, "floor_s": -1}', "`floor_s` is -1"),
        (
            '{"fixed_s": 1, "floor_s": 1, "per_token_s": 0, "per_context_s": 0, "per_attention_s": 0}',
            "would take no time",
        ),
        (
            json.dumps(CALIBRATION | {"kv_token": 5}),
            "unknown key `kv_token` (did you mean `kv_tokens`?); use fixed_s,",
        ),
        (json.dumps(CALIBRATION | {"mixed_ms": 5}), "unknown key `mixed_ms` (did you mean `mixed_s`?)"),
        (json.dumps(CALIBRATION | {"zzz": 5}), "unknown key `zzz`; use fixed_s,"),
        (json.dumps({"step_model": CALIBRATION, "fixed_s": 1}), "(did you mean `mixed_s`?); use step_model,"),
        (json.dumps({"step_model": CALIBRATION | {"kv_tokens": 9}}), "unknown key `kv_tokens`"),
        (json.dumps(CALIBRATION | {"link_bytes_s": 0}), "`link_bytes_s` is 0; give a number above 0"),
        (json.dumps(CALIBRATION | {"kv_tokens": 0}), "`kv_tokens` is 0; give a number above 0"),
    ],
)
def test_bad_calibrations_say_what_is_wrong(trace: Path, tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    code, text = simulate("--trace", str(trace), "--hardware", str(path), *SLO, "--rate", "1")
    assert code == 2
    assert expected in text


MARKUP = {
    "a trace's name": (["--trace", "[/red]a.csv"], "trace [/red]a.csv cannot be read"),
    "hardware": (["--hardware", "[/nope]"], "--hardware `[/nope]` is unknown"),
    "hardware that would vanish": (["--hardware", "[h100]:2"], "--hardware `[h100]` is unknown"),
    "an SLO": (["--slo", "[/nope]=3"], "[/nope]"),
}


@pytest.mark.parametrize("command", [simulate, plan])
@pytest.mark.parametrize("name", MARKUP)
def test_what_a_user_wrote_is_no_markup(trace: Path, command: Command, name: str) -> None:
    arguments, expected = MARKUP[name]
    given = ["--trace", str(trace), *SLO, *(["--rate", "1"] if command is simulate else []), *arguments]
    code, text = command(*given)
    assert code == 2, text
    assert expected in text


def test_a_policy_is_no_markup(trace: Path) -> None:
    code, text = simulate("--trace", str(trace), *SLO, "--rate", "1", "--policy", "[/nope]")
    assert (code, "`[/nope]` is unknown" in text) == (2, True)


@pytest.mark.parametrize("command", [simulate, plan])
def test_a_junk_trace_does_nothing_to_the_terminal(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "junk"
    path.write_bytes(b"[/nope]\x1b]0;title\x07\x1b[2J\n")
    code, text = command("--trace", str(path), *SLO, *(["--rate", "1"] if command is simulate else []))
    assert code == 2
    assert "begins with `[/nope]\\x1b]0;title\\x07\\x1b[2J`" in text


@pytest.mark.parametrize("command", [simulate, plan])
def test_a_warning_shows_names_as_they_are(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "[bold]a.jsonl"
    path.write_text(
        "\n".join(json.dumps({"timestamp": at, "input_length": 50, "output_length": 5}) for at in (9, 5))
    )
    code, text = command("--trace", str(path), *SLO, *(RUN if command is simulate else []))
    assert code == 0, text
    assert "[bold]a.jsonl: rows were not in order" in text


def test_visible_leaves_letters_and_escapes_the_rest() -> None:
    assert visible("Zoë [a] `µs`") == "Zoë [a] `µs`"
    assert visible("a\nb\x1b\udcff") == "a\\nb\\x1b\\udcff"


@pytest.mark.parametrize("command", [simulate, plan])
@pytest.mark.parametrize("out", ["", ".", "/"])
def test_a_result_needs_a_name(trace: Path, command: Command, out: str) -> None:
    code, text = command("--trace", str(trace), *SLO, *(RUN if command is simulate else []), "--out", out)
    assert (code, "give the name of a file." in text) == (2, True), text


@pytest.mark.parametrize("command", [simulate, plan])
@pytest.mark.parametrize("name", ["trace", "link", "calibration"])
def test_a_result_replaces_no_input(trace: Path, tmp_path: Path, command: Command, name: str) -> None:
    calibration, link = tmp_path / "calibration.json", tmp_path / "link"
    calibration.write_text(json.dumps(CALIBRATION))
    link.symlink_to(trace)
    out = {"trace": trace, "link": link, "calibration": calibration}[name]
    before = out.read_text()
    pool = ["--hardware", f"h100-llama3-8b:1,{calibration}:1"]
    run = RUN if command is simulate else []
    code, text = command("--trace", str(trace), *pool, *SLO, *run, "--out", str(out))
    assert code == 2, text
    assert "which it is made from; give another file." in text
    assert out.read_text() == before


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
    result = CliRunner().invoke(
        plan_app,
        ["--trace", str(trace), "--hardware", "h100-llama3-8b:2,h20-llama3-8b:2", *SLO, "--out", str(out)],
    )
    assert result.exit_code == 0, result.output
    assert "per accelerator" in result.output
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
