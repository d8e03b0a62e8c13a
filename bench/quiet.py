"""Whether the machine had anything else to do while it was measured: cores that others used.

1. `CpuUse.begin` reads the machine's busy time and that of the processes measured, client included.
2. `CpuUse.others` says how many cores, on average since then, were busy for somebody else, and how many the
   machine's host took away.
3. Neither shows a neighbour behind the same physical core, or a lower clock: `quick_gflop_per_s` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Seconds of CPU so far, at a moment."""

    at_s: float
    busy_s: float
    stolen_s: float
    ours_s: float

    @classmethod
    def begin(cls, pids: Iterable[int]) -> CpuUse:
        """Of `pids`; this process and its children that have ended are counted too."""
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, softirq, stolen = (int(field) / _HZ for field in fields[:8])
        mine = os.times()
        ours_s = mine.user + mine.system + mine.children_user + mine.children_system
        ours_s += sum(map(_of_process, pids))
        return cls(time.monotonic(), user + nice + system + irq + softirq, stolen, ours_s)

    def others(self, now: CpuUse) -> tuple[float, float]:
        """(cores busy for others, cores taken away) between this moment and `now`."""
        span_s = max(now.at_s - self.at_s, 1e-9)
        others_s = now.busy_s - self.busy_s - (now.ours_s - self.ours_s)
        return max(0.0, others_s / span_s), (now.stolen_s - self.stolen_s) / span_s


def quick_gflop_per_s() -> float:
    """Of a product on all cores that fits into the caches, the best of three; takes some 50 ms. Comparable
    with itself only."""
    rows, depth = 512, 1024
    a, b = np.ones((rows, depth), np.float32), np.ones((depth, depth), np.float32)
    best_s = np.inf
    for _ in range(3):
        began_s = time.perf_counter()
        np.matmul(a, b)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * rows * depth * depth / best_s / 1e9


def _of_process(pid: int) -> float:
    """User and system time of all its threads; nothing of one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _HZ
