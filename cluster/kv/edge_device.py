"""How an edge orders its copies on a device: a CUDA stream of its own on a GPU, nothing on the host.

1. A step is over when its device is (`cluster.kv.edge`): what an edge is asked to read is written, and what
   it is asked to write is in no kernel. So its copies wait for nothing of the engine: KV of a chunk moves
   while the next one is computed.
2. What is enqueued within `order` runs in the edge's own order.
3. `finish` sleeps until the edge's copies are done. Then whoever launches a kernel later sees them, in
   whatever process it is.

torch has 32 streams of each priority and hands them out in turn. What copies is of another priority than what
waits for a peer (`cluster.kv.edge_backends`), and than NCCL's own: an edge whose peer is dead never stands in
the way of another's copies.

What the device refuses comes out as an `EdgeError`: it ends this edge. After a fault it refuses everything:
that is `EdgeDeviceLost`, and ends the process, which may have no step of its own that would find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cluster.errors import EdgeDeviceLost, EdgeError, first_line

_COPIES_PRIORITY = -1  # of streams; lower goes first


class CopyQueue:
    """One edge's order of copies on `device`. Any thread; the contexts are the calling thread's."""

    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            EdgeError: the device gives no stream.
        """
        self._device = device
        self._stream: Any = copy_stream(device) if device.type == "cuda" else None

    @contextmanager
    def order(self) -> Iterator[None]:
        """What is enqueued inside runs in this edge's own order."""
        if self._stream is None:
            yield
            return
        with (
            _told_as_edge_errors(self._device, self._stream),
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
        ):
            yield

    def finish(self) -> None:
        """Until everything enqueued is done; without the GIL, and asleep rather than spinning."""
        if self._stream is not None:
            with _told_as_edge_errors(self._device, self._stream):
                finish_stream(self._stream)


def copy_stream(device: torch.device) -> Any:
    """A CUDA stream for copies. Raises as `new_stream`."""
    return new_stream(device, _COPIES_PRIORITY)


def new_stream(device: torch.device, priority: int) -> Any:
    """A CUDA stream of a GPU.

    Raises:
        EdgeError: there is no room for one.
    """
    with _told_as_edge_errors(device, None):
        return torch.cuda.Stream(device, priority=priority)


@contextmanager
def _told_as_edge_errors(device: torch.device, stream: Any) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = f"copying KV on {device} failed: {first_line(error)}"
        if stream is not None and _refuses_everything(stream):
            raise EdgeDeviceLost(f"{reason}; this process cannot use the GPU again") from error
        raise EdgeError(reason) from error


def _refuses_everything(stream: Any) -> bool:
    """Whether the device has faulted: then even a question is answered with the error. Does not wait."""
    try:
        stream.query()
    except RuntimeError:
        return True
    return False


def finish_stream(stream: Any) -> None:
    """Sleep until a CUDA stream has done all that is in it."""
    done = torch.cuda.Event(blocking=True)
    done.record(stream)
    done.synchronize()
