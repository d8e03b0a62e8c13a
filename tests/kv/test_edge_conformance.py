"""What every edge promises, whatever its kind, within one process. Two processes: test_edge_processes."""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from typing import Any

import msgspec
import pytest
import torch

from cluster.errors import ConfigError, EdgeError
from cluster.ids import Attempt, BlockId, PieceIndex, RequestId
from cluster.kv.edge import EdgeConfig, Piece
from cluster.kv.edge_local import InPlaceSender
from cluster.kv.edges import EdgeKind, edge_kind, make_pool, make_receiver, make_sender
from cluster.kv.layout import KVLayout, intersect, split
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
from tests.kv.edge_peer import fill


def shuffled(num_blocks: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(GEOMETRY.num_blocks), num_blocks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("num_blocks", [1, 2, 4, 5, 11])  # slots hold 4 (fp32: 2): part of one, one, several
async def test_bytes_arrive_exactly_and_nothing_else_changes(
    edge_pairs: EdgePairs, kind: EdgeKind, num_blocks: int, dtype: str
) -> None:
    geometry = msgspec.structs.replace(GEOMETRY, dtype=dtype)
    pair = await edge_pairs(kind, geometry, EdgeConfig(slot_bytes=4 * BLOCK_BYTES, num_slots=6))
    sources, targets = shuffled(num_blocks, 1), shuffled(num_blocks, 2)
    before = pair.source.tensor.clone()
    assert await pair.transfer(sources, targets) == num_blocks * pair.layout.bytes_per_block
    assert torch.equal(pair.bits(pair.target, targets), pair.bits(pair.source, sources))
    others = [block for block in range(GEOMETRY.num_blocks) if block not in targets]
    assert not pair.bits(pair.target, others).any()
    assert torch.equal(pair.source.tensor.view(torch.int16), before.view(torch.int16))


async def test_runs_of_neighbouring_blocks_arrive_exactly(edge_pairs: EdgePairs, kind: EdgeKind) -> None:
    pair = await edge_pairs(kind)
    sources, targets = [5, 6, 7, 8, 9, 20, 21, 3, 2, 1], [10, 11, 12, 30, 31, 32, 33, 7, 8, 9]
    await pair.transfer(sources, targets)
    assert torch.equal(pair.bits(pair.target, targets), pair.bits(pair.source, sources))


async def test_many_more_pieces_than_staging(edge_pairs: EdgePairs, kind: EdgeKind) -> None:
    pair = await edge_pairs(kind)
    for step in range(40):
        sources, targets = shuffled(1 + step % 12, step), shuffled(1 + step % 12, step + 1000)
        await pair.transfer(sources, targets)
        assert torch.equal(pair.bits(pair.target, targets), pair.bits(pair.source, sources))


async def test_pieces_of_concurrent_attempts_do_not_mix(edge_pairs: EdgePairs, kind: EdgeKind) -> None:
    """Eight attempts at once through three slots, each with blocks of its own on D."""
    pair = await edge_pairs(kind)
    turn = asyncio.Lock()

    async def attempt(number: int) -> None:
        targets = [BlockId(number * 6 + block) for block in range(6)]
        sources = [BlockId(block) for block in shuffled(6, number)]
        for index in range(3):
            part = slice(index * 2, index * 2 + 2)
            piece = Piece(RequestId(f"r{number}"), Attempt(number), PieceIndex(index), index * 2, 2)
            if pair.sender.in_place:
                await pair.sender.send(piece, sources[part], targets[part])
                continue
            async with turn:  # as on the stream: P sends in the order in which D was ready
                await pair.receiver.post(piece, pair.piece_bytes(piece))
                sending = asyncio.ensure_future(pair.sender.send(piece, sources[part], ()))
            staged = await pair.receiver.wait(piece)
            await asyncio.sleep(0)  # others run in between
            await pair.receiver.scatter(staged, targets[part])
            await sending
        assert torch.equal(pair.bits(pair.target, targets), pair.bits(pair.source, sources))

    await asyncio.gather(*(attempt(number) for number in range(8)))


async def test_sends_complete_in_the_order_of_their_calls(edge_pairs: EdgePairs, kind: EdgeKind) -> None:
    pair = await edge_pairs(kind)
    pieces = [pair.piece(1 + index % 4) for index in range(3)]
    if not pair.sender.in_place:
        for piece in pieces:
            await pair.receiver.post(piece, pair.piece_bytes(piece))
    completed: list[Piece] = []

    async def send(piece: Piece) -> None:
        blocks = [BlockId(block) for block in range(piece.num_blocks)]
        await pair.sender.send(piece, blocks, blocks)
        completed.append(piece)

    await asyncio.gather(*(send(piece) for piece in pieces))
    assert completed == pieces


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 16}, "block_size"),
        ({"head_dim": 64}, "head_dim"),
        ({"dtype": "float32"}, "dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"num_layers": 4}, "layers"),
        ({"num_heads": 4}, "heads"),
    ],
)
async def test_b080_other_layouts_are_refused_on_both_sides(
    kind: EdgeKind, changes: dict[str, Any], message: str
) -> None:
    layout = KVLayout.from_geometry(GEOMETRY)
    other = msgspec.structs.replace(GEOMETRY, **changes)
    source, target = KVPool.private(layout), make_pool(kind, layout)
    with pytest.raises(EdgeError, match=message):
        make_receiver(kind, target, name=edge_name(), peer=other)
    with pytest.raises(EdgeError, match=message):
        make_sender(kind, source, name=edge_name(), peer=other, endpoint={}, target=target)
    source.close()
    target.close()


async def test_pools_may_differ_in_size(edge_pairs: EdgePairs, kind: EdgeKind) -> None:
    small = msgspec.structs.replace(GEOMETRY, num_blocks=3)
    source = KVPool.private(KVLayout.from_geometry(GEOMETRY))
    target = make_pool(kind, KVLayout.from_geometry(small))
    fill(source.tensor, 3)
    receiver = make_receiver(kind, target, name=edge_name(), peer=GEOMETRY, config=CONFIG)
    sender = make_sender(
        kind,
        source,
        name=edge_name(),
        peer=small,
        endpoint=receiver.endpoint(),
        config=CONFIG,
        target=target,
    )
    await asyncio.gather(sender.ready(), receiver.ready())
    piece = Piece(RequestId("r"), Attempt(1), PieceIndex(0), 0, 1)
    if not sender.in_place:
        await receiver.post(piece, BLOCK_BYTES)
    await sender.send(piece, [BlockId(47)], [BlockId(2)])
    if not sender.in_place:
        await receiver.scatter(await receiver.wait(piece), [BlockId(2)])
    assert torch.equal(target.tensor[2].view(torch.int16), source.tensor[47].view(torch.int16))
    for end in (sender, receiver):
        await end.close()
    source.close()
    target.close()


@pytest.mark.parametrize("bad", [-1, GEOMETRY.num_blocks])
async def test_blocks_outside_the_pool_are_refused_and_nothing_is_written(
    edge_pairs: EdgePairs, kind: EdgeKind, bad: int
) -> None:
    pair = await edge_pairs(kind)
    with pytest.raises(EdgeError, match="no such KV block"):
        await pair.transfer([0, 1], [2, bad])
    assert not pair.target.tensor.any()


async def test_wrong_numbers_of_blocks_are_refused(edge_pairs: EdgePairs, kind: EdgeKind) -> None:
    pair = await edge_pairs(kind)
    piece = pair.piece(2)
    with pytest.raises(EdgeError, match="2 blocks"):
        await pair.sender.send(piece, [BlockId(1)], [BlockId(1)])
    if not pair.sender.in_place:
        with pytest.raises(EdgeError, match=f"{2 * BLOCK_BYTES} bytes, 7 were offered"):
            await pair.receiver.post(piece, 7)
    await pair.transfer([1, 2], [3, 4])  # the edge is still good
    assert torch.equal(pair.bits(pair.target, [3, 4]), pair.bits(pair.source, [1, 2]))


async def test_after_close_nothing_is_sent_and_closing_again_is_fine(kind: EdgeKind) -> None:
    pair = EdgePair(kind, GEOMETRY, CONFIG, edge_name())
    await pair.ready()
    await pair.transfer([1], [1])
    await pair.close()
    await pair.sender.close()
    await pair.receiver.close()
    with pytest.raises(EdgeError, match="closed"):
        await pair.sender.send(pair.piece(1), [BlockId(1)], [BlockId(1)])


@pytest.mark.parametrize("kind", [EdgeKind.LOCAL, EdgeKind.SHM], ids=lambda kind: kind.value)
async def test_closing_stops_a_copy_under_way(kind: EdgeKind) -> None:
    """A late writer in place: after close() returned, not one byte changes. Staged: test_edge_gloo."""
    big = msgspec.structs.replace(GEOMETRY, num_layers=16, num_heads=8, head_dim=128, num_blocks=128)
    pair = EdgePair(kind, big, CONFIG, edge_name())
    piece = Piece(RequestId("r"), Attempt(1), PieceIndex(0), 0, 128)
    blocks = [BlockId(block) for block in range(128)]
    # So many that they are not over if this thread is held up; closing drops those that wait.
    sends = [asyncio.ensure_future(pair.sender.send(piece, blocks, blocks[::-1])) for _ in range(200)]
    await asyncio.sleep(0.01)
    await pair.sender.close()
    pair.target.tensor.zero_()
    outcomes = await asyncio.gather(*sends, return_exceptions=True)
    assert any(isinstance(outcome, EdgeError) for outcome in outcomes)
    assert not pair.target.tensor.any()
    await pair.close()


async def test_b140_closing_leaves_no_descriptor_thread_mapping_or_segment(kind: EdgeKind) -> None:
    async def life(epoch: int) -> None:
        pair = EdgePair(kind, GEOMETRY, CONFIG, edge_name(epoch=epoch))
        await pair.ready()
        await pair.transfer([1, 2, 3], [4, 5, 6])
        await pair.close()

    await life(1)  # what is made once per process is made
    before = resources()
    for epoch in range(2, 6):
        await life(epoch)
    assert await nothing_leaked(before)


async def test_an_edge_is_rebuilt_with_the_next_epoch_beside_others(
    edge_pairs: EdgePairs, kind: EdgeKind
) -> None:
    other = await edge_pairs(kind, name=edge_name("prefill-1"))
    for epoch in (1, 2, 3):
        pair = await edge_pairs(kind, name=edge_name(epoch=epoch))
        await pair.transfer([epoch], [epoch])
        await other.transfer([epoch], [epoch])
        await pair.close()
        assert torch.equal(other.bits(other.target, [epoch]), other.bits(other.source, [epoch]))


async def test_the_event_loop_runs_on_during_a_transfer(edge_pairs: EdgePairs, kind: EdgeKind) -> None:
    """The bytes move in the edge's threads: between the parts of a transfer the loop gets its turns."""
    big = msgspec.structs.replace(GEOMETRY, num_layers=16, num_heads=8, head_dim=128, num_blocks=32)
    pair = await edge_pairs(kind, big, EdgeConfig(num_slots=8))
    turns, done = 0, False

    async def count() -> None:
        nonlocal turns
        while not done:
            await asyncio.sleep(0)
            turns += 1

    counting, most = asyncio.ensure_future(count()), 0
    for _ in range(50):  # on a busy machine the threads may be done before the loop has its turn again
        before = turns
        await pair.transfer(range(32), range(32))
        most = max(most, turns - before)
        if most > 10:
            break
    done = True
    await counting
    assert most > 10


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("prefill_group", "decode_group"),
    [((1, 1), (1, 2)), ((2, 2), (1, 1)), ((1, 4), (3, 2)), ((3, 1), (1, 4))],
)
async def test_b080_groups_of_different_parallelism_exchange_their_parts(
    kind: EdgeKind, prefill_group: tuple[int, int], decode_group: tuple[int, int], dtype: str
) -> None:
    """Every rank's pool holds its part of one model's KV; afterwards every D rank has exactly its own."""
    model = msgspec.structs.replace(GEOMETRY, dtype=dtype)
    whole = KVPool.private(KVLayout.from_geometry(model))
    fill(whole.tensor, 7)

    def part(geometry: Any) -> torch.Tensor:
        layers = slice(geometry.first_layer, geometry.first_layer + geometry.num_layers)
        heads = slice(geometry.first_head, geometry.first_head + geometry.num_heads)
        return whole.tensor[:, layers, :, :, heads, :]

    prefill, decode = split(model, *prefill_group), split(model, *decode_group)
    sources = [KVPool.private(KVLayout.from_geometry(geometry)) for geometry in prefill]
    targets = [make_pool(kind, KVLayout.from_geometry(geometry)) for geometry in decode]
    for pool, geometry in zip(sources, prefill, strict=True):
        pool.tensor.copy_(part(geometry))
    from_blocks, to_blocks = [BlockId(b) for b in (3, 4, 9, 1, 0)], [BlockId(b) for b in (7, 2, 3, 4, 30)]
    for number, edge in enumerate(intersect(prefill, decode)):
        source, target = sources[edge.prefill_rank], targets[edge.decode_rank]
        name = edge_name(f"prefill-0-{number}")
        receiver = make_receiver(
            kind, target, name=name, peer=prefill[edge.prefill_rank], edge=edge, config=CONFIG
        )
        sender = make_sender(
            kind,
            source,
            name=name,
            peer=decode[edge.decode_rank],
            endpoint=receiver.endpoint(),
            edge=edge,
            config=CONFIG,
            target=target,
        )
        await asyncio.gather(sender.ready(), receiver.ready())
        piece = Piece(RequestId("r"), Attempt(1), PieceIndex(0), 0, 5)
        row_bytes = {"bfloat16": 2 * model.head_dim, "int8": model.head_dim + 4}[dtype]
        item_bytes = 5 * len(edge.layers) * 2 * model.block_size * len(edge.heads) * row_bytes
        if not sender.in_place:
            await receiver.post(piece, item_bytes)
        assert await sender.send(piece, from_blocks, to_blocks) == item_bytes
        if not sender.in_place:
            await receiver.scatter(await receiver.wait(piece), to_blocks)
        await sender.close()
        await receiver.close()
    for target, geometry in zip(targets, decode, strict=True):
        expected = part(geometry)[from_blocks].contiguous().view(torch.int16)
        assert torch.equal(target.tensor[to_blocks].view(torch.int16), expected)
    for pool in (whole, *sources, *targets):
        pool.close()


async def test_the_engine_may_use_the_pool_from_another_thread(edge_pairs: EdgePairs, kind: EdgeKind) -> None:
    pair = await edge_pairs(kind)
    stop = threading.Event()

    def engine() -> None:
        while not stop.is_set():
            pair.target.tensor[40:].add_(1)

    thread = threading.Thread(target=engine)
    thread.start()
    for step in range(10):
        await pair.transfer([step, step + 1], [step, step + 1])
    stop.set()
    thread.join()
    assert torch.equal(pair.bits(pair.target, range(11)), pair.bits(pair.source, range(11)))


def test_unknown_kinds_are_refused_with_those_there_are() -> None:
    assert edge_kind("gloo") is EdgeKind.GLOO
    with pytest.raises(ConfigError, match="local, shm, gloo, cuda_ipc, nccl"):
        edge_kind("rdma")


@pytest.mark.parametrize("kind", [EdgeKind.LOCAL, EdgeKind.SHM], ids=lambda kind: kind.value)
async def test_the_edges_thread_lets_go_of_memory_it_wrote_to(kind: EdgeKind) -> None:
    """Unmapping memory of a GPU waits for a stream: never in the event loop's thread."""
    pair = EdgePair(kind, GEOMETRY, CONFIG, edge_name())
    await pair.transfer([1], [1])
    assert isinstance(pair.sender, InPlaceSender)
    assert pair.sender._regions is not None
    let_go: list[str] = []
    weakref.finalize(pair.sender._regions[1], lambda: let_go.append(threading.current_thread().name))
    await pair.close()
    assert let_go == [f"kv-edge {edge_name()}"]
