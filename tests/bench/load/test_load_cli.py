"""`baton bench` as a user calls it, against a mock server in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bench.load.cli import app
from bench.load.mock.process import MockProcess, read_truths, running_mock
from bench.load.mock.script import Script
from bench.load.mock.server import MockSettings
from cluster import cli
from cluster.errors import BatonError

ROOT = Path(__file__).parents[3]
MEASURED = (0, 3)  # 3: invalid, where a busy machine may make the client late


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    with running_mock(MockSettings(script=Script(ttft_s=0.01, itl_s=0.002))) as running:
        yield running


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, terminal_width=200)


def sentence(*arguments: str) -> str:
    """The one sentence with which a command refuses."""
    result = bench(*arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, BatonError), (result.output, result.exception)
    message = str(result.exception)
    assert "\n" not in message
    return message


def load(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_everyday_call_writes_the_result_and_its_requests(mock: MockProcess, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "result.json"
    result = bench(
        *(
            "run",
            "--url",
            mock.target.url,
            "--model",
            MockSettings().model,
            "--rate",
            "50",
            "--requests",
            "20",
        ),
        *("--input-tokens", "30", "--output-tokens", "7", "--slo", "ttft=5s,tpot=1s", "--out", str(out)),
        *("--report", str(tmp_path / "report.html")),
    )
    assert result.exit_code in MEASURED, (result.output, result.exception)
    assert "SLO attainment            100.0% of all offered" in result.output
    assert "20 planned, 20 sent, 20 ok, 0 failed" in result.output
    written = load(out)
    assert written["num_prompts"] == written["completed"] == 20
    assert written["slo_attainment"] == 1.0
    assert written["total_input_tokens"] == 20 * 30
    assert written["total_output_tokens"] == 20 * 7
    assert written["is_complete"]
    lines = (tmp_path / "deep" / "result.requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(20))
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_salt_is_new_each_run_and_can_be_fixed(mock: MockProcess, tmp_path: Path) -> None:
    def salt(name: str, *more: str) -> int:
        out = tmp_path / name
        arguments = ("--url", mock.target.url, "--rate", "100", "--requests", "1", "--out", str(out))
        assert bench("run", *arguments, *more).exit_code in MEASURED
        value: int = load(out)["workload"]["salt"]
        return value

    assert salt("a.json") != salt("b.json")
    assert salt("c.json", "--salt", "5") == 5


def test_closed_loop_says_so(mock: MockProcess, tmp_path: Path) -> None:
    out = tmp_path / "closed.json"
    arguments = ("--closed-loop", "3", "--requests", "9", "--output-tokens", "2", "--out", str(out))
    result = bench("run", "--url", mock.target.url, *arguments)
    assert result.exit_code in MEASURED, result.output
    assert "closed loop of 3" in result.output
    assert load(out)["max_concurrency"] == 3
    assert load(out)["max_concurrent_requests"] <= 3


def test_names_that_are_no_text_cost_no_result(mock: MockProcess, tmp_path: Path) -> None:
    """A file name may be any bytes; so may what a label was typed in."""
    out = tmp_path / "caf\udce9.json"
    arguments = ("--rate", "100", "--requests", "2", "--output-tokens", "2", "--label", "caf\udce9")
    page = ("--out", str(out), "--report", str(tmp_path / "page.html"))
    result = bench("run", "--url", mock.target.url, *arguments, *page)
    assert result.exit_code in MEASURED, (result.output, result.exception)
    assert load(out)["label"] == "caf\ufffd"
    assert "caf\ufffd" in (tmp_path / "page.html").read_text(encoding="utf-8")
    search = ("--duration", "200ms", "--start-rate", "20", "--max-probes", "1", "--label", "caf\udce9")
    found = ("--slo", "ttft=5s", "--out", str(out), "--report", str(tmp_path / "search.html"))
    result = bench("max-goodput", "--url", mock.target.url, *search, *found)
    assert result.exit_code == 5, (result.output, result.exception)
    assert load(out)["label"] == "caf\ufffd"
    out.write_text(json.dumps({**load(out), "label": None}))  # it is called by its file now
    assert bench("report", str(out), "--out", str(tmp_path / "all.html")).exit_code == 0
    assert "caf\ufffd" in (tmp_path / "all.html").read_text(encoding="utf-8")


def test_compare_calls_runs_by_their_labels(mock: MockProcess, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, label in zip(paths, (("--label", "before"), ()), strict=True):
        arguments = ("--rate", "100", "--requests", "2", "--output-tokens", "2", "--out", str(path), *label)
        assert bench("run", "--url", mock.target.url, *arguments).exit_code in MEASURED
    header = bench("compare", *map(str, paths)).output.splitlines()[0].split()
    assert (header[0], header[-1].strip("()")) in (("before", "b"), ("before", "INVALID"))


def test_sweep_writes_a_file_per_rate_and_compare_reads_them(mock: MockProcess, tmp_path: Path) -> None:
    arguments = ("--requests", "5", "--output-tokens", "2", "--out", str(tmp_path / "sweep.json"))
    result = bench("sweep", "--url", mock.target.url, "--rates", "20,40", *arguments)
    assert result.exit_code in MEASURED, (result.output, result.exception)
    paths = [tmp_path / "sweep.rate-20.json", tmp_path / "sweep.rate-40.json"]
    assert [load(path)["request_rate"] for path in paths] == [20.0, 40.0]
    table = bench("compare", *map(str, paths))
    assert table.exit_code == 7, table.exception  # another load is no merit
    assert "output" in table.output
    page = bench("report", *map(str, paths), "--out", str(tmp_path / "all.html"))
    assert page.exit_code == 0, page.exception
    assert (tmp_path / "all.html").stat().st_size > 1000


def test_max_goodput_finds_the_capacity_of_a_server(tmp_path: Path) -> None:
    """One request at a time, a twentieth of a second each: twenty a second, at any machine speed."""
    out = tmp_path / "goodput.json"
    with running_mock(MockSettings(script=Script(ttft_s=0.05), capacity=1)) as slow:
        result = bench(
            *("max-goodput", "--url", slow.target.url, "--arrival", "constant", "--duration", "1s"),
            *("--output-tokens", "1", "--slo", "ttft=200ms", "--start-rate", "32", "--tolerance", "0.7"),
            *("--seeds", "1", "--targets", "0.9", "--out", str(out)),
        )
    assert result.exit_code == 0, (result.output, result.exception)
    found = load(out)
    assert found["answers"][0]["rate"] <= 26
    assert any(probe["rate"] > 20 and probe["attainment"] < 0.9 for probe in found["probes"])
    assert len(found["runs"]) == len(found["probes"])
    assert found["slos_ms"] == {"ttft": 200.0}
    assert (found["kind"], found["schema_version"]) == ("max-goodput", 1)
    page = tmp_path / "found.html"
    assert bench("report", str(out), "--out", str(page)).exit_code == 0
    assert "Probes of the search" in page.read_text()
    assert "max-goodput search" in sentence("compare", str(out), str(out))


def test_a_closed_terminal_leaves_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "cut.json"
    with running_mock(MockSettings(script=Script(stall_after=2))) as stalled:
        arguments = ("--rate", "50", "--requests", "500", "--output-tokens", "5", "--out", str(out))
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "bench", "run", "--url", stalled.target.url, *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests' own may be ignored
        )
        deadline = time.monotonic() + 60
        while not read_truths(stalled.target):  # under way once the server has a request
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGHUP)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "INCOMPLETE" in output
    written = load(out)
    assert not written["is_complete"]
    assert not written["valid"]
    assert written["failures"]["cancelled"] + written["failures"]["skipped"] == 500 == written["num_prompts"]
    assert written["num_sent"] == written["failures"]["cancelled"]
    assert f"500 planned, {written['num_sent']} sent, 0 ok" in output


def test_a_url_without_a_server_is_one_sentence() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert "nothing listens" in sentence("run", "--url", url, "--rate", "1", "--requests", "1")


def test_max_goodput_needs_an_slo(mock: MockProcess) -> None:
    assert "--slo" in sentence("max-goodput", "--url", mock.target.url, "--duration", "1s")


def test_bench_is_a_verb_of_the_one_command_line() -> None:
    result = CliRunner().invoke(cli.app, ["bench", "--help"], terminal_width=200)
    assert result.exit_code == 0, result.exception
    assert "max-goodput" in result.output


def test_without_torch_and_on_one_line(tmp_path: Path) -> None:
    """The whole command, as installed: no torch is loaded, and a refusal has no traceback."""
    environment = dict(os.environ, PYTHONPROFILEIMPORTTIME="1")
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "cluster.cli",
            "bench",
            "run",
            "--url",
            "nonsense",
            "--rate",
            "1",
            "--requests",
            "1",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert result.returncode == 2  # a command line that cannot work
    imports, said = [], []
    for line in result.stderr.splitlines():
        (imports if line.startswith("import time:") else said).append(line)
    assert len(said) == 1
    assert "nonsense" in said[0]
    assert any("bench.load.cli" in line for line in imports)
    assert not any(line.rstrip().endswith("| torch") for line in imports)
