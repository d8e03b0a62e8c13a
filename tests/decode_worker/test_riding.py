"""Chunks that ride beside decode rows: as long as the tightest stream bears, and never a bit different."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from tests.support.decode_bench import DecodeBench

LAPTOP = StepModel(2e-3, 8e-3, 1e-3, 1e-6, 1e-8)  # a chunk of 512 takes half a second
TARGETS = Targets(ttft_s=2.0, tpot_s=0.05)


def bench(machine: StepModel = LAPTOP, num_blocks: int = 600, targets: Targets = TARGETS) -> DecodeBench:
    """One that knows its machine."""
    made = DecodeBench(num_blocks, 8, machine=machine, targets=targets)
    made.scheduler.book.pacer.calibrated(machine)
    return made


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 40 + 1 for i in range(length)]


def test_a_long_prompt_rides_without_costing_the_streams_their_tpot() -> None:
    one = bench()
    for index in range(4):
        one.add(prompt(30, index), 80, targets=TARGETS)
    assert one.step()
    one.add(prompt(1000), 4, ready=False, targets=TARGETS)
    longest_s = 0.0
    while one.scheduler.num_sequences:
        before_s = one.now
        one.step()
        longest_s = max(longest_s, one.now - before_s)
    assert longest_s < 0.11  # two TPOTs: a lead may be used; a fixed chunk would have taken half a second
    assert all(one.tpot_s(f"q{n}") <= TARGETS.tpot_s for n in range(1, 5))
    assert one.times["q5"][0] <= TARGETS.ttft_s
    one.run()


def test_the_tightest_stream_decides() -> None:
    def chunk_beside(*tpots_s: float) -> int:
        one = bench()
        for index, tpot_s in enumerate(tpots_s):
            one.add(prompt(20, index), 50, targets=Targets(2.0, tpot_s))
        one.add(prompt(900), 4, ready=False, targets=TARGETS)
        one.step()
        return one.work.num_tokens - len(tpots_s)

    tight, loose, both = chunk_beside(0.03), chunk_beside(0.2), chunk_beside(0.2, 0.03)
    assert 20 <= tight < 40
    assert 150 < loose < 250
    assert both == tight - 1


def test_a_gap_limit_holds_for_every_token() -> None:
    one = bench()
    one.add(prompt(20), 100, targets=Targets(2.0, 0.1, gap_s=0.03))
    for index in range(6):
        one.add(prompt(300, index), 2, ready=False, targets=Targets(4.0, 0.1))
    one.run()
    gaps = [b - a for a, b in zip(one.times["q1"], one.times["q1"][1:], strict=False)]
    assert max(gaps) <= 0.03


def test_alone_a_prompt_is_computed_in_long_steps() -> None:
    one = bench()
    one.add(prompt(400), 2, ready=False, targets=TARGETS)
    one.step()
    assert one.now == pytest.approx(TARGETS.ttft_s / 20, rel=0.05)


def test_batch_work_gives_way_and_comes_back() -> None:
    one = bench()
    one.add(prompt(40), 60, targets=TARGETS, is_batch=True)
    one.add(prompt(800), 4, ready=False, targets=TARGETS, is_batch=True)
    one.step()
    assert one.work.num_tokens > 50  # nobody else is here: it has the worker
    for index in range(3):
        one.add(prompt(400, index), 30, ready=False, targets=TARGETS)
    while not all(one.times[f"q{n}"] for n in (3, 4, 5)):
        one.step()
    assert one.now < 1200 * LAPTOP.per_token_s * 1.4  # as if the batch work were hardly there
    assert len(one.tokens["q1"]) > 3  # which goes on all the same
    one.run()


def test_a_worker_that_knows_nothing_of_its_machine_learns_it() -> None:
    slow = StepModel(3e-3, 15e-3, 4e-3, 1e-6, 1e-8)  # ten times slower than is assumed
    one = DecodeBench(600, 8, machine=slow, targets=Targets(20.0, 0.1))
    one.add(prompt(20), 400, targets=Targets(20.0, 0.1))
    for index in range(8):
        one.add(prompt(300, index), 2, ready=False, targets=Targets(60.0, 0.1))
    steps = []
    while one.scheduler.num_queued_tokens:
        before_s = one.now
        one.step()
        steps.append(one.now - before_s)
    assert steps[0] > 0.3
    assert max(steps[20:]) < 0.15
    assert one.scheduler.book.pacer.steps.error < 0.2


def test_targets_that_nobody_can_meet_stop_nobody() -> None:
    one = bench(targets=Targets(0.001, 0.001))
    for index in range(4):
        one.add(prompt(60, index), 10, ready=index % 2 == 0, targets=Targets(0.001, 0.001, gap_s=0.001))
    one.run()
    assert one.now < 1.0


requests = st.lists(
    st.tuples(
        st.integers(1, 90),  # prompt
        st.integers(2, 30),  # answer
        st.booleans(),  # its KV comes from elsewhere
        st.sampled_from([0.004, 0.03, 0.2]),  # TPOT
        st.sampled_from([0.01, 0.3, 5.0]),  # TTFT
        st.booleans(),  # batch
        st.integers(0, 4),  # steps before the next one
    ),
    min_size=1,
    max_size=12,
)
machines = st.builds(
    StepModel,
    st.floats(1e-4, 3e-3),
    st.floats(1e-3, 2e-2),
    st.floats(1e-5, 3e-3),
    st.floats(0, 1e-5),
    st.floats(0, 1e-6),
)


@given(requests, machines, st.booleans(), st.integers(24, 80), st.integers(4, 200))
@settings(max_examples=40)
def test_whatever_rides_tokens_are_exact_nothing_is_left_and_nobody_waits_forever(
    given: list[tuple[int, int, bool, float, float, bool, int]],
    machine: StepModel,
    is_calibrated: bool,
    num_blocks: int,
    most: int,
) -> None:
    """Every request's tokens equal those of the undisturbed run, whatever was computed beside it, in whatever
    chunks; blocks are never shared, nor more than there are (the runner and the books check each step)."""
    one = DecodeBench(num_blocks, 8, machine=machine, max_chunk_tokens=most)
    if is_calibrated:
        one.scheduler.book.pacer.calibrated(machine)
    for length, max_tokens, ready, tpot_s, ttft_s, is_batch, pause in given:
        one.add(
            prompt(length, length),
            max_tokens,
            growth=0,
            ready=ready,
            targets=Targets(ttft_s, tpot_s),
            is_batch=is_batch,
        )
        for _ in range(pause):
            one.step()
    one.run(20_000)


@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.sampled_from([0.04, 0.08, 0.15]),
    st.floats(2e-4, 2e-3),
)
@settings(max_examples=40)
def test_the_budget_is_kept_whenever_it_can_be(
    num_streams: int, prompts: list[int], tpot_s: float, per_token_s: float
) -> None:
    """With prompts that are in time, streams that could keep their TPOT alone keep it beside them."""
    machine = StepModel(2e-3, 8e-3, per_token_s, 1e-6, 1e-8)
    one = bench(machine, 1200)
    for index in range(num_streams):
        one.add(prompt(20, index), 60, targets=Targets(2.0, tpot_s))
    for index, length in enumerate(prompts):
        one.add(prompt(length, index), 1, ready=False, targets=Targets(math.inf, tpot_s))
    one.run()
    assert all(one.tpot_s(f"q{n}") <= tpot_s for n in range(1, num_streams + 1))
