"""`baton simulate --trace` and `baton plan`: one clear sentence for each bad input, shown as text."""

import json
from pathlib import Path

import pytest

from bench.simulator.cli_screen import visible
from tests.bench.simulator.fleet_commands import CALIBRATION, RUN, SLO, Command, plan, simulate, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl")


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
    "more requests than memory holds": (
        ["--workers", "2", *SLO, "--rate", "1e6"],
        "are 40,000,000 requests, more than the 5,000,000 of a run: give a shorter --duration",
    ),
    "a search from next to nothing": (
        ["--workers", "2", *SLO, "--max-goodput", "--rate", "1e-9"],
        "--rate 1e-09: a search begins there, and at 0.01 at least",
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
