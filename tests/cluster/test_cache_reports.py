"""What workers tell of their prefix caches: on the wire, and against what a router makes of it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from cluster.cache_reports import CacheReports
from cluster.ids import BlockHash, BlockId, RouterId
from cluster.kv import prefix
from cluster.kv.block_manager import BlockManager
from cluster.wire.codec import FrameDecoder, encode
from cluster.wire.kv_events import KvEvents, KvResync, RouterSays, WorkerSays
from cluster.wire.messages import RenewLeases

R0, R1 = RouterId("router-0"), RouterId("router-1")


def publish(blocks: BlockManager, tokens: list[int]) -> None:
    """A sequence comes, is published, and goes."""
    found = blocks.match(tokens, "")
    more = blocks.allocate(-(-len(tokens) // blocks.block_size) - len(found))
    if more is None:
        blocks.release(found)
        return
    blocks.publish([*found, *more], tokens, "")
    blocks.release([*found, *more])


def test_messages_cross_the_wire_among_the_others() -> None:
    events = KvEvents(sequence=3, begins=False, stored=[BlockHash(b"0" * 16)], removed=[BlockHash(b"1" * 16)])
    assert list(FrameDecoder(WorkerSays).feed(encode(events))) == [events]
    says = [KvResync(), RenewLeases(leases=[])]
    decoder: FrameDecoder[RouterSays] = FrameDecoder(RouterSays)
    assert [one for message in says for one in decoder.feed(encode(message))] == says


def test_a_router_that_joins_is_told_all_then_only_changes() -> None:
    blocks = BlockManager(10, 4, "test")
    reports = CacheReports(blocks)
    publish(blocks, list(range(8)))
    reports.joined(R0)
    ((_, first),) = reports.due(0.0, force=True)
    assert (first.sequence, first.begins, len(first.stored), first.removed) == (0, True, 2, [])
    assert reports.due(1.0) == []
    publish(blocks, list(range(12)))
    reports.joined(R1)
    told = dict(reports.due(2.0))
    assert (told[R0].sequence, told[R0].begins, len(told[R0].stored)) == (1, False, 1)
    assert (told[R1].sequence, told[R1].begins, len(told[R1].stored)) == (0, True, 3)
    reports.lost(R1)
    reports.resync(R1)
    reports.resync(R0)
    ((router, again),) = reports.due(3.0)
    assert (router, again.sequence, again.begins, len(again.stored)) == (R0, 2, True, 3)


def test_reports_are_not_sent_with_every_event() -> None:
    blocks = BlockManager(10, 4, "test")
    reports = CacheReports(blocks, interval_s=0.1)
    reports.joined(R0)
    assert len(reports.due(10.0)) == 1
    publish(blocks, list(range(8)))
    assert reports.due(10.05) == []
    assert len(reports.due(10.2)) == 1
    publish(blocks, list(range(12)))
    assert len(reports.due(10.21, force=True)) == 1


def test_too_many_changes_are_told_as_all_there_is() -> None:
    blocks = BlockManager(4, 1, "test")
    reports = CacheReports(blocks)
    reports.joined(R0)
    reports.due(0.0, force=True)
    for start in range(0, prefix.MAX_CHANGES + 8, 4):
        publish(blocks, list(range(start, start + 4)))
    ((_, report),) = reports.due(1.0)
    assert (report.sequence, report.begins) == (1, True)
    assert set(report.stored) == set(blocks.cached_hashes())
    publish(blocks, [1, 2])
    ((_, report),) = reports.due(2.0)
    assert not report.begins


def test_a_large_cache_is_told_in_parts() -> None:
    blocks = BlockManager(150_000, 1, "test")
    block_ids = blocks.allocate(140_000)
    assert block_ids is not None
    blocks.publish(block_ids, list(range(140_000)), "")
    reports = CacheReports(blocks)
    reports.joined(R0)
    parts = [report for _, report in reports.due(0.0, force=True)]
    assert [part.begins for part in parts] == [True, False, False]
    assert [part.sequence for part in parts] == [0, 1, 2]
    assert [one for part in parts for one in part.stored] == blocks.cached_hashes()


@given(seed=st.integers(0, 2**32))
def test_who_follows_the_reports_has_the_cache(seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(12, 2, "test")
    reports = CacheReports(blocks)
    reports.joined(R0)
    mirror: set[BlockHash] = set()
    for now in range(60):
        move = rng.randrange(8)
        if move == 0:
            blocks.reset_cache()
        elif move == 1:
            held = blocks.allocate(rng.randrange(1, 9))
            if held is not None:
                blocks.release(held)
        elif move == 2:
            reports.resync(R0)
        else:
            publish(blocks, [rng.randrange(2) for _ in range(rng.randrange(1, 13))])
        if rng.random() < 0.5:
            for _, report in reports.due(float(now), force=True):
                if report.begins:
                    mirror.clear()
                mirror -= set(report.removed)
                mirror |= set(report.stored)
            assert mirror == set(blocks.cached_hashes())


def test_a_block_that_is_written_again_has_left() -> None:
    blocks = BlockManager(4, 2, "test")
    block_ids = blocks.allocate(2)
    assert block_ids is not None
    blocks.publish(block_ids, [1, 2, 3, 4], "")
    changes = blocks.take_cache_changes()
    assert changes is not None
    assert len(changes.stored) == 2
    assert blocks.make_writable(BlockId(block_ids[0])) == (block_ids[0], None)
    gone = blocks.take_cache_changes()
    assert gone is not None
    assert (gone.stored, set(gone.removed)) == ([], set(changes.stored))
