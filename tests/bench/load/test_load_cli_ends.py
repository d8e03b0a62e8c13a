"""How commands end: exit statuses, signals at the worst moments, outputs that break."""

from __future__ import annotations

import contextlib
import html
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bench.load import cli, cli_session, runner
from bench.load.figures import validity
from bench.load.mock.process import MockProcess, running_mock

ROOT = Path(__file__).parents[3]
LOAD = ("--rate", "50", "--requests", "4", "--output-tokens", "5", "--slo", "ttft=600s")


@pytest.fixture(autouse=True)
def client_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that holds up the client makes no result invalid here: see `test_load_validity`."""
    monkeypatch.setattr(validity, "_sent_late", lambda *_: [])
    monkeypatch.setattr(validity, "_read_late", lambda *_: ([], False))
    monkeypatch.setattr(validity, "_busy", lambda *_: [])


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    with running_mock() as running:
        yield running


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments, terminal_width=200)


def three_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("script", "status"),
    [({}, 0), ({"num_tokens": 3}, 3), ({"http_status": 500}, 4)],
    ids=["valid", "invalid", "nothing succeeded"],
)
def test_the_exit_status_says_what_the_result_is_worth(
    mock: MockProcess, tmp_path: Path, script: dict[str, Any], status: int
) -> None:
    out = tmp_path / "result.json"
    body = json.dumps({"mock": script})
    arguments = ("run", "--url", mock.target.url, *LOAD, "--extra-body", body, "--out", str(out))
    result = bench(*arguments)
    assert result.exit_code == status, result.output
    assert json.loads(out.read_text())["num_prompts"] == 4


@pytest.mark.parametrize(
    ("bound", "more", "status"),
    [("500ms", (), 0), ("500ms", ("--strict",), 6), ("60s", ("--strict", "--target", "1"), 0)],
    ids=["not asked for", "missed", "met"],
)
def test_with_strict_missed_slos_have_a_status(
    mock: MockProcess, bound: str, more: tuple[str, ...], status: int
) -> None:
    """Late by so much that a client which the machine holds up for a while is late by little."""
    late = ("--extra-body", json.dumps({"mock": {"ttft_s": 1.0}}))
    arguments = ("--rate", "50", "--requests", "4", "--output-tokens", "5", "--slo", f"e2e={bound}", *late)
    result = bench("run", "--url", mock.target.url, *arguments, *more)
    assert result.exit_code == status, result.output


@pytest.mark.parametrize("moment", ["summarize", "write_result", "render_report"])
def test_signals_after_the_last_request_cost_nothing(
    mock: MockProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    owner: Any = runner if moment == "summarize" else cli
    true = getattr(owner, moment)

    def interrupted(*arguments: Any) -> Any:
        three_signals()
        return true(*arguments)

    monkeypatch.setattr(owner, moment, interrupted)
    out, page = tmp_path / "result.json", tmp_path / "page.html"
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    result = bench("run", "--url", mock.target.url, *LOAD, "--out", str(out), "--report", str(page))
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(out.read_text())["completed"] == 4
    assert page.exists()
    now = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert now == handlers


def test_a_signal_before_the_first_request_ends_the_command(
    mock: MockProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal did not end the command")

    monkeypatch.setattr(cli_session, "probe", interrupted)
    out = tmp_path / "result.json"
    result = bench("run", "--url", mock.target.url, *LOAD, "--out", str(out))
    assert result.exit_code == 130
    assert not out.exists()


def test_an_interrupted_sweep_runs_no_further_rate(
    mock: MockProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = cli.write_result

    def interrupted(*arguments: Any) -> None:
        true(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(cli, "write_result", interrupted)
    arguments = ("--rates", "40,50,60", "--requests", "3", "--output-tokens", "2")
    result = bench("sweep", "--url", mock.target.url, *arguments, "--out", str(tmp_path / "s.json"))
    assert result.exit_code == 130
    assert json.loads((tmp_path / "s.rate-40.json").read_text())["completed"] == 3
    assert not (tmp_path / "s.rate-60.json").exists()


@pytest.mark.parametrize(("dies_at", "status"), [("40", 5), ("60", 0)], ids=["before the end", "in the last"])
def test_a_sweep_ends_where_its_server_died(
    mock: MockProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str, status: int
) -> None:
    """What was measured is written, and the rates that were not are named."""
    deaths = iter(
        [None, "the server no longer answers"] if dies_at == "60" else ["the server no longer answers"]
    )
    monkeypatch.setattr(cli, "server_lost", lambda *_: next(deaths))
    arguments = ("--rates", "40,60", "--requests", "3", "--output-tokens", "2")
    result = bench("sweep", "--url", mock.target.url, *arguments, "--out", str(tmp_path / "s.json"))
    assert result.exit_code == status, result.output
    assert json.loads((tmp_path / "s.rate-40.json").read_text())["completed"] == 3
    assert (tmp_path / "s.rate-60.json").exists() is (status == 0)
    said = "INCOMPLETE: the sweep ended at 40 req/s, without the rates 60: the server no longer answers"
    assert (said in result.stderr.splitlines()) is (status == 5)


@pytest.mark.parametrize(
    ("command", "status", "mark"),
    [("run", 3, "INVALID: The server went away"), ("max-goodput", 5, "INCOMPLETE: the search was cut short")],
)
def test_a_server_that_dies_is_in_status_result_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, status: int, mark: str
) -> None:
    """Killed when its first answers are there; its last moment makes no figure, and nothing of it is lost."""
    out, page = tmp_path / "result.json", tmp_path / "page.html"
    load = {
        "run": ("--rate", "20", "--requests", "40"),
        "max-goodput": ("--start-rate", "50", "--duration", "800ms"),
    }[command]
    with running_mock() as dying:
        update = cli_session.LiveProgress.update

        def watched(live: Any, progress: Any) -> None:
            update(live, progress)
            if progress.num_ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dying.pid, signal.SIGKILL)

        monkeypatch.setattr(cli_session.LiveProgress, "update", watched)
        arguments = (
            *load,
            "--output-tokens",
            "5",
            "--slo",
            "e2e=600s",
            "--out",
            str(out),
            "--report",
            str(page),
        )
        result = bench(command, "--url", dying.target.url, *arguments)
    assert result.exit_code == status, (result.output, result.exception)
    assert any(line.startswith(mark) for line in result.output.splitlines())
    written = json.loads(out.read_text())
    (why,) = written["invalid_reasons"] if command == "run" else written["incomplete_reasons"]
    assert "nothing listens" in why
    assert html.escape(why, quote=False) in page.read_text().replace("&#39;", "'")
    if command == "run":
        assert not written["valid"]
        assert written["num_prompts"] == 40 == written["completed"] + written["failed"]
        assert bench("compare", str(out), str(out)).exit_code == 7


@pytest.mark.parametrize("how", ["full", "broken pipe", "closed"])
def test_the_result_outlives_standard_output(mock: MockProcess, tmp_path: Path, how: str) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "cluster.cli", "bench", "run", "--url", mock.target.url, *LOAD]
    if how == "full":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, stdout = os.pipe()
        os.close(reading)
    if how == "closed":
        command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(
        [*command, "--out", str(out)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(stdout)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["completed"] == 4
    if how != "closed":
        assert "standard output cannot be written" in done.stderr


def test_a_result_that_cannot_be_written_is_at_least_printed(
    mock: MockProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise cli.ConfigError("Cannot write it: No space left on device")

    monkeypatch.setattr(cli, "write_result", full)
    result = bench("run", "--url", mock.target.url, *LOAD, "--out", str(tmp_path / "r.json"))
    assert "No space left" in str(result.exception)
    assert "4 planned, 4 sent, 4 ok" in result.output


def test_the_result_tells_what_was_asked(mock: MockProcess, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ("--temperature", "0.5", "--allow-stop", "--timeout", "7s", "--extra-body", '{"top_k": 3}')
    bench("run", "--url", mock.target.url, *LOAD, *arguments, "--out", str(out))
    asked = json.loads(out.read_text())["settings"]
    assert asked["temperature"] == 0.5
    assert asked["ignore_eos"] is False
    assert asked["timeout_s"] == 7.0
    assert asked["extra_body"] == {"top_k": 3}  # the mock is no Baton: it is not asked for timings
    assert asked["prompt_form"] == "ids"
    assert asked["num_processes"] == 1
    assert asked["command"]
