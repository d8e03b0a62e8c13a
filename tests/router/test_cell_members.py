"""Who is in which cell: alike at first, and still where they were after others joined and left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import WorkerId
from router.cell_members import CellMembers, Member
from router.cells import CellSettings

SETTINGS = CellSettings(workers=4, most_together=6)


def here(num_prefill: int, num_decode: int) -> dict[WorkerId, Member]:
    count = num_prefill + num_decode
    return {WorkerId(f"w{row}"): Member(row, row >= num_prefill) for row in range(count)}


def test_a_small_fleet_is_one_cell() -> None:
    members = CellMembers(SETTINGS)
    assert members.follow(here(2, 4))
    assert members.rows() == [[0, 1, 2, 3, 4, 5]]
    assert not members.follow(here(2, 4))


def test_each_cell_has_its_share_of_each_role() -> None:
    members = CellMembers(SETTINGS)
    members.follow(here(6, 6))
    assert members.rows() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_nobody_moves_while_the_cells_are_large_enough() -> None:
    members = CellMembers(SETTINGS)
    workers = here(4, 8)
    members.follow(workers)
    before = members.rows()
    del workers[WorkerId("w5")]
    assert members.follow(workers)
    workers[WorkerId("new")] = Member(12, True)
    workers[WorkerId("newer")] = Member(13, False)
    members.follow(workers)
    after = members.rows()
    assert [set(rows) - {12, 13} for rows in after] == [set(rows) - {5} for rows in before]
    assert sum(len(rows) for rows in after) == 13
    assert max(map(len, after)) - min(map(len, after)) <= 1


def test_another_worker_in_the_row_of_one_that_left_is_another_member() -> None:
    members = CellMembers(SETTINGS)
    workers = here(4, 8)
    members.follow(workers)
    del workers[WorkerId("w0")]
    workers[WorkerId("other")] = Member(0, True)
    assert members.follow(workers)
    assert sorted(row for rows in members.rows() for row in rows) == list(range(12))


def test_cells_are_dealt_anew_when_they_became_too_large_or_small() -> None:
    members = CellMembers(SETTINGS)
    members.follow(here(0, 8))
    assert len(members) == 2
    members.follow(here(0, 12))
    assert len(members) == 2
    members.follow(here(0, 13))
    assert len(members) == 4
    members.follow(here(0, 7))
    assert len(members) == 2
    members.follow(here(0, 4))
    assert len(members) == 1


@given(st.lists(st.dictionaries(st.integers(0, 30), st.booleans()), max_size=8))
def test_everybody_is_in_one_cell_whatever_happened(steps: list[dict[int, bool]]) -> None:
    members = CellMembers(SETTINGS)
    for present in steps:
        workers = {
            WorkerId(f"w{row}-{is_decode}"): Member(row, is_decode) for row, is_decode in present.items()
        }
        members.follow(workers)
        assert sorted(row for rows in members.rows() for row in rows) == sorted(present)
        if len(members) > 1:
            assert max(map(len, members.rows())) <= 2 * SETTINGS.workers


@pytest.mark.parametrize(("num_workers", "num_cells"), [(2_048, 1), (2_100, 9), (10_000, 40)])
def test_a_large_fleet_has_cells_of_equal_size(num_workers: int, num_cells: int) -> None:
    members = CellMembers(CellSettings())
    members.follow(here(num_workers // 4, num_workers - num_workers // 4))
    sizes = set(map(len, members.rows()))
    assert len(members) == num_cells
    assert max(sizes) - min(sizes) <= 1
