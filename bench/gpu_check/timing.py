"""How long work takes on the device, and the ceilings of the device itself, measured in the same run.

1. A GPU's time is that between two events around one call: the median of many, after one that does not count.
   Before each a buffer larger than the cache is written some times: then caches hold nothing of use, and the
   device is busy while the host prepares its launches, so that these are not counted.
2. A forward pass has more launches than that hides: it is captured in a CUDA graph, whose replay is timed.
3. The copy ceiling is the rate of copying a gigabyte, bytes read and written; the product ceiling that of the
   vendor's bf16 matrix product of 8192³.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_CACHE_BYTES = 128 * 2**20  # more than any second-level cache so far
_NUM_FLUSHES = 8  # some 0.4 ms on a fast device


@dataclass(frozen=True, slots=True)
class Ceilings:
    copy_bytes_per_s: float
    product_flops_per_s: float


class Clock:
    """Times calls on one device; on a CPU, by the wall."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        """`budget_s`: about so long per measurement."""
        self._device, self._budget_s = device, budget_s
        self.is_gpu = device.type == "cuda"
        num_bytes = _CACHE_BYTES if self.is_gpu else 1
        self._flush = torch.empty(num_bytes, dtype=torch.int8, device=device)

    def seconds(self, run: Callable[[], object], *, cold: bool = True) -> float:
        """Median of single calls; `cold`: with caches emptied before each."""
        run()
        first = self._once(run, cold)
        count = max(3, min(50, int(self._budget_s / max(first, 1e-6)))) if self.is_gpu else 1
        return statistics.median(self._once(run, cold) for _ in range(count))

    def _once(self, run: Callable[[], object], cold: bool) -> float:
        if not self.is_gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        for _ in range(_NUM_FLUSHES if cold else 0):
            self._flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return elapsed_ms / 1e3

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """All launches of `run` in one go, without the host between them; on a CPU `run` itself.

        Raises:
            RuntimeError: it cannot be captured.
        """
        if not self.is_gpu:
            return run
        run()
        self._wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay: Callable[[], object] = graph.replay
        return replay

    def replay_seconds(self, run: Callable[[], object]) -> float:
        """Of `run`, captured. Raises as `captured`."""
        return self.seconds(self.captured(run), cold=False)

    def wall_seconds(self, run: Callable[[], object]) -> float:
        """Median by the wall, the device idle before and after each call: what whoever waits for it sees."""
        run()
        times = []
        for _ in range(10 if self.is_gpu else 1):
            self._wait()
            start = time.perf_counter()
            run()
            self._wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self._device)


def measure_ceilings(clock: Clock, device: torch.device) -> Ceilings:
    is_gpu = device.type == "cuda"
    num_bytes, size = (2**30, 8192) if is_gpu else (2**16, 32)
    source = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copied = 2 * num_bytes / clock.seconds(lambda: target.copy_(source))
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    multiplied = 2 * size**3 / clock.seconds(lambda: a @ b)
    return Ceilings(copied, multiplied)
