"""Who hears signals while something is measured."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.load import cli, cli_entry
from bench.load.cli_session import uninterrupted
from bench.load.client.interrupts import SIGNALS, CommandSignals, StopSwitch, signals_to
from cluster import cli as cluster_cli

ROOT = Path(__file__).parents[3]


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_signals_go_to_the_switch_and_then_where_they_went_before() -> None:
    switch = StopSwitch()
    before = [signal.getsignal(number) for number in SIGNALS]
    with signals_to(switch.stop):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
    assert switch.num_stops == 3
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.usefixtures("handlers")
def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under `nohup`: the run goes on without its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    switch = StopSwitch()
    with signals_to(switch.stop):
        os.kill(os.getpid(), signal.SIGHUP)
    assert switch.num_stops == 0


@pytest.mark.usefixtures("handlers")
def test_a_signal_within_a_stop_does_not_lock_up() -> None:
    switch = StopSwitch()
    woken: list[int] = []

    def wake() -> None:
        woken.append(switch.num_stops)
        if len(woken) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with signals_to(switch.stop), switch.connected(wake):
        switch.stop()
    assert woken == [1, 2]
    assert switch.was_connected


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_ends_with_one_line_before_it_measures(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    signals = CommandSignals()
    signals.take()
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), number)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted: nothing was measured or written\n"


@pytest.mark.usefixtures("handlers")
def test_once_it_measures_signals_end_runs_and_in_the_end_nothing() -> None:
    signals = CommandSignals()
    signals.take()
    with uninterrupted() as switch, switch.connected(lambda: None):
        assert switch is signals.switch
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)  # its result is being written, say
    assert switch.num_stops == 2
    signals.ignore()
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    assert switch.num_stops == 2


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("status", [0, 3, 4, 130])
def test_late_signals_do_not_change_the_status(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """After the result was written, and while the command returns."""

    def app(**_: Any) -> None:
        with uninterrupted() as switch, switch.connected(lambda: None):
            pass
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        raise SystemExit(status)

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli_entry.main(["run"], owns_process=True)
    assert ended.value.code == status
    for number in SIGNALS:
        os.kill(os.getpid(), number)


@pytest.mark.usefixtures("handlers")
def test_within_another_program_its_signals_stay_its_own() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    result = CliRunner().invoke(cluster_cli.app, ["bench", "--help"])
    assert result.exit_code == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("when", ["bench.load.plans", "bench.load.cli "], ids=["imports", "checks"])
def test_an_interrupt_at_the_start_is_one_line(when: str) -> None:
    """Of the whole program. The server never answers, so that nothing is measured however late it comes."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        arguments = ("bench", "run", "--url", url, "--rate", "1", "--requests", "1")
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "cluster.console", *arguments],
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if when in f"{line.strip()} ":
                break
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    words = [line for line in said.splitlines() if not line.startswith("import time:")]
    assert words == ["interrupted: nothing was measured or written"]
