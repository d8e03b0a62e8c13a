"""Where two GPUs do not reach one another, the next kind; a lost peer is no reason for that."""

from __future__ import annotations

import pytest

from cluster.errors import EdgeError, EdgeUnfit
from cluster.kv.edge_fallback import KindBook, accepted
from cluster.kv.edges import EdgeKind
from tests.kv.edge_harness import edge_name

NAME, OTHER = edge_name(), edge_name("prefill-1")


@pytest.mark.parametrize("kind", EdgeKind)
def test_only_what_depends_on_two_gpus_falls_back(kind: EdgeKind) -> None:
    kinds = accepted(kind)
    assert kinds[0] is kind
    assert len(set(kinds)) == len(kinds)
    assert (len(kinds) > 1) == (kind is EdgeKind.CUDA_IPC)
    assert not any(one.in_ds_pool for one in kinds[1:])  # whatever a late writer does, it is staged


def test_an_edge_that_is_unfit_is_the_next_kind_and_stays_it() -> None:
    book = KindBook(accepted(EdgeKind.CUDA_IPC))
    verdict = book.failed(NAME, EdgeUnfit("no peer access"))
    assert isinstance(verdict, EdgeUnfit)
    assert str(verdict) == "no peer access; KV goes by `nccl` between these two"
    assert book.kind_of(NAME) is EdgeKind.NCCL
    assert book.kind_of(OTHER) is EdgeKind.CUDA_IPC
    assert book.kind_of(NAME) is EdgeKind.NCCL  # of every later dial


def test_a_peer_that_is_lost_is_dialled_as_before() -> None:
    book = KindBook(accepted(EdgeKind.CUDA_IPC))
    verdict = book.failed(NAME, EdgeError("the decode worker's process 7 has exited"))
    assert type(verdict) is EdgeError
    assert book.kind_of(NAME) is EdgeKind.CUDA_IPC


def test_what_was_fallen_back_to_and_does_not_come_up_is_left_behind_until_the_last() -> None:
    book = KindBook(accepted(EdgeKind.CUDA_IPC))
    assert isinstance(book.failed(NAME, EdgeUnfit("no peer access")), EdgeUnfit)
    assert isinstance(book.failed(NAME, EdgeError("built without NCCL")), EdgeUnfit)
    for _ in range(3):
        assert book.kind_of(NAME) is EdgeKind.GLOO
        assert type(book.failed(NAME, EdgeUnfit("cannot listen"))) is EdgeError
    alone = KindBook(accepted(EdgeKind.SHM))
    assert type(alone.failed(NAME, EdgeUnfit("another container"))) is EdgeError
