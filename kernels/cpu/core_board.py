"""A worker's place at the board of cores (`core_board.h`): it says when it works, and borrows from who rests.

1. The launcher makes a memory file of at least `board_bytes` and gives every worker of the host a `Seat`.
2. The worker's engine holds a `CoreBoard` for as long as it lives, and puts each step in `with board.step()`.
3. The fused forward pass opens the board once more, for its guests on the seat's `lent` cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LentCore:
    """A core, by any number that all workers give it, and the workers it belongs to."""

    core: int
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seat:
    """`worker` counts the workers of the host; `lent` are the cores of others, the first to borrow first."""

    board: str  # path of the board's file
    worker: int
    lent: tuple[LentCore, ...]


class CoreBoard:
    """One open board. Made by `open_board`; after `close` every call is a ValueError."""

    def __init__(self, library: Any, handle: int) -> None:
        self._library = library
        self._open_handle: int | None = handle
        self._finalizer = weakref.finalize(self, library.baton_board_close, handle)

    @property
    def _handle(self) -> int:
        if self._open_handle is None:
            raise ValueError("the core board is closed")
        return self._open_handle

    def close(self) -> None:
        """Every claim ends, and the owner's life at the board."""
        self._open_handle = None
        self._finalizer()

    def sit_down(self, worker: int) -> None:
        """Become the owner `worker`, until this object is closed or the process ends.

        Raises:
            OSError: the file's locks cannot be used.
        """
        if not self._library.baton_board_sit_down(self._handle, worker):
            raise OSError("the locks of the core board cannot be used")

    def work(self) -> None:
        """The owner begins a step: guests go home."""
        self._library.baton_board_work(self._handle)

    def rest(self) -> None:
        self._library.baton_board_rest(self._handle)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Busy inside, resting after it."""
        self.work()
        try:
            yield
        finally:
            self.rest()

    def is_busy(self, worker: int) -> bool:
        return bool(self._library.baton_board_is_busy(self._handle, worker))

    def is_idle(self, worker: int) -> bool:
        """Resting for longer than the gap between two steps."""
        return bool(self._library.baton_board_is_idle(self._handle, worker))

    def bury(self, worker: int) -> None:
        """Let a worker rest that died within a step."""
        self._library.baton_board_bury(self._handle, worker)

    def claim(self, core: int) -> bool:
        """Become the guest on `core`; False if another open board is it."""
        return bool(self._library.baton_board_claim(self._handle, core))

    def release(self, core: int) -> None:
        self._library.baton_board_release(self._handle, core)


def open_board(library: Any, path: str) -> CoreBoard:
    """
    Raises:
        OSError: there is no board at `path`, or this system has no locks for it.
    """
    handle = library.baton_board_open(path.encode())
    if handle is None:
        raise OSError(f"no core board can be opened at {path}")
    return CoreBoard(library, handle)


def borrow(library: Any, model: int, seat: Seat) -> None:
    """Let the fused pass `model` have guests on the cores of `seat`; before its first step.

    Raises:
        OSError: the board cannot be opened, or no thread be started.
    """
    cores = [lent.core for lent in seat.lent]
    owners = [owner for lent in seat.lent for owner in lent.owners]
    ends = [sum(len(lent.owners) for lent in seat.lent[: i + 1]) for i in range(len(seat.lent))]
    arrays = [(ctypes.c_int64 * len(values))(*values) for values in (cores, ends, owners)]
    if library.baton_model_borrow(model, seat.board.encode(), len(cores), *arrays):
        raise OSError(f"no core can be borrowed by the board at {seat.board}")
