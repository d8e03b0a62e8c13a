"""A killed process with a socket held by a lifeline is known to be dead before its memory is gone."""

from __future__ import annotations

import errno
import fcntl
import mmap
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
import mmap, os, sys, time
from kernels.cpu.lifeline import hold
held, witness, megabytes, holds = (int(word) for word in sys.argv[1:])
mapped = mmap.mmap(witness, mmap.PAGESIZE)
os.close(witness)
lifeline = hold(held) if holds else None
memory = mmap.mmap(-1, megabytes << 20)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for place in range(0, len(memory), mmap.PAGESIZE):
    memory[place] = 1  # pages of its own, which the system takes back one by one
print("ready" if lifeline is not None or not holds else "cannot", flush=True)
time.sleep(60)
"""
MEGABYTES = 500
ATTEMPTS = 10  # to look before the memory is gone, on a machine with other things to do


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


def memory_outlives_a_stream(*, holds: bool) -> bool:
    """Kill a process with two streams, of which a lifeline holds the first, or none does. Whether its memory
    was still there when the first of the two had ended.

    The witness is a memory file that the process maps: as long as anybody can write to it by a mapping, it
    cannot be sealed. Mappings go after the pages of all memory were taken back.
    """
    mine, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    witness = os.memfd_create("witness", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(witness, mmap.PAGESIZE)
    arguments = (theirs[0].fileno(), witness, MEGABYTES, int(holds))
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        pass_fds=[witness, *(end.fileno() for end in theirs)],
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
        first = ended(*mine, within_s=30)
        outlives = is_mapped(witness)
        assert first, "neither stream has ended"
        for end in mine:
            assert ended(end, within_s=30) == [end]
        return outlives
    finally:
        process.kill()
        process.communicate()
        os.close(witness)
        for end in mine:
            end.close()


def is_mapped(memory_file: int) -> bool:
    """Whether somebody can write to it by a mapping; nobody can afterwards if not."""
    try:
        fcntl.fcntl(memory_file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return True
    return False


def test_one_stream_of_a_killed_process_ends_before_its_memory_is_gone() -> None:
    """Which of the two depends on the thread that dies last: it takes the memory apart, then closes files."""
    assert any(memory_outlives_a_stream(holds=True) for _ in range(ATTEMPTS))


def test_without_it_no_stream_does() -> None:
    assert not memory_outlives_a_stream(holds=False)


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


def test_a_process_goes_on_with_the_library_it_began_with(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not compiled anew when a link breaks, though the sources are others by then."""
    held(pair[0]).close()

    def compile_anew() -> None:
        raise AssertionError

    monkeypatch.setattr("kernels.cpu.lifeline.load_library", compile_anew)
    held(pair[1]).close()


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
