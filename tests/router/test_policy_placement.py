"""Placement over hand-made views: who wins, who is passed over, and what happens when nothing fits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.block_hash import hash_blocks
from cluster.ids import BlockHash, Epoch, RequestId, WorkerId
from cluster.wire.messages import Role, WorkerLoad, WorkerState
from router.config import PolicyConfig
from router.perf_model import estimate_prefill
from router.policy import LeastTtft, Placement, PlacementRequest, Reject, RejectReason, num_uncached
from router.prefix_index import PrefixIndex
from router.view import ClusterView, InFlight, WorkerBook, WorkerView
from tests.router.conductor_peers import BLOCK_SIZE, make_register

POLICY = LeastTtft(PolicyConfig())


def worker(
    name: str, *, cached: list[BlockHash] | None = None, rate: float = 0.0, **changes: object
) -> WorkerView:
    prefix = PrefixIndex(1000)
    prefix.insert(cached or [])
    view = WorkerView(
        worker=WorkerId(name),
        epoch=Epoch(1),
        role=Role.PREFILL if name.startswith("p") else Role.DECODE,
        is_ready=True,
        max_model_len=10_000,
        max_num_seqs=32,
        block_size=BLOCK_SIZE,
        num_blocks=1000,
        load=WorkerLoad(prefill_tokens_per_s=rate, running=int(str(changes.pop("running", 0)))),
        backlog_tokens=0,
        num_in_flight=0,
        slots_available=32,
        blocks_available=1000,
        refused_blocks=None,
        last_placed=0,
        prefix=prefix,
    )
    return replace(view, **changes)  # type: ignore[arg-type]


def view(*workers: WorkerView) -> ClusterView:
    return ClusterView(
        prefill=tuple(one for one in workers if one.role is Role.PREFILL),
        decode=tuple(one for one in workers if one.role is Role.DECODE),
    )


def hashes(num_tokens: int, start: int = 0) -> list[BlockHash]:
    return hash_blocks(range(start, start + num_tokens), BLOCK_SIZE, "test", "")


def request(num_tokens: int = 100, max_tokens: int = 10, **changes: object) -> PlacementRequest:
    base = PlacementRequest(
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        max_tokens=max_tokens,
        hashes=hashes(num_tokens),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def placed(decision: Placement | Reject) -> tuple[str | None, str]:
    assert isinstance(decision, Placement), decision
    return decision.prefill, decision.decode


# ---- prefill


def test_idle_and_unmeasured_disaggregates() -> None:
    assert placed(POLICY.place(view(worker("p0"), worker("d0")), request(), 0.0)) == ("p0", "d0")


def test_least_predicted_ttft_counts_backlog_and_rate() -> None:
    slow = worker("p0", rate=1000)
    fast = worker("p1", rate=4000, backlog_tokens=200)
    assert placed(POLICY.place(view(slow, fast, worker("d0")), request(), 0.0))[0] == "p1"
    busy = replace(fast, backlog_tokens=900)
    assert placed(POLICY.place(view(slow, busy, worker("d0")), request(), 0.0))[0] == "p0"


def test_a_cached_prefix_wins_until_the_queue_is_longer() -> None:
    cached = worker("p0", cached=hashes(100), rate=1000)
    cold = worker("p1", rate=1000)
    assert placed(POLICY.place(view(cached, cold, worker("d0")), request(), 0.0))[0] == "p0"
    busy = replace(cached, backlog_tokens=300)
    assert placed(POLICY.place(view(busy, cold, worker("d0")), request(), 0.0))[0] == "p1"


def test_a_prompt_larger_than_the_prefill_pool_is_prefilled_locally() -> None:
    small = worker("p0", num_blocks=10)
    assert placed(POLICY.place(view(small, worker("d0")), request(), 0.0)) == (None, "d0")


# ---- local prefill


def test_no_prefill_worker_is_local() -> None:
    assert placed(POLICY.place(view(worker("d0")), request(), 0.0)) == (None, "d0")
    gone = worker("p0", is_ready=False)
    assert placed(POLICY.place(view(gone, worker("d0")), request(), 0.0)) == (None, "d0")


def test_idle_prefill_worker_keeps_it_even_if_decode_claims_to_be_faster() -> None:
    decision = POLICY.place(view(worker("p0", rate=500), worker("d0", rate=5000)), request(1000), 0.0)
    assert placed(decision)[0] == "p0"


def test_local_when_the_prefill_queue_is_long() -> None:
    busy = worker("p0", rate=1000, backlog_tokens=3000)
    assert placed(POLICY.place(view(busy, worker("d0", rate=1000)), request(), 0.0))[0] is None
    # Never measured there: assumed to be half as fast as the prefill worker, still sooner.
    assert placed(POLICY.place(view(busy, worker("d0")), request(), 0.0))[0] is None


def test_local_not_worth_the_harm_to_running_decodes() -> None:
    busy = worker("p0", rate=1000, backlog_tokens=500)
    idle = worker("d0", rate=1000)
    assert placed(POLICY.place(view(busy, idle), request(), 0.0))[0] is None
    crowded = worker("d0", rate=1000, running=20)  # 20 x 0.1 s of delay against 0.5 s saved
    assert placed(POLICY.place(view(busy, crowded), request(), 0.0))[0] == "p0"


def test_local_needs_a_clear_gain() -> None:
    busy = worker("p0", rate=1000, backlog_tokens=15)
    assert placed(POLICY.place(view(busy, worker("d0", rate=1000)), request(), 0.0))[0] == "p0"


def test_local_when_only_the_decode_worker_has_the_prefix() -> None:
    decode = worker("d0", cached=hashes(1000), rate=1000)
    assert placed(POLICY.place(view(worker("p0", rate=1000), decode), request(1000), 0.0)) == (None, "d0")


def test_unmeasured_prefill_worker_keeps_it_whatever_its_queue() -> None:
    busy = worker("p0", backlog_tokens=100_000)
    assert placed(POLICY.place(view(busy, worker("d0")), request(), 0.0))[0] == "p0"


def test_avoided_prefill_worker_is_passed_over() -> None:
    avoid = request(avoid=frozenset({WorkerId("p0")}))
    assert placed(POLICY.place(view(worker("p0"), worker("p1"), worker("d0")), avoid, 0.0))[0] == "p1"
    assert placed(POLICY.place(view(worker("p0"), worker("d0")), avoid, 0.0))[0] is None


# ---- decode


def test_decode_by_headroom_of_slots_and_blocks() -> None:
    few_slots = worker("d0", slots_available=2)
    few_blocks = worker("d1", blocks_available=60)
    roomy = worker("d2", slots_available=20, blocks_available=700)
    assert placed(POLICY.place(view(worker("p0"), few_slots, few_blocks, roomy), request(), 0.0))[1] == "d2"


def test_decode_with_the_prefix_wins_against_a_little_more_room() -> None:
    cached = worker("d0", cached=hashes(100), slots_available=24)
    empty = worker("d1")
    assert placed(POLICY.place(view(worker("p0"), cached, empty), request(), 0.0))[1] == "d0"
    full = replace(cached, slots_available=2)
    assert placed(POLICY.place(view(worker("p0"), full, empty), request(), 0.0))[1] == "d1"


def test_cached_blocks_need_no_room() -> None:
    cached = worker("d0", cached=hashes(100), blocks_available=4)
    assert placed(POLICY.place(view(cached), request(), 0.0)) == (None, "d0")
    cold = worker("d0", blocks_available=4)
    assert POLICY.place(view(cold), request(), 0.0) == Reject(RejectReason.BUSY)


def test_growth_is_bounded_by_what_the_request_can_ever_need() -> None:
    tight = worker("d0", blocks_available=25)  # exactly the prompt's 100 tokens
    assert placed(POLICY.place(view(tight), request(100, max_tokens=1), 0.0))[1] == "d0"
    assert POLICY.place(view(tight), request(100, max_tokens=2), 0.0) == Reject(RejectReason.BUSY)


def test_refused_size_is_not_tried_again_but_smaller_ones_are() -> None:
    refused = worker("d0", refused_blocks=20)
    assert POLICY.place(view(refused), request(100), 0.0) == Reject(RejectReason.BUSY)
    assert placed(POLICY.place(view(refused), request(20, max_tokens=4), 0.0))[1] == "d0"
    assert POLICY.place(view(replace(refused, refused_blocks=0)), request(2), 0.0) == Reject(
        RejectReason.BUSY
    )


def test_avoided_decode_worker_only_if_there_is_no_other() -> None:
    avoid = request(avoid=frozenset({WorkerId("d0")}))
    assert placed(POLICY.place(view(worker("d0"), worker("d1", slots_available=1)), avoid, 0.0))[1] == "d1"
    assert placed(POLICY.place(view(worker("d0")), avoid, 0.0))[1] == "d0"


# ---- nothing fits


def test_reasons() -> None:
    prefill = worker("p0")
    assert POLICY.place(view(prefill), request(), 0.0) == Reject(RejectReason.NO_WORKER)
    starting = worker("d0", is_ready=False)
    assert POLICY.place(view(prefill, starting), request(), 0.0) == Reject(RejectReason.NO_WORKER)
    full = worker("d0", slots_available=0)
    assert POLICY.place(view(prefill, full), request(), 0.0) == Reject(RejectReason.BUSY)
    small, smaller = worker("d0", num_blocks=20), worker("d1", num_blocks=10)
    too_large = POLICY.place(view(prefill, small, smaller), request(), 0.0)
    assert too_large == Reject(RejectReason.TOO_LARGE, 81)
    fits = PlacementRequest(num_tokens=71, num_prompt_tokens=71, max_tokens=10, hashes=())
    assert placed(POLICY.place(view(prefill, small, smaller), fits, 0.0))[1] == "d0"
    said_so = replace(fits, too_large_for=frozenset({WorkerId("d0")}))
    decision = POLICY.place(view(prefill, small, smaller), said_so, 0.0)
    assert isinstance(decision, Reject)
    assert decision.reason is RejectReason.TOO_LARGE


def test_b060_model_length_counts_too() -> None:
    short = worker("d0", max_model_len=105)
    assert POLICY.place(view(short), request(100, max_tokens=6), 0.0) == Reject(RejectReason.TOO_LARGE, 105)
    assert placed(POLICY.place(view(short), request(100, max_tokens=5), 0.0))[1] == "d0"


# ---- spread


def book_of(num_prefill: int, num_decode: int, max_num_seqs: int = 64) -> WorkerBook:
    book = WorkerBook(stall_timeout_s=10.0)
    for i in range(num_prefill + num_decode):
        name, role = (f"p{i}", Role.PREFILL) if i < num_prefill else (f"d{i}", Role.DECODE)
        register = make_register(name, role, num_blocks=10_000, max_num_seqs=max_num_seqs)
        book.join(register, 0.0)
        book.heartbeat(register.worker, WorkerState.READY, WorkerLoad(prefill_tokens_per_s=1000.0 + i), 0.0)
    return book


def place_next(book: WorkerBook, i: int, num_tokens: int) -> Placement:
    tokens = hashes(num_tokens, start=i * 10_000)
    decision = POLICY.place(book.view(), request(num_tokens, hashes=tokens), 0.0)
    assert isinstance(decision, Placement)
    if decision.prefill is not None:
        book.place(decision.prefill, RequestId(f"r{i}"), InFlight(decision.prefill_tokens, 0))
    local_tokens = decision.prefill_tokens if decision.prefill is None else 0
    book.place(decision.decode, RequestId(f"r{i}"), InFlight(local_tokens, decision.decode_blocks))
    return decision


@pytest.mark.parametrize("at_once", [True, False])
def test_b099_a_hundred_requests_spread_evenly(at_once: bool) -> None:
    """In a burst by what is in flight, one after the other in turn, although rates differ a little."""
    book = book_of(2, 2)
    prefills: Counter[str | None] = Counter()
    decodes: Counter[str] = Counter()
    for i in range(100):
        decision = place_next(book, i, 40)
        prefills[decision.prefill] += 1
        decodes[decision.decode] += 1
        if not at_once:
            for name in ("p0", "p1", "d2", "d3"):
                book.remove(WorkerId(name), RequestId(f"r{i}"))
    for counts in (prefills, decodes):
        assert len(counts) == 2
        assert all(40 <= count <= 60 for count in counts.values())


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_claims_never_exceed_what_is_there(sizes: list[int]) -> None:
    """I6 as far as the router can hold it: it never proposes more than a worker has."""
    book = WorkerBook(stall_timeout_s=10.0)
    register = make_register("d0", Role.DECODE, num_blocks=200, max_num_seqs=8)
    book.join(register, 0.0)
    book.heartbeat(register.worker, WorkerState.READY, WorkerLoad(), 0.0)
    for i, size in enumerate(sizes):
        decision = POLICY.place(book.view(), request(size, hashes=hashes(size, i * 1000)), 0.0)
        if isinstance(decision, Placement):
            book.place(decision.decode, RequestId(f"r{i}"), InFlight(0, decision.decode_blocks))
        (one,) = book.view().decode
        assert one.slots_available >= 0
        assert one.blocks_available >= 0


# ---- estimates


def test_estimate() -> None:
    config = PolicyConfig(ttft_floor_s=0.01, default_prefill_tokens_per_s=100)
    measured = estimate_prefill(worker("p0", rate=1000, backlog_tokens=500), 200, config)
    assert measured.compute_s == pytest.approx(0.21)
    assert measured.ttft_s == pytest.approx(0.71)
    assert measured.is_measured
    guessed = estimate_prefill(worker("p0"), 200, config)
    assert guessed.ttft_s == pytest.approx(2.01)
    assert not guessed.is_measured
    assumed = estimate_prefill(worker("p0"), 200, config, assumed_rate=400)
    assert assumed.ttft_s == pytest.approx(0.51)
    assert assumed.is_measured


def test_the_last_token_is_always_computed() -> None:
    assert num_uncached(worker("p0", cached=hashes(100)), request(100)) == 1
    assert num_uncached(worker("p0", cached=hashes(40)), request(100)) == 60
    assert num_uncached(worker("p0", cached=hashes(40, start=7)), request(100)) == 100
