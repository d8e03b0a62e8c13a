"""Who owns which core: everybody has its own, nobody borrows what is its own, none is left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core_board import (
    BOARD_BYTES,
    MAX_WORKERS,
    BoardFile,
    CoreShare,
    describe_share,
    describe_shares,
    share_cores,
)


@given(num_workers=st.integers(1, 12), threads=st.integers(1, 6), num_cores=st.integers(1, 16))
def test_every_worker_owns_as_many_cores_as_it_has_threads(
    num_workers: int, threads: int, num_cores: int
) -> None:
    shares = share_cores("/board", num_workers, threads, num_cores)
    if not shares:  # nothing to lend: each core belongs to all
        assert num_workers == 1 or threads >= num_cores or num_cores == 1
        return
    assert [share.worker for share in shares] == list(range(num_workers))
    assert len({share.owners for share in shares}) == 1
    for share in shares:
        assert len(share.own) == min(threads, num_cores)
        assert share.lent
        assert sorted((*share.own, *share.lent)) == list(range(len(share.owners)))
        assert all(share.worker not in share.owners[core] for core in share.lent)
    assert all(shares[0].owners)
    loads = [len(owners) for owners in shares[0].owners]
    assert max(loads) - min(loads) <= 1


def test_one_of_each_on_two_cores() -> None:
    shares = share_cores("/board", 2, 1, 2)
    assert [(share.own, share.lent) for share in shares] == [((0,), (1,)), ((1,), (0,))]
    names = ["prefill-0", "decode-0"]
    assert (
        describe_shares(names, shares)
        == "prefill-0 owns core 0, may borrow 1; decode-0 owns core 1, may borrow 0"
    )


@pytest.mark.parametrize(("num_workers", "threads", "num_cores"), [(2, 1, 1), (1, 2, 2), (3, 4, 4)])
def test_nothing_is_shared_where_every_core_is_everybodys(
    num_workers: int, threads: int, num_cores: int
) -> None:
    assert share_cores("/board", num_workers, threads, num_cores) == ()
    assert "keeps to its own threads" in describe_shares([], ())


def test_more_workers_than_cores() -> None:
    shares = share_cores("/board", 3, 1, 2)
    assert shares[0].owners == ((0, 2), (1,))
    assert (shares[0].lent, shares[1].lent, shares[2].lent) == ((1,), (0,), (1,))


def test_more_workers_than_the_board_has_lines() -> None:
    assert len(share_cores("/board", MAX_WORKERS, 1, 1000)) == MAX_WORKERS
    assert share_cores("/board", MAX_WORKERS + 1, 1, 1000) == ()


def test_cores_that_nobody_owns_are_left_alone() -> None:
    assert share_cores("/board", 2, 1, 8)[0].owners == ((0,), (1,))


def test_runs_of_cores_are_short_to_read() -> None:
    owners = ((0,), (0,), (1,), (0,), (1,), (1,), (1,))
    share = CoreShare(board="/board", worker=0, owners=owners)
    assert describe_share(share) == "owns core 0-1,3, may borrow 2,4-6"


def test_the_file_has_no_name_and_cannot_shrink() -> None:
    file = BoardFile()
    descriptor = os.open(file.path, os.O_RDWR)
    try:
        assert os.fstat(descriptor).st_size == BOARD_BYTES
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        file.close()
        file.close()  # again does nothing
        assert not Path(file.path).exists()
    finally:
        os.close(descriptor)
