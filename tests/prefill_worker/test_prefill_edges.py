"""KV streams over real sockets: what a dial promises to the decode worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from cluster.errors import EdgeError, EdgeUnfit
from cluster.ids import BlockId, Epoch, WorkerId
from cluster.kv.edge import EdgeName, KVSender, Piece
from cluster.kv.edge_limit import EdgeLimit
from cluster.wire.kv_messages import EdgeHello, EdgeWelcome, PrefillToDecode
from cluster.wire.messages import Refused
from cluster.wire.stream import Stream, listen
from cluster.worker_io import CloseEdge, EdgeDown, EdgeUp, Event, OpenEdge, Peer
from prefill_worker.live_edges import PrefillEdges
from tests.support.small_geometry import GEOMETRY

TOKEN = b"k" * 32
D = Peer(WorkerId("decode-0"), Epoch(1))


class Sender:
    """Moves nothing; with `hangs`, it does not stop."""

    def __init__(self, *, in_place: bool, hangs: bool) -> None:
        self.in_place, self._hangs = in_place, hangs

    async def ready(self) -> None:
        return

    async def send(self, piece: Piece, source: Sequence[BlockId], target: Sequence[BlockId]) -> int:
        raise AssertionError("nothing is sent")

    async def close(self) -> None:
        if self._hangs:
            raise EdgeError("thread `kv-edge p/d` did not end within 15 s")


def hello(peer: Peer, uncapped: bool = False, kind: str = "shm") -> EdgeHello:
    return EdgeHello(
        worker=WorkerId("prefill-0"),
        epoch=Epoch(1),
        decode_worker=peer.worker,
        decode_epoch=peer.epoch,
        pid=os.getpid(),
        fingerprint="f",
        kinds=[kind],
        place="",
        geometry=GEOMETRY,
    )


def welcome_of(kinds: list[str]) -> EdgeWelcome:
    return EdgeWelcome(
        worker=D.worker, epoch=D.epoch, kind=kinds[0], possible=kinds, geometry=GEOMETRY, endpoint={}
    )


@pytest.mark.parametrize(
    ("in_place", "hangs", "num_dials"), [(True, True, 1), (True, False, 2), (False, True, 2)]
)
async def test_whoever_may_still_be_written_to_is_not_dialed_again(
    tmp_path: Path, in_place: bool, hangs: bool, num_dials: int
) -> None:
    """D takes a dial of this process for proof that its older writer has stopped."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    dials: list[EdgeHello] = []

    async def welcome(stream: Stream[PrefillToDecode]) -> None:
        async for message in stream:
            assert isinstance(message, EdgeHello)
            dials.append(message)
            stream.post(welcome_of(message.kinds))

    async def make_sender(welcome: EdgeWelcome) -> KVSender:
        return Sender(in_place=in_place, hangs=hangs)

    listener = await listen(f"unix:{tmp_path}/kv", TOKEN, PrefillToDecode, welcome)
    edges = PrefillEdges(make_hello=hello, token=TOKEN, make_sender=make_sender, dispatch=events.put_nowait)
    try:
        async with asyncio.timeout(20):
            edges.carry(OpenEdge(D, listener.address))
            assert await events.get() == EdgeUp(D, in_place=in_place)
            edges.carry(CloseEdge(D, "over"))
            assert isinstance(await events.get(), EdgeDown)
            edges.carry(OpenEdge(D, listener.address))
            again = await events.get()
            assert again == (
                EdgeUp(D, in_place=in_place)
                if num_dials == 2
                else EdgeDown(D, "an older edge has not stopped writing: this worker has to be started again")
            )
            assert len(dials) == num_dials
    finally:
        await edges.close()
        await listener.close()


async def test_an_edge_that_is_unfit_is_dialed_again_at_once_as_another_kind(tmp_path: Path) -> None:
    """The core hears of the edge that came up in the end, and of nothing before."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    dials: list[str] = []
    kinds = ["cuda_ipc", "nccl", "gloo"]

    async def welcome(stream: Stream[PrefillToDecode]) -> None:
        async for message in stream:
            assert isinstance(message, EdgeHello)
            dials.append(message.kinds[0])
            if message.kinds[0] == "nccl":
                stream.post(Refused(reason="this torch is built without NCCL"))
            else:
                stream.post(welcome_of(message.kinds))

    async def make_sender(welcome: EdgeWelcome) -> KVSender:
        if kinds[0] == "cuda_ipc":
            raise EdgeUnfit("no peer access")
        return Sender(in_place=False, hangs=False)

    def judge(peer: Peer, error: EdgeError) -> EdgeError:
        assert peer == D
        kinds.pop(0)
        return EdgeUnfit(str(error))

    listener = await listen(f"unix:{tmp_path}/kv", TOKEN, PrefillToDecode, welcome)
    edges = PrefillEdges(
        make_hello=lambda peer, uncapped: hello(peer, uncapped, kinds[0]),
        token=TOKEN,
        make_sender=make_sender,
        dispatch=events.put_nowait,
        judge=judge,
    )
    try:
        async with asyncio.timeout(20):
            edges.carry(OpenEdge(D, listener.address))
            assert await events.get() == EdgeUp(D, in_place=False)
            assert dials == ["cuda_ipc", "nccl", "gloo"]
            assert events.empty()
    finally:
        await edges.close()
        await listener.close()


async def test_all_dials_of_one_edge_have_one_deadline(tmp_path: Path) -> None:
    """Each kind hangs: there is no time for another when the first one's is up."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    num_dials = 0

    async def welcome(stream: Stream[PrefillToDecode]) -> None:
        nonlocal num_dials
        num_dials += 1
        async for message in stream:
            assert isinstance(message, EdgeHello)
            stream.post(welcome_of(message.kinds))

    async def make_sender(welcome: EdgeWelcome) -> KVSender:
        await asyncio.sleep(3600)
        raise AssertionError("it hangs")

    listener = await listen(f"unix:{tmp_path}/kv", TOKEN, PrefillToDecode, welcome)
    edges = PrefillEdges(
        make_hello=hello,
        token=TOKEN,
        make_sender=make_sender,
        dispatch=events.put_nowait,
        judge=lambda peer, error: EdgeUnfit(f"{error}; KV goes by `gloo` between these two"),
    )
    try:
        async with asyncio.timeout(20):
            edges.carry(OpenEdge(D, listener.address, timeout_s=0.2))
            down = await events.get()
            assert isinstance(down, EdgeDown)
            assert down.reason == (
                "the edge did not come up in time; KV goes by `gloo` between these two; "
                "there was no time left for that"
            )
            assert num_dials == 1
    finally:
        await edges.close()
        await listener.close()


async def test_a_refusal_of_what_nobody_needs_yet_says_nothing_of_its_kind(tmp_path: Path) -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()
    dials: list[tuple[str, bool]] = []

    async def refuse(stream: Stream[PrefillToDecode]) -> None:
        async for message in stream:
            assert isinstance(message, EdgeHello)
            dials.append((message.kinds[0], message.warm))
            stream.post(Refused(reason="it is busy"))

    async def make_sender(welcome: EdgeWelcome) -> KVSender:
        raise AssertionError("it was refused")

    def judge(peer: Peer, error: EdgeError) -> EdgeError:
        dials.append(("judged", False))
        return error

    listener = await listen(f"unix:{tmp_path}/kv", TOKEN, PrefillToDecode, refuse)
    edges = PrefillEdges(
        make_hello=lambda peer, uncapped: hello(peer, uncapped, "nccl"),
        token=TOKEN,
        make_sender=make_sender,
        dispatch=events.put_nowait,
        judge=judge,
    )
    try:
        async with asyncio.timeout(20):
            for warm in (True, False):
                edges.carry(OpenEdge(D, listener.address, warm))
                assert await events.get() == EdgeDown(D, "refused by the decode worker: it is busy")
            assert dials == [("nccl", True), ("nccl", False), ("judged", False)]
    finally:
        await edges.close()
        await listener.close()


async def test_an_edge_for_which_there_is_no_room_says_so_and_one_that_is_let_go_makes_room(
    tmp_path: Path,
) -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()
    limit, asked = EdgeLimit(1), list[tuple[Peer, bool]]()
    other = Peer(WorkerId("decode-1"), Epoch(1))

    def edge_to(peer: Peer) -> EdgeName:
        return EdgeName(WorkerId("prefill-0"), Epoch(1), *peer)

    async def welcome(stream: Stream[PrefillToDecode]) -> None:
        async for message in stream:
            assert isinstance(message, EdgeHello)
            answer = welcome_of(message.kinds)
            stream.post(msgspec.structs.replace(answer, worker=message.decode_worker))

    class Capped(Sender):
        def __init__(self, name: EdgeName) -> None:
            super().__init__(in_place=False, hangs=False)
            limit.open(name)
            self._name = name

        async def close(self) -> None:
            limit.close(self._name)

    async def make_sender(welcome: EdgeWelcome) -> KVSender:
        return Capped(edge_to(Peer(welcome.worker, welcome.epoch)))

    def make_hello(peer: Peer, uncapped: bool) -> EdgeHello:
        asked.append((peer, uncapped))
        return hello(peer)

    listener = await listen(f"unix:{tmp_path}/kv", TOKEN, PrefillToDecode, welcome)
    edges = PrefillEdges(
        make_hello=make_hello,
        token=TOKEN,
        make_sender=make_sender,
        dispatch=events.put_nowait,
        describe=lambda peer, sender: EdgeUp(peer, sender.in_place, None, limit.holds(edge_to(peer))),
    )
    try:
        async with asyncio.timeout(20):
            edges.carry(OpenEdge(D, listener.address))
            assert await events.get() == EdgeUp(D, in_place=False, is_capped=True)
            edges.carry(OpenEdge(other, listener.address, uncapped=True))
            down = await events.get()
            assert isinstance(down, EdgeDown)
            assert (down.peer, down.is_crowded) == (other, True)
            edges.carry(CloseEdge(D, "it makes room"))
            assert await events.get() == EdgeDown(D, "it makes room")
            edges.carry(OpenEdge(other, listener.address))
            assert await events.get() == EdgeUp(other, in_place=False, is_capped=True)
            assert asked == [(D, False), (other, True), (other, False)]
    finally:
        await edges.close()
        await listener.close()
