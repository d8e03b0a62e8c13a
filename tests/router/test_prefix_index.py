"""Who has which prefix: against plain sets, along chains, and across reports that are lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import BlockHash, WorkerId
from cluster.wire.kv_events import KvEvents
from router.prefix_index import MAX_LEVELS, PrefixIndex
from tests.router.view_peers import Book


def chain(length: int, name: str = "") -> tuple[BlockHash, ...]:
    return tuple(BlockHash(f"{name}/{i}".encode()) for i in range(length))


def found(index: PrefixIndex, hashes: tuple[BlockHash, ...], num_rows: int) -> list[int]:
    column = index.lookup(hashes, num_rows)
    return [0] * num_rows if column is None else [int(value) for value in column]


def test_it_counts_from_the_start() -> None:
    index = PrefixIndex()
    index.store(2, chain(4))
    assert found(index, chain(6), 4) == [0, 0, 4, 0]
    assert found(index, chain(2), 4) == [0, 0, 2, 0]
    assert found(index, (BlockHash(b"other"), *chain(4)), 4) == [0, 0, 0, 0]
    assert index.lookup((), 4) is None


def test_many_workers_hold_a_system_prompt_and_few_the_rest() -> None:
    index = PrefixIndex()
    for row in range(100):
        index.store(row, chain(300)[: 10 if row % 7 else 100 + row])
    column = index.lookup(chain(300), 100)
    assert column is not None
    assert column.tolist() == [10 if row % 7 else 100 + row for row in range(100)]


def test_where_a_system_prompt_ends_is_only_a_guess() -> None:
    index = PrefixIndex()
    rows = range(20)
    for row in rows:
        index.store(row, chain(30))
    assert found(index, chain(60), 20) == [30] * 20
    for row in rows:
        index.store(row, chain(50))  # it has become longer
    assert found(index, chain(60), 20) == [50] * 20
    assert found(index, chain(30), 20) == [30] * 20
    for row in rows:
        index.remove(row, chain(50)[12:])  # and shorter
    assert found(index, chain(60), 20) == [12] * 20
    index.store(3, chain(13))
    assert found(index, chain(60), 20) == [12] * 3 + [13] + [12] * 16
    assert found(index, chain(13), 20) == [12] * 3 + [13] + [12] * 16
    assert found(index, (*chain(1), *chain(20, "other")), 20) == [1] * 20


def test_a_look_up_is_bounded_however_many_lengths_there_are() -> None:
    index = PrefixIndex()
    for row in range(200):
        index.store(row, chain(row + 1))
    column = index.lookup(chain(200), 200)
    assert column is not None
    assert column[: MAX_LEVELS - 1].tolist() == list(range(1, MAX_LEVELS))
    assert (column[MAX_LEVELS:] <= np.arange(MAX_LEVELS, 200) + 1).all()  # never more than there is
    assert (column[MAX_LEVELS:] >= MAX_LEVELS).all()


def test_expected_blocks_count_until_each_request_is_gone() -> None:
    index = PrefixIndex()
    index.expect(0, chain(4))
    index.expect(0, chain(3))
    index.unexpect(0, chain(4))
    assert found(index, chain(4), 1) == [3]
    index.store(0, chain(2))
    index.unexpect(0, chain(3))
    assert found(index, chain(4), 1) == [2]
    index.remove(0, chain(2)[1:])
    assert found(index, chain(4), 1) == [1]
    index.remove(0, chain(9))
    assert len(index) == 0


ROWS = 3
CHAINS = [chain(6, "a"), (*chain(3, "a"), *chain(3, "b")), chain(5, "c")]
MOVES = st.tuples(
    st.sampled_from(["store", "remove", "expect", "unexpect", "forget", "leave"]),
    st.integers(0, ROWS - 1),
    st.sampled_from(CHAINS),
    st.integers(0, 6),
)


@given(moves=st.lists(MOVES, max_size=60))
def test_against_plain_sets(moves: list[tuple[str, int, tuple[BlockHash, ...], int]]) -> None:
    """Workers store chains from the head and drop them from the tail, as their caches do."""
    index = PrefixIndex()
    stored: list[set[BlockHash]] = [set() for _ in range(ROWS)]
    expected: list[list[tuple[BlockHash, ...]]] = [[] for _ in range(ROWS)]
    for move, row, hashes, length in moves:
        if move == "store":
            index.store(row, hashes[:length])
            stored[row] |= set(hashes[:length])
        elif move == "remove":
            index.remove(row, hashes[-1:])
            stored[row] -= set(hashes[-1:])
        elif move == "expect":
            index.expect(row, hashes[:length])
            expected[row].append(hashes[:length])
        elif move == "unexpect" and expected[row]:
            index.unexpect(row, expected[row].pop())
        elif move == "forget":
            index.forget(row)
            stored[row].clear()
        elif move == "leave":
            index.leave(row)
            stored[row].clear()
            expected[row].clear()
        known = [stored[r].union(*expected[r]) for r in range(ROWS)]
        assert len(index) == len(set().union(*known))
        assert [index.stored(r) for r in range(ROWS)] == stored
        for prompt in CHAINS:
            lengths = [next((i for i, h in enumerate(prompt) if h not in one), len(prompt)) for one in known]
            if all(set(prompt[length:]).isdisjoint(one) for length, one in zip(lengths, known, strict=True)):
                assert found(index, prompt, ROWS) == lengths


# ---- reports, by the book


def cached(book: Book, name: str, hashes: tuple[BlockHash, ...]) -> int:
    view = book.book.view()
    return found(view.prefix, hashes, view.fleet.num_workers)[view.rows[WorkerId(name)]]


def report(book: Book, sequence: int, begins: bool, stored: int, removed: tuple[BlockHash, ...] = ()) -> bool:
    events = KvEvents(sequence=sequence, begins=begins, stored=list(chain(stored)), removed=list(removed))
    return book.book.cache_changed(WorkerId("d0"), events)


def test_reports_add_up_in_order() -> None:
    book = Book("d0")
    assert report(book, 5, True, 3)
    assert report(book, 6, False, 8)
    assert cached(book, "d0", chain(9)) == 8
    assert report(book, 7, False, 0, chain(8)[6:])
    assert cached(book, "d0", chain(9)) == 6


def test_a_report_that_comes_twice_counts_once() -> None:
    book = Book("d0")
    for _ in range(2):
        assert report(book, 0, True, 3)
    for _ in range(2):
        assert report(book, 1, False, 5)
        assert report(book, 0, True, 3)
        assert cached(book, "d0", chain(9)) == 5


def test_a_missing_report_voids_all_until_the_worker_begins_anew() -> None:
    book = Book("d0")
    assert report(book, 0, True, 3)
    assert not report(book, 2, False, 6)
    assert cached(book, "d0", chain(9)) == 0
    assert report(book, 3, False, 7)  # under way when it was asked: ignored, and not asked again
    assert cached(book, "d0", chain(9)) == 0
    assert report(book, 9, True, 2)
    assert report(book, 10, False, 4)
    assert cached(book, "d0", chain(9)) == 4


def test_the_next_worker_of_a_row_has_nothing() -> None:
    book = Book("d0")
    assert report(book, 0, True, 3)
    book.book.leave(WorkerId("d0"))
    book.join("d1")
    assert cached(book, "d1", chain(3)) == 0
