"""Ways of GPUs, on a host: NCCL's use of a group over gloo, and copies that lie in a stream until somebody
waits for it. The classes under test are those that run on GPUs; what is stood in for is the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from cluster.kv import block_copy, edge_group, edge_local, edges
from cluster.kv.block_copy import BlockRegion, copy_blocks
from cluster.kv.edge_backends import BREAK_TAG, Gloo

SetAttribute = Callable[[object, str, object], None]  # `setattr`, or one that can be undone


class LazyStream:
    """As `CopyQueue` on a GPU: what is enqueued may be done as late as when somebody waits for it."""

    _entered = threading.local()

    def __init__(self, device: torch.device) -> None:
        self._enqueued: list[Callable[[], object]] = []

    @classmethod
    def of_this_thread(cls) -> LazyStream | None:
        found: LazyStream | None = getattr(cls._entered, "stream", None)
        return found

    @contextmanager
    def order(self) -> Iterator[None]:
        outer = self.of_this_thread()
        self._entered.stream = self
        try:
            yield
        finally:
            self._entered.stream = outer

    def enqueue(self, work: Callable[[], object]) -> None:
        self._enqueued.append(work)

    def finish(self) -> None:
        while self._enqueued:
            self._enqueued.pop(0)()


def _enqueue_copy(
    source: BlockRegion,
    source_ids: Sequence[int],
    target: BlockRegion,
    target_ids: Sequence[int],
    stopped: Callable[[], bool],
) -> bool:
    stream = LazyStream.of_this_thread()
    assert stream is not None, "copies are in the edge's own order"
    stream.enqueue(partial(copy_blocks, source, source_ids, target, target_ids, lambda: False))
    return not stopped()


def use_lazy_streams(set_attribute: SetAttribute) -> None:
    """Edges of this process copy as on a GPU."""
    for module in (edge_group, edge_local):
        set_attribute(module, "CopyQueue", LazyStream)
    for user in (block_copy, edge_local):
        set_attribute(user, "copy_blocks", _enqueue_copy)


class Tagless:
    """A group that matches transfers by their order alone, and sends what the thread's stream has done."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if (stream := LazyStream.of_this_thread()) is not None:
            stream.finish()
        return self._group.send(tensors, rank, BREAK_TAG + 1)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._group.recv(tensors, rank, tag if tag == BREAK_TAG else BREAK_TAG + 1)


class OneWayGloo(Gloo):
    """gloo as NCCL is used: one order for everything, nothing goes back from D to P, a transfer follows its
    stream, and a part may stall only so long."""

    has_receipts = False
    follows_streams = True

    def __init__(self, stall_timeout_s: float = 5.0) -> None:
        super().__init__(stall_timeout_s)

    def make_group(self, store: Any, rank: int, host: str, timeout_s: float) -> Any:
        return Tagless(super().make_group(store, rank, host, timeout_s))


def use_one_way(set_attribute: SetAttribute, stall_timeout_s: float = 5.0) -> None:
    """Staged edges of this process are `OneWayGloo`."""
    set_attribute(edges, "_backend", lambda kind, region: OneWayGloo(stall_timeout_s))
