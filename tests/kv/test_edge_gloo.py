"""What only the staged edge has: slots, late pieces, a dial that may not come, a connection that breaks."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from typing import Any

import pytest
import torch

from cluster.errors import EdgeError
from cluster.ids import BlockId
from cluster.kv.edge import Piece
from cluster.kv.edge_backends import Gloo
from cluster.kv.edge_device import CopyQueue
from cluster.kv.edge_group import GroupReceiver
from cluster.kv.edge_group_link import GroupLink
from cluster.kv.edge_group_parts import TRAILER_BYTES, PartPosted, PartSent, piece_tags, trailer_of
from cluster.kv.edges import EdgeKind, make_pool, make_receiver, make_sender
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from tests.kv.edge_harness import (
    BLOCK_BYTES,
    CONFIG,
    GEOMETRY,
    EdgePair,
    EdgePairs,
    edge_name,
    nothing_leaked,
    resources,
)

LAYOUT = KVLayout.from_geometry(GEOMETRY)
GLOO = EdgeKind.GLOO
FAST_S = 2.0


def ids(blocks: Any) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


async def test_a_late_piece_lands_in_staging_and_is_discarded(edge_pairs: EdgePairs) -> None:
    """The attempt was over when its bytes came: the blocks, another attempt's by now, stay as they are."""
    pair = await edge_pairs(GLOO)
    pair.target.tensor.fill_(3)
    before = pair.target.tensor.clone()
    for _ in range(10):  # more often than there are slots: they come back
        piece = pair.piece(12)
        await pair.receiver.post(piece, pair.piece_bytes(piece))
        await pair.sender.send(piece, ids(range(12)), [])
        pair.receiver.discard(await pair.receiver.wait(piece))
    assert torch.equal(pair.target.tensor, before)
    await pair.transfer([1], [2])
    assert torch.equal(pair.bits(pair.target, [2]), pair.bits(pair.source, [1]))


async def test_a_staged_piece_is_used_once(edge_pairs: EdgePairs) -> None:
    pair = await edge_pairs(GLOO)
    piece = pair.piece(1)
    await pair.receiver.post(piece, BLOCK_BYTES)
    with pytest.raises(EdgeError, match="posted already"):
        await pair.receiver.post(piece, BLOCK_BYTES)
    await pair.sender.send(piece, ids([1]), [])
    staged = await pair.receiver.wait(piece)
    with pytest.raises(EdgeError, match="not posted"):
        await pair.receiver.wait(piece)
    with pytest.raises(EdgeError, match="cannot go to 2"):
        await pair.receiver.scatter(staged, ids([1, 2]))
    await pair.receiver.scatter(staged, ids([1]))
    with pytest.raises(EdgeError, match="not in staging"):
        await pair.receiver.scatter(staged, ids([1]))
    with pytest.raises(EdgeError, match="not in staging"):
        pair.receiver.discard(staged)


async def test_a_piece_larger_than_the_staging_is_refused_on_both_sides(edge_pairs: EdgePairs) -> None:
    pair = await edge_pairs(GLOO)  # 3 slots of 4 blocks
    piece = pair.piece(13)
    with pytest.raises(EdgeError, match="13 blocks does not fit the staging of 12"):
        await pair.receiver.post(piece, pair.piece_bytes(piece))
    with pytest.raises(EdgeError, match="13 blocks does not fit the staging of 12"):
        await pair.sender.send(piece, ids(range(13)), [])
    await pair.transfer(range(12), range(12))  # the edge is still good
    assert torch.equal(pair.bits(pair.target, range(12)), pair.bits(pair.source, range(12)))


async def test_a_slot_holds_at_least_one_block(edge_pairs: EdgePairs) -> None:
    pair = await edge_pairs(GLOO, GEOMETRY, dataclasses.replace(CONFIG, slot_bytes=1, num_slots=2))
    await pair.transfer([1, 2], [3, 4])
    assert torch.equal(pair.bits(pair.target, [3, 4]), pair.bits(pair.source, [1, 2]))


async def test_a_post_waits_for_a_slot_and_takes_it_when_it_is_free(edge_pairs: EdgePairs) -> None:
    pair = await edge_pairs(GLOO)
    first, second, third = pair.piece(8), pair.piece(12), pair.piece(1)
    await pair.receiver.post(first, pair.piece_bytes(first))
    posting = asyncio.ensure_future(pair.receiver.post(second, pair.piece_bytes(second)))
    after = asyncio.ensure_future(pair.receiver.post(third, pair.piece_bytes(third)))
    await pair.sender.send(first, ids(range(8)), [])
    staged = await pair.receiver.wait(first)
    assert not posting.done()
    assert not after.done()  # not before its turn, though a slot is free
    await pair.receiver.scatter(staged, ids(range(8)))
    await posting
    await pair.sender.send(second, ids(range(12)), [])
    pair.receiver.discard(await pair.receiver.wait(second))
    await after
    await pair.sender.send(third, ids([5]), [])
    await pair.receiver.scatter(await pair.receiver.wait(third), ids([40]))
    assert torch.equal(pair.bits(pair.target, [40]), pair.bits(pair.source, [5]))


async def test_no_slot_within_the_deadline_is_an_error(edge_pairs: EdgePairs) -> None:
    pair = await edge_pairs(GLOO)
    piece = pair.piece(12)
    await pair.receiver.post(piece, pair.piece_bytes(piece))
    sending = asyncio.ensure_future(pair.sender.send(piece, ids(range(12)), []))
    await pair.receiver.wait(piece)  # staged, and left there
    await sending
    assert isinstance(pair.receiver, GroupReceiver)
    pair.receiver._config = dataclasses.replace(CONFIG, operation_timeout_s=0.2)
    with pytest.raises(EdgeError, match=r"no staging slot became free within 0.2 s"):
        await pair.receiver.post(pair.piece(1), BLOCK_BYTES)


async def test_a_piece_that_never_comes_makes_the_deadline_pass(edge_pairs: EdgePairs) -> None:
    pair = await edge_pairs(GLOO, GEOMETRY, dataclasses.replace(CONFIG, operation_timeout_s=0.2))
    piece = pair.piece(1)
    await pair.receiver.post(piece, BLOCK_BYTES)
    with pytest.raises(EdgeError, match="before its deadline"):
        await pair.receiver.wait(piece)
    with pytest.raises(EdgeError, match="decode worker"):  # the other side knows too
        await pair.sender.send(piece, ids([1]), [])
    with pytest.raises(EdgeError, match="before its deadline"):  # and the first reason stays
        await pair.receiver.post(pair.piece(1), BLOCK_BYTES)


@pytest.mark.parametrize("closing", ["sender", "receiver"])
async def test_closing_fails_what_waits_on_both_sides_at_once(edge_pairs: EdgePairs, closing: str) -> None:
    pair = await edge_pairs(GLOO)
    pieces = [pair.piece(4) for _ in range(4)]
    for piece in pieces[:3]:
        await pair.receiver.post(piece, pair.piece_bytes(piece))
    waiting = [asyncio.ensure_future(pair.receiver.wait(piece)) for piece in pieces[:3]]
    waiting.append(asyncio.ensure_future(pair.receiver.post(pieces[3], pair.piece_bytes(pieces[3]))))
    unposted = pair.piece(2)
    waiting.append(asyncio.ensure_future(pair.sender.send(unposted, ids([1, 2]), [])))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert not any(future.done() for future in waiting)
    begin = time.monotonic()
    await getattr(pair, closing).close()
    assert time.monotonic() - begin < FAST_S
    waiting_on_slot = waiting.pop(3)
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), FAST_S)
    assert all(isinstance(outcome, EdgeError) for outcome in outcomes)
    if closing == "receiver":
        with pytest.raises(EdgeError, match="closed"):
            await asyncio.wait_for(waiting_on_slot, FAST_S)
    else:  # its slot may yet be freed; closing D's end too ends it
        await pair.receiver.close()
        with pytest.raises(EdgeError, match="closed"):
            await asyncio.wait_for(waiting_on_slot, FAST_S)
    assert not pair.target.tensor.any()


async def test_closing_while_transfers_run_leaves_nothing() -> None:
    async def life(epoch: int) -> None:
        pair = EdgePair(GLOO, GEOMETRY, CONFIG, edge_name(epoch=epoch))
        await pair.ready()

        async def work() -> None:
            while True:
                await pair.transfer(range(12), range(12))

        working = asyncio.ensure_future(work())
        await asyncio.sleep(0.01 * epoch)
        await pair.close()
        with pytest.raises(EdgeError):
            await asyncio.wait_for(working, FAST_S)

    await life(1)
    before = resources()
    for epoch in range(2, 6):
        await life(epoch)
    assert await nothing_leaked(before)


async def test_a_dial_that_never_comes_makes_the_deadline_pass() -> None:
    pool = make_pool(GLOO, LAYOUT)
    config = dataclasses.replace(CONFIG, connect_timeout_s=0.3)
    receiver = make_receiver(GLOO, pool, name=edge_name(), peer=GEOMETRY, config=config)
    with pytest.raises(EdgeError, match="no connection to the prefill worker"):
        await receiver.ready()
    with pytest.raises(EdgeError, match="no connection to the prefill worker"):
        await receiver.post(Piece(*_key(), 0, 1), BLOCK_BYTES)
    await receiver.close()
    pool.close()


async def test_closing_before_anyone_dialled_does_not_wait() -> None:
    pool = make_pool(GLOO, LAYOUT)
    before = resources()
    receiver = make_receiver(GLOO, pool, name=edge_name(), peer=GEOMETRY, config=CONFIG)
    connecting = asyncio.ensure_future(receiver.ready())
    await asyncio.sleep(0.05)
    begin = time.monotonic()
    await receiver.close()
    assert time.monotonic() - begin < FAST_S
    with pytest.raises(EdgeError, match="closed"):
        await connecting
    del connecting
    assert await nothing_leaked(before)
    pool.close()


async def test_a_dial_to_nobody_fails_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    pool = KVPool.private(LAYOUT)
    endpoint: dict[str, str | int] = {
        "host": "127.0.0.1",
        "port": port,
        "nonce": "",
        "num_slots": 1,
        "blocks_per_slot": 1,
        "block_bytes": BLOCK_BYTES,
    }
    sender = make_sender(GLOO, pool, name=edge_name(), peer=GEOMETRY, endpoint=endpoint, config=CONFIG)
    begin = time.monotonic()
    with pytest.raises(EdgeError, match="no connection to the decode worker"):
        await sender.ready()
    assert time.monotonic() - begin < FAST_S
    await sender.close()
    pool.close()


async def test_another_nonce_never_matches() -> None:
    """A stranger on the port of a dead worker: both wait for their own peer, and their deadlines pass."""
    pool, config = make_pool(GLOO, LAYOUT), dataclasses.replace(CONFIG, connect_timeout_s=0.5)
    receiver = make_receiver(GLOO, pool, name=edge_name(), peer=GEOMETRY, config=config)
    endpoint = receiver.endpoint() | {"nonce": "00" * 16}
    sender = make_sender(GLOO, pool, name=edge_name(), peer=GEOMETRY, endpoint=endpoint, config=config)
    outcomes = await asyncio.gather(receiver.ready(), sender.ready(), return_exceptions=True)
    assert all(isinstance(outcome, EdgeError) for outcome in outcomes)
    await asyncio.gather(receiver.close(), sender.close())
    pool.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": "x"}, "needs `host`"),
        ({"num_slots": "x"}, "needs `num_slots`"),
        ({"blocks_per_slot": 0}, "needs `num_slots`"),
        ({"block_bytes": 7}, "7 on the decode worker"),
    ],
)
async def test_endpoints_that_cannot_be_are_refused(changes: dict[str, str | int], message: str) -> None:
    pool = make_pool(GLOO, LAYOUT)
    receiver = make_receiver(GLOO, pool, name=edge_name(), peer=GEOMETRY, config=CONFIG)
    before = resources()
    with pytest.raises(EdgeError, match=message):
        make_sender(GLOO, pool, name=edge_name(), peer=GEOMETRY, endpoint=receiver.endpoint() | changes)
    assert await nothing_leaked(before)
    await receiver.close()
    pool.close()


def test_a_host_that_is_not_ours_cannot_be_listened_on() -> None:
    with pytest.raises(EdgeError, match=r"cannot listen on 192\.0\.2\.1"):
        GroupLink.listen(edge_name(), "192.0.2.1", 1.0, Gloo())


async def test_the_store_listens_on_the_given_host_alone() -> None:
    link, endpoint = GroupLink.listen(edge_name(), "127.0.0.1", 1.0, Gloo())
    port = endpoint["port"]
    assert isinstance(port, int)
    with socket.create_connection(("127.0.0.1", port), timeout=20):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=20)
    link.close()


async def test_a_part_of_another_piece_is_refused_even_under_the_same_tag() -> None:
    """Tags are 31 bits of a digest; the trailer names the piece, so a collision is an error, not wrong KV."""
    decode, endpoint = GroupLink.listen(edge_name(), "127.0.0.1", 5.0, Gloo())
    prefill = GroupLink.dial(edge_name(), endpoint, 5.0, Gloo())
    warm = [torch.zeros(1, dtype=torch.uint8) for _ in range(2)]
    await asyncio.gather(
        asyncio.to_thread(decode.connect, warm[0]), asyncio.to_thread(prefill.connect, warm[1])
    )
    wanted, other = Piece(*_key(), 0, 2), Piece(*_key("other"), 0, 2)
    data, part, tags = torch.zeros(8, dtype=torch.uint8), range(2), piece_tags(wanted)
    rooms = torch.empty(2, TRAILER_BYTES, dtype=torch.uint8)
    posted = PartPosted(decode, data, rooms[0], trailer_of(wanted, part), tags, CopyQueue(data.device))
    sent = PartSent(prefill, torch.ones(8, dtype=torch.uint8), rooms[1], trailer_of(other, part), tags)
    with pytest.raises(EdgeError, match="part of another piece"):
        await asyncio.to_thread(posted.finish, decode, time.monotonic() + 20)
    decode.break_off("closed")
    with pytest.raises(EdgeError, match="decode worker is gone"):
        await asyncio.to_thread(sent.finish, prefill, time.monotonic() + 20)
    for link in (decode, prefill):
        link.break_off("closed")
    del posted, sent
    decode.close()
    prefill.close()


def test_tags_and_trailers_tell_pieces_apart() -> None:
    pieces = [
        Piece(*_key(f"r{r}", a, i), f, 4) for r in range(5) for a in (1, 2) for i in (0, 1) for f in (0, 4)
    ]
    tags = [tag for piece in pieces for tag in piece_tags(piece)]
    assert len(set(tags)) == len(tags)
    assert all(0 < tag < 2**31 for tag in tags)
    trailers = [bytes(trailer_of(p, part).tolist()) for p in pieces for part in (range(2), range(2, 4))]
    assert len(set(trailers)) == len(trailers)


def _key(request: str = "r", attempt: int = 1, index: int = 0) -> tuple[Any, Any, Any]:
    return request, attempt, index
