"""Who owns which core of a machine, and the memory file at which workers see which cores rest.

1. The launcher holds a `BoardFile`: an unnamed memory file, gone with the run however it ends.
2. `share_cores` (pure) gives every worker its own cores, and those of all others to borrow. Cores that no
   worker owns are left to the rest of the machine.
3. Each worker is told by a `CoreShare`; what it does with it is `kernels/cpu/core_board.h`.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

BOARD_BYTES: Final = 1 << 15  # one cache line for each of 512 workers
MAX_WORKERS: Final = BOARD_BYTES // 64


class CoreShare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker's view. Cores are counted, not named: threads run where the system puts them, and no more
    run at once than there are cores.

    `worker` counts the workers of the machine. `owners[core]` are those that a core belongs to: several where
    there are more workers than cores.
    """

    board: str
    worker: int
    owners: tuple[tuple[int, ...], ...]

    @property
    def own(self) -> tuple[int, ...]:
        return tuple(core for core, owners in enumerate(self.owners) if self.worker in owners)

    @property
    def lent(self) -> tuple[int, ...]:
        """Cores it may borrow while their owners rest."""
        return tuple(core for core, owners in enumerate(self.owners) if self.worker not in owners)


class BoardFile:
    """Until `close`, `path` can be opened by every process of this user on this machine."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: no memory file can be made.
        """
        self._fd = os.memfd_create("baton-cores", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, BOARD_BYTES)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def can_share() -> bool:
    """Whether this system has what a board is made of."""
    return sys.platform.startswith("linux")


def share_cores(
    board: str, num_workers: int, threads_per_worker: int, num_cores: int
) -> tuple[CoreShare, ...]:
    """Each worker's share: the next `threads_per_worker` cores, from the first again when all are given away.

    Nobody gets a share where there is nothing to borrow: every core is everybody's.
    """
    owners: list[list[int]] = [[] for _ in range(num_cores)]
    for worker in range(num_workers):
        for thread in range(min(threads_per_worker, num_cores)):
            owners[(worker * threads_per_worker + thread) % num_cores].append(worker)
    owned = tuple(tuple(core) for core in owners if core)
    if num_workers > MAX_WORKERS or all(len(core) == num_workers for core in owned):
        return ()
    return tuple(CoreShare(board=board, worker=worker, owners=owned) for worker in range(num_workers))


def describe_shares(names: Sequence[str], shares: Sequence[CoreShare]) -> str:
    """One line: "prefill-0 owns core 0, may borrow 1; decode-0 owns core 1, may borrow 0"."""
    if not shares:
        return "every worker keeps to its own threads"
    return "; ".join(f"{name} {describe_share(share)}" for name, share in zip(names, shares, strict=True))


def describe_share(share: CoreShare) -> str:
    return f"owns core {_numbers(share.own)}, may borrow {_numbers(share.lent)}"


def _numbers(cores: Sequence[int]) -> str:
    """ "0-3,8" for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs) or "none"
