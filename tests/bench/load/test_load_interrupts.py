"""Who hears signals while something is measured."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from bench.load.client.interrupts import SIGNALS, StopSwitch, signals_to


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
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
