"""NCCL's way of use between processes, over gloo: peers that die or stop are noticed by the watchdog alone.

Nothing goes from D to P, order alone matches, and a part may stall only so long (over NCCL: under a second).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable

import msgspec
import pytest

from cluster.errors import EdgeError
from cluster.kv.edges import EdgeKind, make_pool
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from tests.kv.edge_harness import (
    GEOMETRY,
    PeerProcess,
    StartPeer,
    edge_name,
    fields,
    ids,
    piece_of,
    receiver_from,
    sender_to,
)
from tests.kv.edge_peer import checksum, fill
from tests.kv.stand_ins import use_one_way

LAYOUT = KVLayout.from_geometry(GEOMETRY)
BIG = KVLayout.from_geometry(msgspec.structs.replace(GEOMETRY, num_layers=16, num_heads=8, head_dim=128))
STALL_S = 2.0
PATIENT = {"operation_timeout_s": 120.0}  # what notices is not a piece's own deadline
BIG_SLOTS = {"slot_bytes": 32 * 2**20, "num_slots": 1}  # one part, more than sockets buffer
HOW = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])


@pytest.fixture(autouse=True)
def one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_way(monkeypatch.setattr, STALL_S)


async def one_way_peer(start_peer: StartPeer, stall_s: float = STALL_S) -> PeerProcess:
    peer = await start_peer()
    assert await peer.ask("one_way", stall_s=stall_s) == {}
    return peer


async def fails_long_before_its_deadline(awaitable: Awaitable[object]) -> str:
    begin = time.monotonic()
    with pytest.raises(EdgeError) as raised:
        await awaitable
    assert time.monotonic() - begin < PATIENT["operation_timeout_s"] / 4
    return str(raised.value)


@HOW
async def test_a_decode_worker_that_dies_or_stops_in_mid_transfer_ends_its_edge_alone(
    start_peer: StartPeer, how: signal.Signals
) -> None:
    source = KVPool.private(BIG)
    fill(source.tensor, 1)
    victim, steady = await one_way_peer(start_peer), await one_way_peer(start_peer)
    sender = await sender_to(victim, EdgeKind.GLOO, source, edge_name("p", 1), **PATIENT, **BIG_SLOTS)
    beside = await sender_to(steady, EdgeKind.GLOO, source, edge_name("q", 1), **PATIENT, **BIG_SLOTS)
    piece = piece_of(0, 48)
    assert await victim.ask("post", piece=fields(piece)) == {}
    victim.signal(how)
    message, _, _ = await asyncio.gather(
        fails_long_before_its_deadline(sender.send(piece, ids(range(48)), ())),
        steady.ask("receive", piece=fields(piece), targets=list(range(48))),
        beside.send(piece, ids(range(48)), ()),
    )
    assert "decode worker" in message
    found = await steady.ask("checksum", blocks=list(range(48)))
    assert found["checksum"] == checksum(source.tensor)
    await fails_long_before_its_deadline(sender.send(piece_of(1, 1), ids([0]), ()))  # it stays dead
    await sender.close()

    reborn = await one_way_peer(start_peer)
    again = await sender_to(reborn, EdgeKind.GLOO, source, edge_name("p", 2), **PATIENT, **BIG_SLOTS)
    reborn.tell("receive", piece=fields(piece), targets=list(range(48)))
    await again.send(piece, ids(range(48)), ())
    assert "error" not in await reborn.answer()
    for end in (again, beside):
        await end.close()
    source.close()


@HOW
async def test_a_prefill_worker_that_dies_or_stops_under_a_posted_receive_ends_its_edge_alone(
    start_peer: StartPeer, how: signal.Signals
) -> None:
    target = make_pool(EdgeKind.GLOO, LAYOUT)
    # The victim itself is patient: whatever it still sends when it goes on is late.
    victim, steady = await one_way_peer(start_peer, 120.0), await one_way_peer(start_peer)
    receiver = await receiver_from(victim, EdgeKind.GLOO, target, edge_name("p", 1), **PATIENT)
    beside = await receiver_from(steady, EdgeKind.GLOO, target, edge_name("q", 1), **PATIENT)
    piece = piece_of(0, 6)
    await receiver.post(piece, 6 * LAYOUT.bytes_per_block)  # finds a peer that is gone
    victim.signal(how)
    message = await fails_long_before_its_deadline(receiver.wait(piece))
    assert "prefill worker" in message
    await receiver.close()
    if how is signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        late = await victim.ask("send", piece=fields(piece), sources=list(range(6)), targets=[])
        assert "decode worker" in late["error"]
    assert not target.tensor.any()

    reborn = await one_way_peer(start_peer)
    again = await receiver_from(reborn, EdgeKind.GLOO, target, edge_name("p", 2), **PATIENT)
    for end, peer, blocks in ((beside, steady, [7, 8]), (again, reborn, [9, 10])):
        await end.post(piece_of(0, 2), 2 * LAYOUT.bytes_per_block)
        peer.tell("send", piece=fields(piece_of(0, 2)), sources=[1, 2], targets=[])
        await end.scatter(await end.wait(piece_of(0, 2)), ids(blocks))
        assert "error" not in await peer.answer()
        assert checksum(target.tensor[blocks]) == (await peer.ask("checksum", blocks=[1, 2]))["checksum"]
        await end.close()
    target.close()
