"""The rule of statuses 1 and 2: 2 where the command line cannot work as typed, 1 where the world refused; and
what is said before anything is offered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.load import cli_entry
from bench.load.mock.process import MockProcess, running_mock
from cluster.errors import BatonError, ConfigError

LOAD = ("--rate", "50", "--requests", "2", "--output-tokens", "2")
MEASURED = (0, 3)  # on a busy machine the client may be late
DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    with running_mock() as running:
        yield running


@pytest.fixture(scope="module")
def measured(mock: MockProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a run."""
    out = tmp_path_factory.mktemp("measured") / "r.json"
    assert status("run", "--url", mock.target.url, *LOAD, "--out", str(out)) in MEASURED
    return out


def status(*arguments: str) -> int:
    """As the process ends; a `BatonError` is status 1 for every command of Baton."""
    try:
        cli_entry.main(arguments, owns_process=False)
    except SystemExit as end:
        return int(end.code or 0)
    except ConfigError:
        raise AssertionError("told by the entry") from None
    except BatonError as error:
        return 1 if "\n" not in str(error) else -1
    raise AssertionError("a command ends with a status")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", *LOAD, "--out", "{tmp}/file/r.json"), 1),
        (("run", *LOAD, "--out", "{tmp}"), 1),
        (("run", "--trace", "{tmp}/nowhere.csv"), 1),
        (("run", "--trace", "{tmp}"), 1),
        (("run", *LOAD, "--model", "nobody"), 1),
        (("run", *LOAD, "--url", "{url}/elsewhere"), 1),
        (("run", "--trace", "{tmp}/file"), 1),
        (("compare", "{tmp}/search.json", "{tmp}/search.json"), 1),
        (("compare", "{tmp}/nowhere.json", "{tmp}/search.json"), 1),
        (("report", "{tmp}/file"), 1),
        (("run", "--trace", str(DATA / "azure.csv"), "--trace-format", "foo"), 2),
        (("run", *LOAD, "--strict"), 2),
        (("run", *LOAD, "--url", "no url"), 2),
        (("run", *LOAD, "--out", ""), 2),
        (("compare", "{tmp}/search.json"), 2),
        (("report", "{tmp}/search.json", "--out", "{tmp}/search.json"), 2),
        (("foo",), 2),
        (("run", "--foo"), 2),
    ],
)
def test_two_is_the_command_line_and_one_is_the_world(
    mock: MockProcess, tmp_path: Path, arguments: tuple[str, ...], expected: int
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "search.json").write_text('{"schema_version": 1, "kind": "max-goodput"}')
    given = [one.format(tmp=tmp_path, url=mock.target.url) for one in arguments]
    url = ["--url", mock.target.url] if given[0] == "run" and "--url" not in given else []
    assert status(*given, *url) == expected


def test_a_command_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("foo") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["error: No such command 'foo'; see baton bench --help"]


def test_a_search_says_nothing_before_its_trace_is_read(
    mock: MockProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n{"timestamp": "x"}\n')
    assert status("max-goodput", "--url", mock.target.url, "--slo", "e2e=1s", "--trace", str(trace)) == 1
    assert capsys.readouterr().out == ""


def test_what_will_be_overwritten_is_said_first(
    mock: MockProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    assert status("run", "--url", mock.target.url, *LOAD, "--out", str(out)) in MEASURED
    assert "overwritten" not in capsys.readouterr().err
    assert status("run", "--url", mock.target.url, *LOAD, "--out", str(out)) in MEASURED
    assert f"note: `{out}` will be overwritten" in capsys.readouterr().err.splitlines()


def test_all_in_the_warm_up_is_invalid_with_its_reason(
    mock: MockProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    assert status("run", "--url", mock.target.url, *LOAD, "--warmup", "100s", "--out", str(out)) == 3
    said = capsys.readouterr().out
    assert "INVALID: The warm-up of 100 s left none of the 2 requests" in said
    assert "2 planned, 2 sent; 0 of them due in the window: 0 ok, 0 failed" in said
    window = json.loads(out.read_text())["window"]
    assert (window["num_run_offered"], window["num_run_sent"], window["num_offered"]) == (2, 2, 0)


@pytest.mark.parametrize(
    "changes",
    [
        *({"slos_ms": [1]}, {"window": 5}, {"arrival": []}, {"completed": "3"}, {"cautions": [1]}),
        *({"label": 7}, {"kind": 7}, {"kind": None}, {"settings": 5}, {"environment": []}, {"model_id": 3}),
        *({"slo_attainment": "x"}, {"mean_ttft_ms": [1]}, {"p99_gap_ms": "1"}, {"p99.9_itl_ms": True}),
        *({"request_goodput": {}}, {"send_lag_ms": {"p99": "x"}}, {"failures": {"timeout": "2"}}),
    ],
    ids=str,
)
def test_values_of_another_kind_are_one_line(measured: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    out, bad = measured, tmp_path / "bad.json"
    bad.write_text(json.dumps({**json.loads(out.read_text()), **changes}))
    assert status("compare", str(out), str(bad)) == 1
    assert status("report", str(bad), "--out", str(tmp_path / "page.html")) == 1


def test_a_closed_loop_offers_no_rate_and_an_open_one_that_of_its_gaps(
    mock: MockProcess, tmp_path: Path
) -> None:
    out = tmp_path / "r.json"
    arguments = ("--closed-loop", "2", "--requests", "4", "--output-tokens", "2", "--out", str(out))
    assert status("run", "--url", mock.target.url, *arguments) in MEASURED
    assert json.loads(out.read_text())["offered_request_rate"] is None
    assert status("run", "--url", mock.target.url, *LOAD, "--out", str(out)) in MEASURED
    result = json.loads(out.read_text())
    assert 2 * result["offered_request_rate"] >= result["request_throughput"]  # two requests, one gap


def test_a_trace_in_another_unit_is_a_caution_that_names_it(
    mock: MockProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "seconds.jsonl"
    rows = [{"timestamp": i * 0.5, "input_length": 5, "output_length": 2} for i in range(5)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status("run", "--url", mock.target.url, "--trace", str(trace))
    assert "req/s: its timestamps were read as milliseconds" in capsys.readouterr().out
    status("run", "--url", mock.target.url, "--trace", str(trace), "--rate", "50")
    assert "milliseconds" not in capsys.readouterr().out
