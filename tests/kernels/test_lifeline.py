"""A socket held by a lifeline ends with its process, before the process's other sockets do."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu.lifeline import Lifeline, hold

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tables of files are Linux's")
ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import os, sys, time
from kernels.cpu.lifeline import hold
held, plain, megabytes = (int(word) for word in sys.argv[1:])
lifeline = hold(held)
memory = bytearray(megabytes << 20)
for place in range(0, len(memory), 4096):
    memory[place] = 1  # pages of its own, which the system takes back one by one
print("ready" if lifeline is not None else "cannot", flush=True)
time.sleep(60)
"""


def ended(*ends: socket.socket, within_s: float) -> list[socket.socket]:
    """Those whose other end is closed, as soon as one is."""
    return select.select(ends, [], [], within_s)[0]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    yield here, there
    here.close()


def held(there: socket.socket) -> Lifeline:
    lifeline = hold(there.detach())
    if lifeline is None:
        pytest.skip("this system does not let a thread have files of its own")
    return lifeline


def test_a_killed_process_lets_go_of_it_first() -> None:
    mine, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    numbers = [end.fileno() for end in theirs]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, numbers), "500"],
        pass_fds=numbers,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    for end in theirs:
        end.close()
    assert process.stdout is not None
    try:
        said = process.stdout.readline().strip()
        if said == "cannot":
            pytest.skip("this system does not let a thread have files of its own")
        assert said == "ready"
        assert ended(*mine, within_s=0.1) == []
        process.send_signal(signal.SIGKILL)
        assert ended(*mine, within_s=30) == [mine[0]]
        assert ended(mine[1], within_s=30) == [mine[1]]
    finally:
        process.kill()
        process.communicate()
        for end in mine:
            end.close()


def test_it_ends_on_purpose_too(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    lifeline = held(there)
    assert ended(here, within_s=0.05) == []
    lifeline.close()
    lifeline.close()
    assert ended(here, within_s=5) == [here]
    assert here.recv(1) == b""


def test_the_other_end_may_close_first(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    lifeline = held(there)
    here.close()
    lifeline.close()


def test_the_process_keeps_no_file_of_it(pair: tuple[socket.socket, socket.socket]) -> None:
    _, there = pair
    before = set(os.listdir("/proc/self/fd"))
    number = there.fileno()
    lifeline = held(there)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    lifeline.close()
    assert set(os.listdir("/proc/self/fd")) - before == set()


def test_files_of_the_process_are_untouched(pair: tuple[socket.socket, socket.socket]) -> None:
    """Those of other ends stay open while a lifeline is held, and close when the process closes them."""
    _, there = pair
    mine, theirs = socket.socketpair()
    lifeline = held(there)
    mine.sendall(b"x")
    assert theirs.recv(1) == b"x"
    theirs.close()
    assert ended(mine, within_s=5) == [mine]
    mine.close()
    lifeline.close()
