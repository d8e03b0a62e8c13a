"""KV streams over real sockets: whom a dial is for. The in-place receiver moves nothing by itself."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from cluster.errors import EdgeError
from cluster.ids import Epoch, WorkerId
from cluster.kv.edge import EdgeName, KVReceiver
from cluster.kv.edge_local import InPlaceReceiver
from cluster.wire.kv_messages import DecodeToPrefill, EdgeHello, EdgeWelcome
from cluster.wire.messages import Refused
from cluster.wire.stream import Stream, connect
from cluster.worker_io import EdgeDown, EdgeUp, Event, Peer, WriterGone
from decode_worker.live_edges import DecodeEdges
from tests.support.small_geometry import GEOMETRY

TOKEN = b"k" * 32
ME = Peer(WorkerId("decode-0"), Epoch(2))
P = Peer(WorkerId("prefill-0"), Epoch(1))


class Decode:
    """D's edges, and what its core would hear of them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.changed = asyncio.Event()
        self.edges = DecodeEdges(
            me=ME,
            make_welcome=lambda receiver: EdgeWelcome(
                worker=ME.worker, epoch=ME.epoch, geometry=GEOMETRY, endpoint=receiver.endpoint()
            ),
            check_hello=lambda hello: None,
            make_receiver=self._receiver,
            token=TOKEN,
            dispatch=self._dispatch,
        )

    def _receiver(self, hello: EdgeHello) -> KVReceiver:
        return InPlaceReceiver(EdgeName(hello.worker, hello.epoch, ME.worker, ME.epoch), {})

    def _dispatch(self, event: Event) -> None:
        self.events.append(event)
        self.changed.set()

    async def heard(self, count: int) -> list[Event]:
        async with asyncio.timeout(20):
            while len(self.events) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.events


async def dial(address: str, wanted: Peer) -> tuple[Stream[DecodeToPrefill], DecodeToPrefill | None]:
    """The stream of a new dial and what D answers."""
    stream: Stream[DecodeToPrefill] = await connect(address, TOKEN, DecodeToPrefill)
    stream.post(
        EdgeHello(
            worker=P.worker,
            epoch=P.epoch,
            decode_worker=wanted.worker,
            decode_epoch=wanted.epoch,
            pid=os.getpid(),
            fingerprint="f",
            kind="shm",
            geometry=GEOMETRY,
        )
    )
    async with asyncio.timeout(20):
        return stream, await anext(aiter(stream), None)


async def test_a_dial_for_its_predecessor_leaves_the_edge_that_is_in_use_alone(tmp_path: Path) -> None:
    """P dials the dead epoch 1 again where epoch 2 listens by now. Taken for a new dial to itself,
    it would prove to D that P's writer has stopped: it has not."""
    decode = Decode()
    address = await decode.edges.start(f"unix:{tmp_path}/kv")
    try:
        used, welcome = await dial(address, ME)
        assert isinstance(welcome, EdgeWelcome)
        stray, answer = await dial(address, Peer(ME.worker, Epoch(1)))
        assert isinstance(answer, Refused)
        assert "`decode-0` epoch 1" in answer.reason
        assert decode.events == [EdgeUp(P, in_place=True)]
        await stray.close()
        await used.close()
        assert [type(event) for event in await decode.heard(2)] == [EdgeUp, EdgeDown]
    finally:
        await decode.edges.close()


async def test_a_new_dial_of_the_same_process_ends_its_older_edge_first(tmp_path: Path) -> None:
    decode = Decode()
    address = await decode.edges.start(f"unix:{tmp_path}/kv")
    try:
        first, _ = await dial(address, ME)
        second, welcome = await dial(address, ME)
        assert isinstance(welcome, EdgeWelcome)
        heard = await decode.heard(4)
        assert [type(event) for event in heard] == [EdgeUp, EdgeDown, WriterGone, EdgeUp]
        await first.close()
        await second.close()
    finally:
        await decode.edges.close()


class Full(Decode):
    """One that has as many edges as it may."""

    def _receiver(self, hello: EdgeHello) -> KVReceiver:
        raise EdgeError(f"KV edge of `{hello.worker}`: this worker holds 16 edges, as many as it may")


async def test_a_dial_for_which_no_receiver_can_be_made_is_told_why(tmp_path: Path) -> None:
    decode = Full()
    address = await decode.edges.start(f"unix:{tmp_path}/kv")
    try:
        for _ in range(2):  # and the listener goes on
            stream, answer = await dial(address, ME)
            assert isinstance(answer, Refused)
            assert "this worker holds 16 edges" in answer.reason
            await stream.close()
        assert decode.events == []
    finally:
        await decode.edges.close()


class Hanging(InPlaceReceiver):
    """Its connection does not let go."""

    async def close(self) -> None:
        raise EdgeError("thread `kv-edge p/d` did not end within 15 s")


class Stuck(Decode):
    def _receiver(self, hello: EdgeHello) -> KVReceiver:
        return Hanging(EdgeName(hello.worker, hello.epoch, ME.worker, ME.epoch), {})


async def test_an_edge_that_cannot_be_closed_is_down_all_the_same(tmp_path: Path) -> None:
    """Its requests learn of it, and the next dial finds no older edge to wait for."""
    decode = Stuck()
    address = await decode.edges.start(f"unix:{tmp_path}/kv")
    try:
        first, _ = await dial(address, ME)
        await first.close()
        assert [type(event) for event in await decode.heard(2)] == [EdgeUp, EdgeDown]
        second, welcome = await dial(address, ME)
        assert isinstance(welcome, EdgeWelcome)
        await second.close()
    finally:
        await decode.edges.close()
