"""Copies that are done only when their stream is, as on a GPU: nothing is sent, or told, before."""

from __future__ import annotations

import asyncio

import pytest
import torch

from cluster.errors import EdgeDeviceLost, EdgeError
from cluster.kv.edge_backends import Gloo
from cluster.kv.edge_device import CopyQueue, _told_as_edge_errors
from cluster.kv.edges import EdgeKind
from tests.kv.edge_harness import BLOCK_BYTES, EdgePairs
from tests.kv.stand_ins import LazyStream, OneWayGloo, use_lazy_streams


@pytest.fixture(autouse=True)
def lazy_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lazy_streams(monkeypatch.setattr)


async def test_what_arrives_is_what_was_in_the_blocks(edge_pairs: EdgePairs, kind: EdgeKind) -> None:
    """In parts and in several pieces: slots are used again while copies of other parts are in the stream."""
    pair = await edge_pairs(kind)
    for sources, targets in (([1, 2], [4, 3]), (range(20, 31), range(11)), ([7], [40])):
        await pair.transfer(list(sources), list(targets))
        assert torch.equal(pair.bits(pair.target, targets), pair.bits(pair.source, sources))


async def test_a_piece_that_is_dropped_stays_out_of_the_pool(edge_pairs: EdgePairs, kind: EdgeKind) -> None:
    if kind in (EdgeKind.LOCAL, EdgeKind.SHM):
        pytest.skip("in place")
    pair = await edge_pairs(kind)
    piece = pair.piece(2)
    await pair.receiver.post(piece, 2 * BLOCK_BYTES)
    staged, _ = await asyncio.gather(pair.receiver.wait(piece), pair.sender.send(piece, [1, 2], ()))
    pair.receiver.discard(staged)
    await pair.transfer([5, 6], [8, 9])
    assert not pair.bits(pair.target, [0, 1, 2, 3, 4, 5, 6, 7]).any()


async def test_the_stand_in_sees_a_send_before_its_copy(
    edge_pairs: EdgePairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These tests can fail: gloo that is taken to follow streams sends what was in the slots before."""
    monkeypatch.setattr(Gloo, "follows_streams", True)
    pair = await edge_pairs(EdgeKind.GLOO)
    blocks = [1, 2, 3, 4]
    for block in blocks:
        await pair.transfer([block], [block])
    assert not torch.equal(pair.bits(pair.target, blocks), pair.bits(pair.source, blocks))


def test_host_memory_is_sent_by_the_host_and_gpu_memory_by_its_stream() -> None:
    gpu = torch.device("cuda", 1)
    assert Gloo().staging_device(gpu) == torch.device("cpu")
    assert not Gloo.follows_streams
    assert OneWayGloo.follows_streams
    stream, done = LazyStream(gpu), []
    with stream.order():
        stream.enqueue(lambda: done.append(1))
        assert LazyStream.of_this_thread() is stream
        assert done == []
    assert LazyStream.of_this_thread() is None
    stream.finish()
    assert done == [1]


class Faulty:
    """A GPU's stream whose device answers with errors: once, or for ever."""

    def __init__(self, *, for_ever: bool) -> None:
        self._for_ever = for_ever

    def query(self) -> bool:
        if self._for_ever:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return False  # busy


@pytest.mark.parametrize("for_ever", [True, False])
def test_a_device_that_has_faulted_is_told_from_one_that_refuses_once(for_ever: bool) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")
    with (
        pytest.raises(EdgeError, match=r"^copying KV on cuda:0 failed: CUDA error: an illegal") as raised,
        _told_as_edge_errors(torch.device("cuda", 0), Faulty(for_ever=for_ever)),
    ):
        raise error
    assert isinstance(raised.value, EdgeDeviceLost) == for_ever
    assert "\n" not in str(raised.value)


def test_a_device_that_gives_no_stream_fails_the_edge_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", none_left)
    with pytest.raises(EdgeError, match="CUDA out of memory"):
        CopyQueue(torch.device("cuda", 0))
