"""Edges between processes: bytes through real boundaries, and peers that are killed or stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Awaitable

import msgspec
import pytest
import torch

from cluster.errors import EdgeError
from cluster.kv.edge import KVReceiver, KVSender
from cluster.kv.edge_group import GroupReceiver
from cluster.kv.edges import EdgeKind, make_pool, make_sender, make_source_pool
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from cluster.kv.process_watch import process_exit, process_start_time
from tests.kv.edge_harness import (
    CONFIG,
    GEOMETRY,
    PeerProcess,
    StartPeer,
    edge_name,
    fields,
    ids,
    nothing_leaked,
    piece_of,
    receiver_from,
    resources,
    sender_to,
    setup_of,
)
from tests.kv.edge_peer import checksum, fill

LAYOUT = KVLayout.from_geometry(GEOMETRY)
KINDS = [EdgeKind.SHM, EdgeKind.GLOO]
if torch.cuda.is_available():
    KINDS += [EdgeKind.CUDA_IPC, EdgeKind.NCCL]
BETWEEN = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
FAST_S = 2.0  # a dead peer is noticed sooner than this


async def fails_fast(awaitable: Awaitable[object]) -> str:
    """The message of the error that came in time."""
    begin = time.monotonic()
    with pytest.raises(EdgeError) as raised:
        await awaitable
    assert time.monotonic() - begin < FAST_S
    return str(raised.value)


@BETWEEN
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
async def test_bytes_arrive_exactly_in_another_process(
    start_peer: StartPeer, kind: EdgeKind, dtype: str
) -> None:
    layout = dataclasses.replace(LAYOUT, dtype=dtype)
    peer, source = await start_peer(), make_source_pool(kind, layout)
    fill(source.tensor, 1)
    sender = await sender_to(peer, kind, source)
    for index, num_blocks in enumerate((1, 3, 4, 9, 12)):
        blocks = [(block * 5 + index) % 48 for block in range(num_blocks)]
        targets = [(block * 7 + 3 * index) % 48 for block in range(num_blocks)]
        piece = piece_of(index, num_blocks)
        if not sender.in_place:
            peer.tell("receive", piece=fields(piece), targets=targets)
        assert await sender.send(piece, ids(blocks), ids(targets)) == num_blocks * layout.bytes_per_block
        if not sender.in_place:
            assert "error" not in await peer.answer()
        found = await peer.ask("checksum", blocks=targets)
        assert found["checksum"] == checksum(source.tensor[blocks])
    assert await peer.ask("close") == {}
    await sender.close()
    source.close()


@BETWEEN
async def test_a_decode_worker_killed_while_idle_fails_the_next_piece_at_once(
    start_peer: StartPeer, kind: EdgeKind
) -> None:
    victim, other, source = await start_peer(), await start_peer(), make_source_pool(kind, LAYOUT)
    sender = await sender_to(victim, kind, source)
    other_sender = await sender_to(other, kind, source, edge_name("prefill-1"))
    victim.signal(signal.SIGKILL)
    async with asyncio.timeout(FAST_S):
        await process_exit(victim.pid)
    message = await fails_fast(sender.send(piece_of(0, 4), ids(range(4)), ids(range(4))))
    assert "decode worker" in message
    assert str(edge_name()) in message
    await fails_fast(sender.send(piece_of(1, 4), ids(range(4)), ids(range(4))))  # and stays dead
    if not other_sender.in_place:
        other.tell("receive", piece=fields(piece_of(0, 4)), targets=[0, 1, 2, 3])
    await other_sender.send(piece_of(0, 4), ids(range(4)), ids(range(4)))
    for end in (sender, other_sender):
        await end.close()
    source.close()


@BETWEEN
async def test_a_decode_worker_killed_in_mid_transfer_fails_that_edge_alone(
    start_peer: StartPeer, kind: EdgeKind
) -> None:
    big = msgspec.structs.replace(GEOMETRY, num_layers=16, num_heads=8, head_dim=128)  # 0.5 MiB a block
    source = make_source_pool(kind, KVLayout.from_geometry(big))
    fill(source.tensor, 1)
    victim, other = await start_peer(), await start_peer()
    slots = {"slot_bytes": 8 * 2**20, "num_slots": 3}
    sender = await sender_to(victim, kind, source, **slots)
    other_sender = await sender_to(other, kind, source, edge_name("prefill-1"), **slots)

    async def stream(end: KVSender, peer: PeerProcess, num_pieces: int) -> None:
        for index in range(num_pieces):
            piece = piece_of(index, 48)
            if not end.in_place:
                peer.tell("receive", piece=fields(piece), targets=list(range(48)))
            await end.send(piece, ids(range(48)), ids(range(48)))
            if not end.in_place:
                await peer.answer()

    doomed = asyncio.ensure_future(stream(sender, victim, 100_000))
    steady = asyncio.ensure_future(stream(other_sender, other, 12))
    await asyncio.sleep(0.1)
    assert not doomed.done()
    victim.signal(signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises((EdgeError, AssertionError)):  # or the peer's answer is missing
        await doomed
    assert time.monotonic() - begin < FAST_S
    await fails_fast(sender.send(piece_of(0, 48), ids(range(48)), ids(range(48))))
    await steady
    found = await other.ask("checksum", blocks=list(range(48)))
    assert found["checksum"] == checksum(source.tensor)
    for end in (sender, other_sender):
        await end.close()
    source.close()


async def test_a_prefill_worker_killed_under_a_posted_receive_fails_it_at_once(start_peer: StartPeer) -> None:
    target = make_pool(EdgeKind.GLOO, LAYOUT)
    victim, other = await start_peer(), await start_peer()
    receiver = await receiver_from(victim, EdgeKind.GLOO, target)
    other_receiver = await receiver_from(other, EdgeKind.GLOO, target, edge_name("prefill-1"))
    piece = piece_of(0, 6)
    await receiver.post(piece, 6 * LAYOUT.bytes_per_block)
    waiting = asyncio.ensure_future(receiver.wait(piece))
    await asyncio.sleep(0.05)
    victim.signal(signal.SIGKILL)
    assert "prefill worker is gone" in await fails_fast(waiting)
    await fails_fast(receiver.post(piece_of(1, 1), LAYOUT.bytes_per_block))
    assert not target.tensor.any()

    await other_receiver.post(piece, 6 * LAYOUT.bytes_per_block)
    other.tell("send", piece=fields(piece), sources=list(range(6)), targets=[])
    staged = await other_receiver.wait(piece)
    await other_receiver.scatter(staged, ids(range(6)))
    assert (await other.ask("checksum", blocks=[]))["num_bytes"] == 6 * LAYOUT.bytes_per_block
    assert (await other.answer())["checksum"] == 0
    for end in (receiver, other_receiver):
        await end.close()
    target.close()


async def test_pieces_that_landed_before_the_writer_died_are_still_good(start_peer: StartPeer) -> None:
    target = make_pool(EdgeKind.GLOO, LAYOUT)
    peer = await start_peer()
    receiver = await receiver_from(peer, EdgeKind.GLOO, target)
    piece = piece_of(0, 5)
    await receiver.post(piece, 5 * LAYOUT.bytes_per_block)
    await peer.ask("send", piece=fields(piece), sources=[1, 2, 3, 4, 5], targets=[])
    expected = (await peer.ask("checksum", blocks=[1, 2, 3, 4, 5]))["checksum"]
    staged = await receiver.wait(piece)
    peer.signal(signal.SIGKILL)
    await process_exit(peer.pid)
    await receiver.scatter(staged, ids([9, 8, 7, 6, 5]))
    assert checksum(target.tensor[[9, 8, 7, 6, 5]]) == expected
    await receiver.close()
    target.close()


HALF_WAY = msgspec.structs.replace(GEOMETRY, num_layers=16, num_heads=8, head_dim=128)  # 24 MiB in all
HALF_WAY_SLOTS = {"slot_bytes": 32 * 2**20, "num_slots": 1}  # in one part, more than sockets buffer


async def test_a_decode_worker_killed_when_half_of_a_part_has_moved_fails_it_at_once(
    start_peer: StartPeer,
) -> None:
    """gloo alone would forget such a transfer until its deadline."""
    pool, peer, piece = KVPool.private(KVLayout.from_geometry(HALF_WAY)), await start_peer(), piece_of(0, 48)
    sender = await sender_to(peer, EdgeKind.GLOO, pool, **HALF_WAY_SLOTS)
    assert await peer.ask("post", piece=fields(piece)) == {}
    peer.signal(signal.SIGSTOP)
    sending = asyncio.ensure_future(sender.send(piece, ids(range(48)), ids(range(48))))
    await asyncio.sleep(0.3)
    assert not sending.done()
    peer.signal(signal.SIGKILL)
    assert "decode worker is gone" in await fails_fast(sending)
    await sender.close()
    pool.close()


async def test_a_prefill_worker_killed_when_half_of_a_part_has_moved_fails_it_at_once(
    start_peer: StartPeer,
) -> None:
    """It is stopped when the first bytes are in staging; should the rest be through already, once more."""
    pool, peer = KVPool.private(KVLayout.from_geometry(HALF_WAY)), await start_peer()
    receiver = await receiver_from(peer, EdgeKind.GLOO, pool, **HALF_WAY_SLOTS)
    assert isinstance(receiver, GroupReceiver)
    landing = receiver._slots.regions[0].blocks[0].view(-1)[:512]
    for attempt in range(20):
        landing.zero_()
        piece = piece_of(attempt, 48)
        await receiver.post(piece, 48 * pool.layout.bytes_per_block)
        receiving = asyncio.ensure_future(receiver.wait(piece))
        peer.tell("send", piece=fields(piece), sources=list(range(48)), targets=[])
        async with asyncio.timeout(20):
            while not landing.any():
                await asyncio.sleep(0)
        peer.signal(signal.SIGSTOP)
        await asyncio.sleep(0.1)
        if not receiving.done():
            break
        peer.signal(signal.SIGCONT)
        receiver.discard(await receiving)
        await peer.answer()
    assert not receiving.done()
    peer.signal(signal.SIGKILL)
    assert "prefill worker is gone" in await fails_fast(receiving)
    await receiver.close()
    pool.close()


async def test_a_stopped_decode_worker_makes_the_deadline_pass(start_peer: StartPeer) -> None:
    big = msgspec.structs.replace(GEOMETRY, num_layers=16, num_heads=8, head_dim=128)
    peer, source = await start_peer(), KVPool.private(KVLayout.from_geometry(big))
    slots = {"slot_bytes": 8 * 2**20, "num_slots": 3}
    sender = await sender_to(peer, EdgeKind.GLOO, source, operation_timeout_s=0.5, **slots)
    piece = piece_of(0, 48)  # more than sockets buffer
    assert await peer.ask("post", piece=fields(piece)) == {}
    peer.signal(signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(EdgeError, match="decode worker did not take part in a transfer before its deadline"):
        await sender.send(piece, ids(range(48)), ids(range(48)))
    assert 0.4 < time.monotonic() - begin < FAST_S
    begin = time.monotonic()
    await sender.close()  # with the peer still stopped
    assert time.monotonic() - begin < FAST_S
    source.close()


async def test_a_stopped_prefill_worker_makes_the_deadline_pass(start_peer: StartPeer) -> None:
    peer, target = await start_peer(), make_pool(EdgeKind.GLOO, LAYOUT)
    receiver = await receiver_from(peer, EdgeKind.GLOO, target, operation_timeout_s=0.5)
    peer.signal(signal.SIGSTOP)
    await receiver.post(piece_of(0, 2), 2 * LAYOUT.bytes_per_block)
    begin = time.monotonic()
    with pytest.raises(EdgeError, match="prefill worker did not take part in a transfer before its deadline"):
        await receiver.wait(piece_of(0, 2))
    assert 0.4 < time.monotonic() - begin < FAST_S
    await receiver.close()
    target.close()


async def test_in_place_a_stopped_decode_worker_does_not_matter(start_peer: StartPeer) -> None:
    """Nothing waits for it: the bytes are there when it goes on."""
    peer, source = await start_peer(), KVPool.private(LAYOUT)
    fill(source.tensor, 1)
    sender = await sender_to(peer, EdgeKind.SHM, source)
    peer.signal(signal.SIGSTOP)
    await sender.send(piece_of(0, 4), ids(range(4)), ids(range(4)))
    peer.signal(signal.SIGCONT)
    assert (await peer.ask("checksum", blocks=[0, 1, 2, 3]))["checksum"] == checksum(source.tensor[:4])
    await sender.close()
    source.close()


@BETWEEN
async def test_b090_the_endpoint_of_a_dead_worker_is_refused_at_once(
    start_peer: StartPeer, kind: EdgeKind
) -> None:
    peer, source = await start_peer(), make_source_pool(kind, LAYOUT)
    endpoint = (await peer.ask("decode", **setup_of(kind, edge_name())))["endpoint"]
    peer.signal(signal.SIGKILL)
    await process_exit(peer.pid)

    async def build() -> None:
        sender = make_sender(kind, source, name=edge_name(), peer=GEOMETRY, endpoint=endpoint, config=CONFIG)
        try:
            await sender.ready()
        finally:
            await sender.close()

    message = await fails_fast(build())
    assert "has exited" in message or "no connection" in message
    source.close()


async def test_another_process_under_the_announced_pid_is_refused(start_peer: StartPeer) -> None:
    owner, stranger, source = await start_peer(), await start_peer(), KVPool.private(LAYOUT)
    setup = setup_of(EdgeKind.SHM, edge_name())
    endpoint = (await owner.ask("decode", **setup))["endpoint"]
    other = (await stranger.ask("decode", **setup))["endpoint"]
    for wrong in (
        endpoint | {"pid": stranger.pid},
        endpoint | {"pid": stranger.pid, "fd": other["fd"]},
        endpoint | {"pid": os.getpid()},
        endpoint | {"nonce": other["nonce"]},
    ):
        with pytest.raises(EdgeError, match=r"is not|another KV pool|cannot be opened"):
            make_sender(EdgeKind.SHM, source, name=edge_name(), peer=GEOMETRY, endpoint=wrong)
    source.close()


async def test_b097_three_processes_one_dies_and_comes_back(start_peer: StartPeer) -> None:
    """D (here) with two prefill workers. One dies with a receive posted; the other pair goes on through 300
    pieces in mixed order; the dead one joins again with its next epoch, and nobody restarts."""
    target = make_pool(EdgeKind.GLOO, LAYOUT)
    victim, steady = await start_peer(), await start_peer()
    doomed = await receiver_from(victim, EdgeKind.GLOO, target, edge_name("prefill-0", 1))
    other = await receiver_from(steady, EdgeKind.GLOO, target, edge_name("prefill-1", 1))
    await doomed.post(piece_of(0, 4, "lost"), 4 * LAYOUT.bytes_per_block)
    waiting = asyncio.ensure_future(doomed.wait(piece_of(0, 4, "lost")))

    async def through(receiver: KVReceiver, peer: PeerProcess, index: int) -> None:
        """Three pieces posted at once, waited for in another order."""
        pieces = [piece_of(3 * index + part, 1 + (index + part) % 4, f"r{index % 7}") for part in range(3)]
        for piece in pieces:
            await receiver.post(piece, piece.num_blocks * LAYOUT.bytes_per_block)
            sources = [(index + block) % 48 for block in range(piece.num_blocks)]
            peer.tell("send", piece=fields(piece), sources=sources, targets=[])
        for piece in pieces[::-1] if index % 2 else pieces:
            staged = await receiver.wait(piece)
            if index % 5 == 4:
                receiver.discard(staged)
            else:
                await receiver.scatter(staged, ids(range(piece.num_blocks)))
        for piece in pieces:
            assert await peer.answer() == {"num_bytes": piece.num_blocks * LAYOUT.bytes_per_block}

    for index in range(100):
        if index == 30:
            victim.signal(signal.SIGKILL)
        await through(other, steady, index)
    with pytest.raises(EdgeError, match="prefill worker is gone"):
        await waiting
    await doomed.close()
    reborn = await start_peer()
    again = await receiver_from(reborn, EdgeKind.GLOO, target, edge_name("prefill-0", 2))
    await through(again, reborn, 0)
    await through(other, steady, 100)
    for end in (again, other):
        await end.close()
    target.close()


async def test_b140_a_killed_decode_worker_leaves_nothing_behind(start_peer: StartPeer) -> None:
    source = KVPool.private(LAYOUT)
    before = resources()
    for epoch in range(10):
        peer = await start_peer()
        sender = await sender_to(peer, EdgeKind.SHM, source, edge_name(epoch=epoch))
        await sender.send(piece_of(0, 2), ids([0, 1]), ids([0, 1]))
        peer.signal(signal.SIGKILL)
        async with asyncio.timeout(FAST_S):
            await process_exit(peer.pid)
        await sender.close()
        peer.end()
        await asyncio.sleep(0)
    assert await nothing_leaked(before)
    source.close()


async def test_process_exit_waits_for_the_process_and_for_that_one_only(start_peer: StartPeer) -> None:
    peer = await start_peer()
    started = process_start_time(peer.pid)
    assert started is not None
    before = resources()
    watching = asyncio.ensure_future(process_exit(peer.pid, started))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.shield(watching)
    peer.signal(signal.SIGSTOP)  # hung is not dead
    await asyncio.sleep(0.05)
    assert not watching.done()
    await asyncio.wait_for(process_exit(peer.pid, started + 1), FAST_S)  # the pid is another's by now
    peer.signal(signal.SIGKILL)
    await asyncio.wait_for(watching, FAST_S)
    await asyncio.wait_for(process_exit(peer.pid), FAST_S)  # already gone
    assert process_start_time(peer.pid) is None
    assert resources()["descriptors"] <= before["descriptors"]


async def test_cancelling_a_watch_leaves_nothing(start_peer: StartPeer) -> None:
    peer = await start_peer()
    before = resources()
    watching = asyncio.ensure_future(process_exit(peer.pid))
    await asyncio.sleep(0.01)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert await nothing_leaked(before)
