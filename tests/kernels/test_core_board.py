"""The board of cores: at most one guest on a core, no owner ever refused, nothing survives a death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.core_board import BOARD_BYTES, MAX_WORKERS, BoardFile
from kernels.cpu.build import library_path, load_library
from kernels.cpu.core_board import CoreBoard, open_board
from kernels.cpu.native import bind

LIBRARY: Any = bind(load_library())
NUM_WORKERS, NUM_CORES = 3, 2
LINGER_S = 0.01  # more than the board waits for the next step
ROOT = Path(__file__).parents[2]

# Another process at the board, without torch; does as it is told by lines of a word and numbers.
PROCESS = """
import ctypes, sys
from kernels.cpu.core_board import open_board
library = ctypes.CDLL(sys.argv[2])
library.baton_board_open.restype = ctypes.c_void_p
for word in ("close", "work", "rest", "release", "claim", "sit_down"):
    getattr(library, f"baton_board_{word}").argtypes = [ctypes.c_void_p, ctypes.c_int64]
for word in ("close", "work", "rest"):
    getattr(library, f"baton_board_{word}").argtypes = [ctypes.c_void_p]
board = open_board(library, sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    word, *numbers = line.split()
    print(getattr(board, word)(*map(int, numbers)), flush=True)
"""


@pytest.fixture
def path() -> Iterator[str]:
    file = BoardFile()
    yield file.path
    file.close()


class Process:
    """A process of its own at the board."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, path, str(library_path())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def __call__(self, word: str, *numbers: int) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, (word, *numbers))) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def process(path: str) -> Iterator[Process]:
    process = Process(path)
    yield process
    process.kill()


def seated(path: str, worker: int) -> CoreBoard:
    board = open_board(LIBRARY, path)
    board.sit_down(worker)
    return board


def test_the_file_is_as_large_as_the_library_wants() -> None:
    assert LIBRARY.baton_board_bytes() == BOARD_BYTES == 64 * MAX_WORKERS


def test_no_board_and_a_short_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no core board can be opened"):
        open_board(LIBRARY, str(tmp_path / "none"))
    (tmp_path / "short").write_bytes(bytes(BOARD_BYTES - 1))
    with pytest.raises(OSError, match="no core board can be opened"):
        open_board(LIBRARY, str(tmp_path / "short"))


def test_a_worker_is_idle_when_its_step_is_over_for_a_while(path: str) -> None:
    owner, other = seated(path, 1), open_board(LIBRARY, path)
    time.sleep(LINGER_S)
    assert other.is_idle(1)
    with owner.step():
        assert other.is_busy(1)
        assert not other.is_idle(1)
        assert other.is_idle(0)  # never sat down
    assert not other.is_busy(1)
    time.sleep(LINGER_S)
    assert other.is_idle(1)


def test_a_step_that_raises_leaves_no_busy_line(path: str) -> None:
    owner = seated(path, 0)
    with pytest.raises(ValueError, match="broken"), owner.step():
        raise ValueError("broken")
    assert not owner.is_busy(0)


def test_a_claim_ends_with_a_close(path: str) -> None:
    first, second = open_board(LIBRARY, path), open_board(LIBRARY, path)
    assert first.claim(0)
    assert not second.claim(0)
    first.close()
    assert second.claim(0)
    with pytest.raises(ValueError, match="is closed"):
        first.claim(0)


def test_a_killed_guest_leaves_no_claim(path: str, process: Process) -> None:
    board = open_board(LIBRARY, path)
    assert process("claim", 0) == "True"
    assert not board.claim(0)
    process.kill()
    assert board.claim(0)


def test_a_stopped_guest_stands_in_no_owners_way(path: str, process: Process) -> None:
    owner = seated(path, 0)
    assert process("claim", 0) == "True"
    process.signal(signal.SIGSTOP)
    with owner.step():
        assert owner.is_busy(0)
    assert not owner.is_busy(0)
    process.signal(signal.SIGCONT)
    assert process("release", 0) == "None"
    assert owner.claim(0)


def test_an_owner_killed_within_a_step_is_buried_and_a_living_one_is_not(path: str, process: Process) -> None:
    board = open_board(LIBRARY, path)
    process("sit_down", 2)
    process("work")
    board.bury(2)
    assert board.is_busy(2)
    process.kill()
    assert board.is_busy(2)
    board.bury(2)
    assert not board.is_busy(2)
    time.sleep(LINGER_S)
    assert board.is_idle(2)


def test_the_next_life_of_a_worker_sits_down_beside_one_that_is_ending(path: str, process: Process) -> None:
    process("sit_down", 0)
    process("work")
    next_life, watcher = seated(path, 0), open_board(LIBRARY, path)
    with next_life.step():
        process.kill()
        watcher.bury(0)
        assert watcher.is_busy(0)


class Board(RuleBasedStateMachine):
    """Workers come, work, claim, release and die in any order. An open board stands for a process: the kernel
    keeps locks by open file description."""

    def __init__(self) -> None:
        super().__init__()
        self.file = BoardFile()
        self.boards: dict[int, CoreBoard] = {}
        self.busy: set[int] = set()
        self.died_busy: set[int] = set()
        self.guests: dict[int, int] = {}  # core → worker
        self.watcher = open_board(LIBRARY, self.file.path)

    def teardown(self) -> None:
        for board in (*self.boards.values(), self.watcher):
            board.close()
        self.file.close()

    workers = st.integers(0, NUM_WORKERS - 1)
    cores = st.integers(0, NUM_CORES - 1)

    @rule(worker=workers)
    def live(self, worker: int) -> None:
        if worker not in self.boards:
            self.boards[worker] = seated(self.file.path, worker)
            self.died_busy.discard(worker)

    @rule(worker=workers)
    def work(self, worker: int) -> None:
        if worker in self.boards:
            self.boards[worker].work()
            self.busy.add(worker)

    @rule(worker=workers)
    def rest(self, worker: int) -> None:
        if worker in self.boards:
            self.boards[worker].rest()
            self.busy.discard(worker)

    @rule(worker=workers, core=cores)
    def claim(self, worker: int, core: int) -> None:
        if worker in self.boards and self.guests.get(core) != worker:
            assert self.boards[worker].claim(core) == (core not in self.guests)
            self.guests.setdefault(core, worker)

    @precondition(lambda self: self.guests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        core = data.draw(st.sampled_from(sorted(self.guests)))
        self.boards[self.guests.pop(core)].release(core)

    @rule(worker=workers)
    def die(self, worker: int) -> None:
        if worker in self.boards:
            self.boards.pop(worker).close()
            if worker in self.busy:
                self.busy.discard(worker)
                self.died_busy.add(worker)
            self.guests = {core: guest for core, guest in self.guests.items() if guest != worker}

    @rule(worker=workers)
    def bury(self, worker: int) -> None:
        self.watcher.bury(worker)
        self.died_busy.discard(worker)

    @invariant()
    def everybody_sees_who_works(self) -> None:
        for worker in range(NUM_WORKERS):
            assert self.watcher.is_busy(worker) == (worker in self.busy or worker in self.died_busy)

    @invariant()
    def what_nobody_holds_can_be_had(self) -> None:
        for core in range(NUM_CORES):
            is_free = self.watcher.claim(core)
            assert is_free == (core not in self.guests)
            if is_free:
                self.watcher.release(core)


TestBoard = Board.TestCase
TestBoard.settings = settings(max_examples=40, stateful_step_count=40)
