"""KV streams over real sockets: whom a dial is for. The in-place receiver moves nothing by itself."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cluster.errors import EdgeDeviceLost, EdgeError
from cluster.ids import Attempt, BlockId, Epoch, LeaseId, PieceIndex, RequestId, WorkerId
from cluster.kv.edge import EdgeName, KVReceiver, Piece, Staged
from cluster.kv.edge_limit import EdgeLimit
from cluster.kv.edge_local import InPlaceReceiver
from cluster.wire.kv_messages import DecodeToPrefill, EdgeHello, EdgeWelcome, KvMakeRoom, KvOpen
from cluster.wire.messages import Refused
from cluster.wire.stream import Stream, connect
from cluster.worker_io import EdgeDown, EdgeUp, Event, FromPeer, Peer, Scatter, ScatterFailed, WriterGone
from decode_worker import live_edges
from decode_worker.live_edges import DecodeEdges
from tests.support.small_geometry import GEOMETRY

TOKEN = b"k" * 32
ME = Peer(WorkerId("decode-0"), Epoch(2))
P = Peer(WorkerId("prefill-0"), Epoch(1))


class Decode:
    """D's edges, and what its core would hear of them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_busy = False
        self.lost: list[str] = []
        self.changed = asyncio.Event()
        self.edges = DecodeEdges(
            me=ME,
            check_hello=lambda hello: None,
            answer=self._answer,
            may_close=self._may_close,
            token=TOKEN,
            dispatch=self._dispatch,
            is_busy=lambda: self.is_busy,
            on_device_lost=self.lost.append,
        )

    def _answer(self, hello: EdgeHello, may_be_worse: bool) -> tuple[KVReceiver, EdgeWelcome]:
        receiver = self._receiver(hello)
        welcome = EdgeWelcome(
            worker=ME.worker,
            epoch=ME.epoch,
            kind=hello.kinds[0],
            possible=hello.kinds,
            geometry=GEOMETRY,
            endpoint=receiver.endpoint(),
        )
        return receiver, welcome

    def _may_close(self, peer: Peer) -> bool:
        return False

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


async def dial(
    address: str, wanted: Peer, *, warm: bool = False, dialler: Peer = P
) -> tuple[Stream[DecodeToPrefill], DecodeToPrefill | None]:
    """The stream of a new dial and what D answers."""
    stream: Stream[DecodeToPrefill] = await connect(address, TOKEN, DecodeToPrefill)
    stream.post(
        EdgeHello(
            worker=dialler.worker,
            epoch=dialler.epoch,
            decode_worker=wanted.worker,
            decode_epoch=wanted.epoch,
            pid=os.getpid(),
            fingerprint="f",
            kinds=["shm"],
            place="",
            geometry=GEOMETRY,
            warm=warm,
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


async def test_an_edge_that_nobody_needs_yet_waits_until_this_worker_has_time(tmp_path: Path) -> None:
    """One that somebody needs never does; and an edge that is up stays so."""
    decode = Decode()
    address = await decode.edges.start(f"unix:{tmp_path}/kv")
    try:
        used, _ = await dial(address, ME, warm=True)
        decode.is_busy = True
        early, answer = await dial(address, ME, warm=True)
        assert answer == Refused(reason="it is busy, and no request needs this edge yet")
        assert decode.events == [EdgeUp(P, in_place=True)]
        needed, welcome = await dial(address, ME)
        assert isinstance(welcome, EdgeWelcome)
        for stream in (used, early, needed):
            await stream.close()
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


class Capped(Decode):
    """Holds two edges at most; whoever is in `in_use` has a lease here."""

    def __init__(self) -> None:
        super().__init__()
        self.limit, self.in_use = EdgeLimit(2), set[Peer]()

    def _may_close(self, peer: Peer) -> bool:
        return peer not in self.in_use

    def _receiver(self, hello: EdgeHello) -> KVReceiver:
        name = EdgeName(hello.worker, hello.epoch, ME.worker, ME.epoch)
        self.limit.open(name)
        return Releasing(name, self.limit)


class Releasing(InPlaceReceiver):
    in_place = False

    def __init__(self, name: EdgeName, limit: EdgeLimit) -> None:
        super().__init__(name, {})
        self._capped, self._limit = name, limit

    async def close(self) -> None:
        self._limit.close(self._capped)


@pytest.mark.parametrize("gives_way", [True, False])
async def test_at_the_cap_the_edge_that_was_idle_longest_is_asked_to_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives_way: bool
) -> None:
    """Its prefill worker decides: to it, the edge may be in use by now."""
    if not gives_way:
        monkeypatch.setattr(live_edges, "ROOM_TIMEOUT_S", 0.05)
    decode = Capped()
    address = await decode.edges.start(f"unix:{tmp_path}/kv")
    peers = [Peer(WorkerId(f"prefill-{number}"), Epoch(1)) for number in range(4)]
    try:
        held = [(await dial(address, ME, dialler=peer))[0] for peer in peers[:2]]
        decode.in_use.add(peers[0])  # the older one
        warm, answer = await dial(address, ME, dialler=peers[2], warm=True)
        assert isinstance(answer, Refused)
        dialling = asyncio.create_task(dial(address, ME, dialler=peers[2]))
        async with asyncio.timeout(20):
            assert await anext(aiter(held[1])) == KvMakeRoom()
        if gives_way:
            await held[1].close()
        stream, answer = await dialling
        assert isinstance(answer, EdgeWelcome if gives_way else Refused)
        decode.in_use.update(peers)
        last, answer = await dial(address, ME, dialler=peers[3])
        assert isinstance(answer, Refused)
        for one in (*held, warm, stream, last):
            await one.close()
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


class Staging(InPlaceReceiver):
    """Moves nothing: it is ready when told, and its scatters fail as told."""

    in_place = False

    def __init__(self, error: EdgeError) -> None:
        super().__init__(EdgeName(P.worker, P.epoch, ME.worker, ME.epoch), {})
        self.may_be_ready = asyncio.Event()
        self.is_closed = False
        self._error = error

    async def ready(self) -> None:
        await self.may_be_ready.wait()

    async def scatter(self, staged: Staged, target_blocks: object) -> None:
        raise self._error

    async def close(self) -> None:
        self.is_closed = True


class Failing(Decode):
    def __init__(self, error: EdgeError) -> None:
        super().__init__()
        self.receiver = Staging(error)

    def _receiver(self, hello: EdgeHello) -> KVReceiver:
        return self.receiver


@pytest.mark.parametrize("error", [EdgeError("out of memory"), EdgeDeviceLost("the GPU faulted")])
async def test_a_scatter_that_fails_is_told_before_its_edge_goes_down(
    tmp_path: Path, error: EdgeError
) -> None:
    """Its blocks would be held for ever; and a device that does nothing more ends the process."""
    decode = Failing(error)
    address = await decode.edges.start(f"unix:{tmp_path}/kv")
    decode.receiver.may_be_ready.set()
    piece = Piece(RequestId("r"), Attempt(1), PieceIndex(0), 0, 1)
    try:
        stream, _ = await dial(address, ME)
        await decode.heard(1)
        decode.edges.carry(Scatter(P, Staged(piece, 0, 10), (BlockId(3),)))
        expected = [EdgeUp(P, in_place=False), ScatterFailed(P, piece, str(error)), EdgeDown(P, str(error))]
        assert await decode.heard(3) == expected
        assert decode.lost == ([str(error)] if isinstance(error, EdgeDeviceLost) else [])
        await stream.close()
    finally:
        await decode.edges.close()


async def test_a_peer_that_dies_before_its_edge_is_up_holds_no_place(tmp_path: Path) -> None:
    """Its successor may need it at once; the receiver alone would wait for its dial until a deadline."""
    decode = Failing(EdgeError("unused"))
    address = await decode.edges.start(f"unix:{tmp_path}/kv")
    try:
        stream, welcome = await dial(address, ME)
        assert isinstance(welcome, EdgeWelcome)
        await stream.close()
        [event] = await decode.heard(1)
        assert event == EdgeDown(P, "the prefill worker left before the edge was up")
        assert decode.receiver.is_closed
    finally:
        await decode.edges.close()


async def test_what_a_peer_says_before_this_end_is_ready_is_heard_after_it(tmp_path: Path) -> None:
    decode = Failing(EdgeError("unused"))
    address = await decode.edges.start(f"unix:{tmp_path}/kv")
    said = [KvOpen(request=RequestId(f"r{i}"), attempt=Attempt(1), lease=LeaseId(i)) for i in range(2)]
    try:
        stream, _ = await dial(address, ME)
        for message in said:
            await stream.send(message)
        await asyncio.sleep(0.05)
        assert decode.events == []
        decode.receiver.may_be_ready.set()
        heard = await decode.heard(3)
        assert heard == [EdgeUp(P, in_place=False), *(FromPeer(P, message) for message in said)]
        await stream.close()
    finally:
        await decode.edges.close()
