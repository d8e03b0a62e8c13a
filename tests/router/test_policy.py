"""Elastic placement over a live view: who wins, who is passed over, and what happens when nothing fits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import RequestId, WorkerId
from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from cluster.wire.messages import WorkerState
from router.config import PolicyConfig
from router.policy import Elastic, Placement, Reject, RejectReason
from tests.router.view_peers import CPU, DEFAULTS, Book, ask, hashes

SLOW = StepModel(1e-3, 9e-3, 2e-3, 1e-7, 1e-8)


def avoiding(*names: str) -> frozenset[WorkerId]:
    return frozenset(WorkerId(name) for name in names)


# ---- prefill


def test_idle_and_unmeasured_disaggregates() -> None:
    assert Book("p0", "d0", model=None).placed(ask()) == ("p0", "d0")


def test_the_soonest_of_those_in_time_counts_backlog_and_speed() -> None:
    book = Book("d0")
    book.join("p0", SLOW)
    book.join("p1", on_time_prefill_s=0.1)
    assert book.placed(ask())[0] == "p1"
    book.beat("p1", on_time_prefill_s=1.0)
    assert book.placed(ask())[0] == "p0"


def test_a_cached_prefix_wins_until_the_queue_is_longer() -> None:
    book = Book("p0", "p1", "d0")
    book.cached("p1", hashes(1000))
    assert book.placed(ask(1000))[0] == "p1"
    book.beat("p1", on_time_prefill_s=1.3)
    assert book.placed(ask(1000))[0] == "p0"


def test_a_prompt_larger_than_the_prefill_pool_is_prefilled_locally() -> None:
    book = Book("d0")
    book.join("p0", num_blocks=10)
    assert book.placed(ask()) == (None, "d0")


def test_a_prefill_worker_full_of_kv_is_passed_over() -> None:
    book = Book("p0", "p1", "d0", num_blocks=300)
    book.beat("p0", blocks_used=290)
    book.beat("p1", on_time_prefill_s=0.5)
    assert book.placed(ask())[0] == "p1"


# ---- local prefill


def test_no_prefill_worker_is_local() -> None:
    assert Book("d0").placed(ask()) == (None, "d0")
    book = Book("p0", "d0")
    book.beat("p0", state=WorkerState.DRAINING)
    assert book.placed(ask()) == (None, "d0")


def test_local_when_no_prefill_worker_is_in_time() -> None:
    book = Book("p0", "d0")
    book.beat("p0", on_time_prefill_s=1.5)
    assert book.placed(ask()) == (None, "d0")


def test_decode_load_keeps_prompts_away() -> None:
    book = Book("p0", "d0")
    book.beat("p0", on_time_prefill_s=1.5)
    # Steps of 0.1 s: next to nothing is left beside them, and they do not end soon.
    book.beat("d0", decode_rows=30, decode_context=850_000, row_life_s=60.0)
    assert book.placed(ask(1000))[0] == "p0"


def test_local_when_only_the_decode_worker_has_the_prefix() -> None:
    book = Book("p0", "d0")
    book.cached("d0", hashes(1000))
    assert book.placed(ask(1000)) == (None, "d0")


def test_avoided_prefill_worker_is_passed_over() -> None:
    avoid = ask(avoid=avoiding("p0"))
    assert Book("p0", "p1", "d0").placed(avoid)[0] == "p1"
    assert Book("p0", "d0").placed(avoid)[0] is None


def test_always_remote_is_local_only_without_a_prefill_worker() -> None:
    book = Book("p0", "d0")
    book.beat("p0", on_time_prefill_s=100.0)
    remote = Elastic(PolicyConfig(always_remote=True), DEFAULTS)
    assert isinstance(decision := remote.place(book.book.view(), ask(), 0.0), Placement)
    assert decision.prefill == "p0"
    book.beat("p0", state=WorkerState.DRAINING)
    assert isinstance(decision := remote.place(book.book.view(), ask(), 0.0), Placement)
    assert decision.prefill is None


# ---- decode


def test_decode_where_the_step_is_shortest_counts_what_is_on_its_way() -> None:
    book = Book("p0", "d0", "d1", "d2")
    book.beat("d0", decode_rows=3, decode_context=200_000)
    book.beat("d1", coming_rows=3, coming_context=100_000)
    assert book.placed(ask())[1] == "d2"
    book.beat("d2", decode_rows=5, decode_context=150_000)
    assert book.placed(ask())[1] == "d1"


def test_decode_where_the_prefix_is() -> None:
    book = Book("p0", "d0", "d1")
    book.beat("d0", decode_context=20_000)
    assert book.placed(ask(4000))[1] == "d1"
    everything = hashes(4000)
    book.cached("p0", everything)
    book.cached("d0", everything[:-20])
    assert book.placed(ask(4000))[1] == "d0"  # a tenth of the pool less, although its steps take longer


def test_cached_blocks_need_no_room() -> None:
    book = Book("d0")
    book.cached("d0", hashes(100))
    book.hold("d0", num_blocks=9_995)
    assert book.placed(ask(100)) == (None, "d0")
    assert book.place(ask(100, hashes=hashes(100, start=7))) == Reject(RejectReason.BUSY)


def test_growth_is_bounded_by_what_the_request_can_ever_need() -> None:
    book = Book("d0", num_blocks=30)
    book.hold("d0", num_blocks=5)  # 25 are left: exactly the prompt's 100 tokens
    assert book.placed(ask(100, max_tokens=1))[1] == "d0"
    assert book.place(ask(100, max_tokens=2)) == Reject(RejectReason.BUSY)


def test_refused_size_is_not_tried_again_but_smaller_ones_are() -> None:
    book = Book("d0")
    book.hold("d0", num_blocks=20)
    book.book.refused(WorkerId("d0"), RequestId("other-1"), whatever_size=False)
    assert book.place(ask(100)) == Reject(RejectReason.BUSY)
    assert book.placed(ask(20, max_tokens=4))[1] == "d0"
    book.hold("d0", num_blocks=20)
    book.book.refused(WorkerId("d0"), RequestId("other-2"), whatever_size=True)
    assert book.place(ask(2)) == Reject(RejectReason.BUSY)


def test_avoided_decode_worker_only_if_there_is_no_other() -> None:
    book = Book("d0", "d1")
    book.beat("d1", decode_rows=10, decode_context=100_000)
    assert book.placed(ask(avoid=avoiding("d0")))[1] == "d1"
    assert Book("d0").placed(ask(avoid=avoiding("d0")))[1] == "d0"


# ---- nothing fits


def test_reasons() -> None:
    assert Book().place(ask()) == Reject(RejectReason.NO_WORKER)
    book = Book("p0")
    assert book.place(ask()) == Reject(RejectReason.NO_WORKER)
    book.join("d0", num_blocks=20)
    book.beat("d0", state=WorkerState.STARTING)
    assert book.place(ask()) == Reject(RejectReason.NO_WORKER)
    book.beat("d0")
    book.join("d1", num_blocks=10)
    assert book.place(ask()) == Reject(RejectReason.TOO_LARGE, 81)
    fits = ask(71, max_tokens=10)
    assert book.placed(fits)[1] == "d0"
    said_so = ask(71, max_tokens=10, too_large_for=avoiding("d0"))
    assert isinstance(decision := book.place(said_so), Reject)
    assert decision.reason is RejectReason.TOO_LARGE
    for _ in range(32):
        book.hold("d0")
    assert book.place(fits) == Reject(RejectReason.BUSY)


def test_b060_model_length_counts_too() -> None:
    book = Book("d0", max_model_len=105)
    assert book.place(ask(100, max_tokens=6)) == Reject(RejectReason.TOO_LARGE, 105)
    assert book.placed(ask(100, max_tokens=5))[1] == "d0"


def test_a_request_may_have_what_the_largest_decode_worker_holds() -> None:
    """Whoever names no `max_tokens` gets what is left of it, so it must not be more than fits."""
    book = Book("p0")
    assert book.book.view().max_model_len() is None
    book.join("d0", num_blocks=10)
    assert book.book.view().max_model_len() == 41
    book.join("d1", max_model_len=30)
    assert book.book.view().max_model_len() == 41
    assert book.placed(ask(5, max_tokens=36))[1] == "d0"
    assert book.place(ask(5, max_tokens=37)) == Reject(RejectReason.TOO_LARGE, 41)


def test_a_prompt_of_the_whole_pool_is_taken_by_an_empty_one() -> None:
    assert Book("d0", num_blocks=25).placed(ask(100, max_tokens=1)) == (None, "d0")


def test_a_hopeless_backlog_is_refused_with_the_time_it_takes() -> None:
    book = Book("p0", "d0")
    book.beat("p0", on_time_prefill_s=1.9, late_prefill_s=60.0)
    book.beat("d0", on_time_prefill_s=1.9, late_prefill_s=50.0)
    decision = book.place(ask(max_wait_s=30.0))
    assert isinstance(decision, Reject)
    assert decision.reason is RejectReason.BACKLOG
    assert decision.retry_after_s == pytest.approx((51.9 + 0.02) / 0.99 - 30.0, abs=0.2)
    assert isinstance(book.place(ask()), Placement)  # one that had a place is never turned away
    assert isinstance(book.place(ask(max_wait_s=80.0)), Placement)


def test_nobody_is_refused_for_a_guess() -> None:
    book = Book("p0", "d0", model=None)
    book.beat("p0", model=None, queued_prefill_tokens=10**6, late_prefill_s=1e6)
    book.beat("d0", model=None, queued_prefill_tokens=10**6)
    assert isinstance(book.place(ask(max_wait_s=1.0)), Placement)


def test_targets_of_a_request_move_it() -> None:
    book = Book("p0", "d0")
    book.beat("p0", on_time_prefill_s=0.5)
    assert book.placed(ask())[0] == "p0"
    assert book.placed(ask(targets=Targets(0.2, 0.1)))[0] is None  # only the decode worker is in time


# ---- spread


def place_next(book: Book, i: int, num_tokens: int) -> Placement:
    request = ask(num_tokens, hashes=hashes(num_tokens, start=i * 10_000))
    decision = book.place(request)
    assert isinstance(decision, Placement)
    book.take(f"r{i}", request, decision)
    return decision


@pytest.mark.parametrize("at_once", [True, False])
def test_b099_a_hundred_requests_spread_evenly(at_once: bool) -> None:
    """In a burst by what is in flight, one after the other in turn, although speeds differ a little."""
    book = Book()
    for i, name in enumerate(("p0", "p1", "d2", "d3")):
        model = StepModel(1e-3, 9e-3, 2e-4 * (1 + i * 1e-3), 1e-7, 1e-8)
        book.join(name, model, max_num_seqs=64)
    prefills: Counter[str | None] = Counter()
    decodes: Counter[str] = Counter()
    for i in range(100):
        decision = place_next(book, i, 40)
        prefills[decision.prefill] += 1
        decodes[decision.decode] += 1
        if not at_once:
            for name in ("p0", "p1", "d2", "d3"):
                book.book.remove(WorkerId(name), RequestId(f"r{i}"))
    for counts in (prefills, decodes):
        assert len(counts) == 2
        assert all(40 <= count <= 60 for count in counts.values())


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_claims_never_exceed_what_is_there(sizes: list[int]) -> None:
    """I6 as far as the router can hold it: it never proposes more than a worker has."""
    book = Book("d0", num_blocks=200, max_num_seqs=8)
    for i, size in enumerate(sizes):
        request = ask(size, hashes=hashes(size, i * 1000))
        decision = book.place(request)
        if isinstance(decision, Placement):
            book.take(f"r{i}", request, decision)
        view = book.book.view()
        row = view.rows[WorkerId("d0")]
        assert view.slots[row] >= 0
        assert view.blocks[row] >= 0


STATES = st.sampled_from([WorkerState.READY, WorkerState.READY, WorkerState.DRAINING, WorkerState.STARTING])
WORKER = st.fixed_dictionaries(
    {
        "state": STATES,
        "model": st.sampled_from([CPU, SLOW, None]),
        "blocks_used": st.integers(0, 120),
        "running": st.integers(0, 9),
        "decode_rows": st.integers(0, 9),
        "decode_context": st.integers(0, 400_000),
        "on_time_prefill_s": st.floats(0, 5),
        "late_prefill_s": st.floats(0, 50),
    }
)


@given(
    workers=st.lists(st.tuples(st.sampled_from("pd"), WORKER), min_size=1, max_size=8),
    num_tokens=st.integers(1, 420),
    max_tokens=st.integers(1, 60),
    ttft_s=st.floats(0, 3),
    max_wait_s=st.sampled_from([0.0, 1.0, 30.0, 1e9]),
    avoid=st.sets(st.integers(0, 7)),
)
def test_it_never_places_on_a_worker_without_room_or_one_that_leaves(
    workers: list[tuple[str, dict[str, object]]],
    num_tokens: int,
    max_tokens: int,
    ttft_s: float,
    max_wait_s: float,
    avoid: set[int],
) -> None:
    book = Book()
    names = [f"{role}{i}" for i, (role, _) in enumerate(workers)]
    for name, (_, load) in zip(names, workers, strict=True):
        book.join(name, num_blocks=120, max_num_seqs=8)
        book.beat(name, **load)  # type: ignore[arg-type]
    avoided = avoiding(*(names[i] for i in avoid if i < len(names)))
    request = ask(num_tokens, max_tokens, targets=Targets(ttft_s, 0.1), max_wait_s=max_wait_s, avoid=avoided)
    view = book.book.view()
    before = view.fleet.copy()
    decision = book.place(request)
    assert before.equals(view.fleet)
    ready = {name: load for name, (_, load) in zip(names, workers, strict=True) if load["state"] is STARTED}
    decodes = [name for name in ready if name.startswith("d")]
    if isinstance(decision, Reject):
        if decision.reason is RejectReason.NO_WORKER:
            assert not decodes
        elif decision.reason is RejectReason.TOO_LARGE:
            assert request.max_kv_tokens > 480
        elif decision.reason is RejectReason.BACKLOG:
            assert max_wait_s < 1e9
            assert decision.retry_after_s > 0
        return
    assert decision.decode in decodes
    row = view.rows[decision.decode]
    assert view.slots[row] >= 1
    assert view.blocks[row] >= decision.decode_blocks >= -(-num_tokens // 4)
    if decision.prefill is not None:
        assert decision.prefill in ready
        assert decision.prefill.startswith("p")
        assert decision.prefill not in avoided
    if decision.decode in avoided:  # no other had room
        others = [view.rows[WorkerId(name)] for name in decodes if name not in avoided]
        assert all(view.slots[i] < 1 or view.blocks[i] < decision.decode_blocks for i in others)


STARTED = WorkerState.READY


def test_the_last_token_is_always_computed() -> None:
    book = Book("d0")
    book.cached("d0", hashes(100))
    decision = book.place(ask(100))
    assert isinstance(decision, Placement)
    assert decision.prefill_tokens == 1
    other = book.place(ask(100, hashes=hashes(100, start=7)))
    assert isinstance(other, Placement)
    assert other.prefill_tokens == 100
