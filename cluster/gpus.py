"""Which GPUs this process and its children would see, without torch and without touching any of them.

1. `find_gpus` asks the driver in a process of its own (`cluster.gpu_probe`), within a deadline.
2. Launchers deal workers out over them (`cluster.gpu_placement`); `baton doctor` shows them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from cluster import gpu_probe
from cluster.config import ClusterConfig

PROBE_TIMEOUT_S: Final = 60.0  # a driver that keeps nothing resident starts each GPU anew


class Gpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those that are visible, in the driver's order. `peers[i][j]`: GPU i can use memory of GPU j in place.
    `problem`: why there are none, one line."""

    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    problem: str | None = None

    def __len__(self) -> int:
        return len(self.names)

    def strangers(self) -> list[tuple[int, int]]:
        """Pairs of GPUs of which one does not reach the other's memory."""
        count = len(self)
        return [
            (one, other)
            for one in range(count)
            for other in range(one + 1, count)
            if not (self.peers[one][other] and self.peers[other][one])
        ]


def find_gpus(environment: Mapping[str, str] = os.environ, script: str = gpu_probe.__file__) -> Gpus:
    """What a process with this environment would see. `script` is given by tests only."""
    try:
        told = subprocess.run(
            [sys.executable, "-I", str(Path(script))],  # alone: nothing of the user's is imported
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Gpus(problem=f"the NVIDIA driver does not answer within {PROBE_TIMEOUT_S:g} s")
    try:
        return msgspec.json.decode(told.stdout, type=Gpus)
    except msgspec.MsgspecError:
        return Gpus(
            problem=f"the NVIDIA driver ended the process that asked it, with status {told.returncode}"
        )


def may_use_gpus(config: ClusterConfig) -> bool:
    """Whether workers with these settings compute on a GPU where there is one."""
    return config.backend in ("triton", "auto")
