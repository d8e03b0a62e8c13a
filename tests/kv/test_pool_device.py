"""Pools on a GPU, as far as they can be told without one: the handle as data, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import EdgeError, EdgeUnfit
from cluster.kv.layout import KVLayout
from cluster.kv.pool import HEADER_BYTES, check_header, pool_header
from cluster.kv.pool_device import (
    CudaIpcHandle,
    attach_device_pool,
    current_device,
    device_pool,
    handle_from_text,
    shared_device_pool,
    why_no_device,
)
from tests.kv.edge_harness import GEOMETRY

LAYOUT = KVLayout.from_geometry(GEOMETRY)
NEEDED = HEADER_BYTES + LAYOUT.pool_bytes
BUILD = "a build with CUDA" if torch.version.cuda else "a build without CUDA"
HANDLE = CudaIpcHandle("GPU-1", b"c" + bytes(64), NEEDED, 512, b"/torch_1", 0, bytes(64), True)


@given(st.binary(max_size=80), st.integers(0, 2**60), st.integers(0, 2**40), st.booleans())
def test_a_handle_survives_the_wire(memory: bytes, size: int, offset: int, required: bool) -> None:
    handle = CudaIpcHandle("GPU-é", memory, size, offset, b"/name", 3, memory[::-1], required)
    assert handle_from_text(handle.to_text()) == handle


@given(st.one_of(st.text(max_size=40), st.binary(max_size=40).map(bytes.hex)))
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(EdgeError, match="broken IPC handle"):
        handle_from_text(text)


def test_a_handle_with_more_in_it_is_refused() -> None:
    text = msgspec.msgpack.encode([*msgspec.structs.astuple(HANDLE), "more"]).hex()
    with pytest.raises(EdgeError, match="broken IPC handle"):
        handle_from_text(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ipc": 7}, "needs `pid`, `nonce` and `ipc`"),
        ({"nonce": 7}, "needs `pid`, `nonce` and `ipc`"),
        ({"ipc": "00"}, "broken IPC handle"),
        (
            {"ipc": msgspec.structs.replace(HANDLE, size_bytes=NEEDED - 1).to_text()},
            "not the announced KV pool",
        ),
    ],
)
def test_endpoints_that_cannot_be_are_refused_before_anything_is_mapped(
    changes: dict[str, str | int], message: str
) -> None:
    endpoint: dict[str, str | int] = {"pid": 1, "nonce": "00" * 16, "ipc": HANDLE.to_text()}
    with pytest.raises(EdgeError, match=message):
        attach_device_pool(endpoint | changes, GEOMETRY, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("own", "visible", "reaches", "is_opened"),
    [
        (0, ["GPU-0"], None, True),  # the peer's GPU is not visible: opening it tells
        (0, ["GPU-1"], None, True),  # both compute on it
        (1, ["GPU-1", "GPU-0"], True, True),
        (1, ["GPU-1", "GPU-0"], False, False),
    ],
)
def test_a_pool_is_mapped_on_this_processs_own_gpu_wherever_it_lies(
    monkeypatch: pytest.MonkeyPatch, own: int, visible: list[str], reaches: bool | None, is_opened: bool
) -> None:
    """Opening it fails here, which leaves other kinds of edges to try."""
    opened: list[object] = []
    entered: list[object] = []

    @contextmanager
    def enter(what: object) -> Iterator[None]:
        entered.append(what)
        yield
        entered.pop()

    def open_handle(*arguments: object) -> None:
        opened.append((*arguments, list(entered)))
        raise RuntimeError("CUDA error: invalid resource handle\nmore lines")

    def can_reach(one: int, other: int) -> bool:
        assert reaches is not None, "the driver is asked about GPUs that it does not show"
        assert (one, visible[other]) == (own, "GPU-1")
        return reaches

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_reach)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=visible[index])
    )
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: f"stream of {device.index}")
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_handle)
    endpoint: dict[str, str | int] = {"pid": 1, "nonce": "00" * 16, "ipc": HANDLE.to_text()}
    said = "cannot be mapped .CUDA error: invalid resource handle." if is_opened else "no peer access"
    with pytest.raises(EdgeUnfit, match=said):
        attach_device_pool(endpoint, GEOMETRY, torch.device("cuda", own))
    # Not where the engine's steps are; the event is of a GPU that may not be visible, and long past.
    arguments = (own, HANDLE.memory, NEEDED, 512, b"/torch_1", 0, HANDLE.event, False)
    assert opened == ([(*arguments, [own, f"stream of {own}"])] if is_opened else [])


def test_the_header_tells_whose_memory_it_is() -> None:
    header, nonce = pool_header(LAYOUT, bytes(range(16))), bytes(range(16)).hex()
    padded = header + bytes(HEADER_BYTES - len(header))
    check_header(padded, "here", nonce, GEOMETRY)
    with pytest.raises(EdgeError, match="the nonce differs"):
        check_header(padded, "here", "00" * 16, GEOMETRY)
    with pytest.raises(EdgeError, match="no header"):
        check_header(bytes(HEADER_BYTES), "here", nonce, GEOMETRY)
    with pytest.raises(EdgeError, match="another geometry"):
        check_header(padded, "here", nonce, msgspec.structs.replace(GEOMETRY, num_blocks=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert why_no_device() == f"torch {torch.__version__} ({BUILD}) sees none"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("make", [device_pool, shared_device_pool])
def test_a_fresh_pool_on_a_gpu_is_zero_and_aligned(make: object) -> None:
    assert callable(make)
    pool = make(LAYOUT, current_device(), 2)
    assert tuple(pool.tensor.shape) == LAYOUT.shape
    assert pool.tensor.is_contiguous()
    assert pool.tensor.data_ptr() % 256 == 0
    assert not pool.tensor.any()
    assert pool.whole.shape[0] == LAYOUT.num_blocks + 2
    pool.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_scratch_blocks_lie_behind_the_layouts_own(dtype: str) -> None:
    """On the host: what is asked of a device is memory and a view of it."""
    layout = KVLayout.from_geometry(msgspec.structs.replace(GEOMETRY, dtype=dtype))
    pool = device_pool(layout, torch.device("cpu"), 3)
    assert tuple(pool.whole.shape) == (layout.num_blocks + 3, *layout.block_shape)
    assert tuple(pool.tensor.shape) == layout.shape
    pool.whole[layout.num_blocks :] = 7
    assert not pool.tensor.any()
    assert pool.tensor.data_ptr() == pool.whole.data_ptr()
    pool.close()
    with pytest.raises(EdgeError, match="closed"):
        _ = pool.whole
