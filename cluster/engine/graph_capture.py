"""Doing the same work again without its launches: the one place that knows CUDA graphs.

1. `capture(work)` runs `work` as usual, so that kernels are compiled and memory is warm, then records it. It
   must read and write memory that stays where it is, and ask the host for nothing. That is tried before: a
   recording that is broken off leaves torch's allocator in the middle of it for good.
2. What comes back does it again, on the calling thread's current stream.

Graphs of one `CudaCapture` share the memory of their intermediate results, so only one runs at a time, and
nothing but what they write to lasting memory is to be read afterwards. `eager` is the same without a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from cluster.errors import first_line

Work = Callable[[], None]


class CaptureError(Exception):
    """The work cannot be captured; says why in one line. It can still be done as usual."""


class Capture(Protocol):
    def __call__(self, work: Work) -> Work:
        """`work` has run when this returns, and runs again with every call of the result.

        Raises:
            CaptureError: see there.
        """
        ...


def eager(work: Work) -> Work:
    """Where there are no graphs: the work itself."""
    work()
    return work


class CudaCapture:
    """On one device, for one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    work()
                    with _asking_nothing():
                        work()
            finally:
                current.wait_stream(self._stream)
            # Other threads of the process may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # torch leaves its own in place where a recording cannot be ended
            raise CaptureError(first_line(error)) from error
        replay: Work = graph.replay
        return replay


@contextmanager
def _asking_nothing() -> Iterator[None]:
    """Whoever waits for the device inside gets a RuntimeError. It counts for the whole process: for one that
    starts, when nobody else uses its device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # is a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
