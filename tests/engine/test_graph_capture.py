"""The order of a capture, on stand-ins for a device: what cannot be recorded is found before it is tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.engine.graph_capture import CaptureError, CudaCapture

DEVICE = torch.device("cuda", 0)


class Device:
    """What `torch.cuda` has of it; `seen`: how each work was run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.sync_mode: object = 0
        self.is_recording = self.fails_to_end = False
        self.own = self.current = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
            "graph_pool_handle": lambda: "memory",
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.seen.append("replayed")),
            "current_stream": lambda device: self.current,
            "set_stream": self.set_stream,
            "stream": self.stream,
            "graph": self.graph,
            "get_sync_debug_mode": lambda: self.sync_mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "sync_mode", mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ("memory", "thread_local")
        self.current, self.is_recording = stream, True
        try:
            yield
        finally:
            self.is_recording = False
            if self.fails_to_end:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self.current = self.own

    def work(self) -> None:
        self.seen.append("recorded" if self.is_recording else "tried" if self.sync_mode else "run")

    def asking(self) -> None:
        """As work that copies a number to the host."""
        self.work()
        if self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_work_is_run_and_tried_before_it_is_recorded(device: Device) -> None:
    CudaCapture(DEVICE)(device.work)()
    assert device.seen == ["run", "tried", "recorded", "replayed"]
    assert device.sync_mode == 0
    assert device.current is device.own


def test_work_that_asks_the_host_is_never_recorded(device: Device) -> None:
    with pytest.raises(CaptureError, match=r"^called a synchronizing CUDA operation$"):
        CudaCapture(DEVICE)(device.asking)
    assert device.seen == ["run", "tried"]
    assert device.sync_mode == 0
    assert device.current is device.own


def test_a_recording_that_cannot_be_ended_leaves_the_thread_on_its_own_stream(device: Device) -> None:
    device.fails_to_end = True
    with pytest.raises(CaptureError, match="failed due to a previous error"):
        CudaCapture(DEVICE)(device.work)
    assert device.current is device.own
