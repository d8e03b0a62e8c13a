"""A worker holds only so many costly edges, and gets a place back whenever one is closed."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import EdgeError
from cluster.ids import Epoch
from cluster.kv.edge_limit import EdgeLimit
from cluster.kv.edges import EdgeKind, make_pool, make_receiver, make_sender
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from tests.kv.edge_harness import CONFIG, GEOMETRY, edge_name
from tests.kv.stand_ins import use_one_way

LAYOUT = KVLayout.from_geometry(GEOMETRY)


@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40))
def test_never_more_than_the_limit_and_every_place_comes_back(
    max_edges: int, steps: list[tuple[bool, int]]
) -> None:
    limit, opened = EdgeLimit(max_edges), set()
    for opens, epoch in steps:
        name = edge_name(epoch=epoch)
        if not opens:
            limit.close(name)
            opened.discard(name)
        elif name in opened or len(opened) == max_edges:
            with pytest.raises(EdgeError, match="open already" if name in opened else "as many as it may"):
                limit.open(name)
        else:
            limit.open(name)
            opened.add(name)
        assert limit.num_open == len(opened)


def test_a_restarted_worker_is_another_edge() -> None:
    limit, name = EdgeLimit(2), edge_name()
    limit.open(name)
    limit.open(dataclasses.replace(name, prefill_epoch=Epoch(2)))
    assert limit.num_open == 2


async def test_edges_count_from_when_they_are_made_until_they_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for `nccl`, over gloo and in host memory: the kind only says which backend, and that it counts."""
    use_one_way(monkeypatch.setattr)
    limit, source, target = EdgeLimit(2), KVPool.private(LAYOUT), make_pool(EdgeKind.GLOO, LAYOUT)
    receiver = make_receiver(
        EdgeKind.NCCL, target, name=edge_name(), peer=GEOMETRY, config=CONFIG, limit=limit
    )
    with pytest.raises(EdgeError, match="needs `num_slots`"):
        make_sender(EdgeKind.NCCL, source, name=edge_name("other"), peer=GEOMETRY, endpoint={}, limit=limit)
    assert limit.num_open == 1  # what could not be made counts no more
    sender = make_sender(
        EdgeKind.NCCL,
        source,
        name=edge_name("prefill-1"),
        peer=GEOMETRY,
        endpoint=receiver.endpoint(),
        config=dataclasses.replace(CONFIG, connect_timeout_s=0.5),  # nobody waits for this one
        limit=limit,
    )
    with pytest.raises(EdgeError, match="this worker holds 2 edges"):
        make_receiver(EdgeKind.NCCL, target, name=edge_name("prefill-2"), peer=GEOMETRY, limit=limit)
    await sender.close()
    await receiver.close()
    await receiver.close()
    assert limit.num_open == 0
    source.close()
    target.close()
