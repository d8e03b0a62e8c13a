"""The worker's elastic schedule: who is on time, how long a step may be, and that nobody starves."""

import math
from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.slo_budget import step_budget_s
from cluster.slo_classes import DecodeBatch, Targets, classify, prefill_s, shortest_first
from cluster.slo_schedule import SloScheduler, SloSettings, StepPlan
from cluster.step_model import StepModel, StepWork, chunk_attention

MODEL = StepModel(0.9e-3, 5.0e-3, 19.1e-6, 46.8e-9, 1.05e-9)
TARGETS = Targets(ttft_s=0.5, tpot_s=0.025)
SETTINGS = SloSettings()


@dataclass(eq=False)
class Waiting:
    deadline_s: float
    num_tokens: int
    num_computed: int = 0
    decode_s: float = 0.02
    load_s: float = 1e-4
    new_kv_tokens: int = 0
    is_batch: bool = False


def beside(rows: int, context: int, slack_s: float = math.inf, **given: int) -> DecodeBatch:
    """`rows` that decode, the tightest due in `slack_s`."""
    budget_s = step_budget_s(TARGETS, slack_s, SETTINGS) if rows else None
    return DecodeBatch(rows, context if rows else 0, budget_s, **given)


def waiting(num_tokens: int, deadline_s: float = 0.5, **given: float) -> Waiting:
    return Waiting(deadline_s=deadline_s, num_tokens=num_tokens, **given)  # type: ignore[arg-type]


def run(
    scheduler: SloScheduler[Waiting], decode: DecodeBatch, until_s: float, now: float = 0.0
) -> dict[int, float]:
    """Step after step with an unchanging batch: when each prompt was complete, by id."""
    done: dict[int, float] = {}
    while len(scheduler) and now < until_s:
        plan = scheduler.plan(now, decode, 10**9)
        work = StepWork(
            decode.num_rows + sum(count for _, count in plan.chunks),
            decode.context,
            sum(chunk_attention(prompt.num_computed, count) for prompt, count in plan.chunks),
        )
        now += MODEL.step_s(work)
        for prompt, count in plan.chunks:
            prompt.num_computed += count
            assert prompt.num_computed <= prompt.num_tokens
            if prompt.num_computed == prompt.num_tokens:
                scheduler.remove(prompt)
                done[id(prompt)] = now
    return done


lengths = st.lists(st.integers(1, 20_000), min_size=1, max_size=30)


@given(lengths, st.integers(0, 400), st.integers(0, 200_000))
def test_chunks_fit_the_budget(prompts: list[int], rows: int, context: int) -> None:
    decode = beside(rows, context, TARGETS.tpot_s)
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    for num_tokens in prompts:
        scheduler.add(waiting(num_tokens))
    plan = scheduler.plan(0.0, decode, 10**9)
    work = StepWork(
        decode.num_rows + sum(count for _, count in plan.chunks),
        decode.context,
        sum(chunk_attention(prompt.num_computed, count) for prompt, count in plan.chunks),
    )
    if plan.chunks:
        budget_s = decode.budget_s or step_budget_s(TARGETS, math.inf, SETTINGS)
        assert MODEL.step_s(work) <= budget_s * (1 + 1e-9)
    assert all(1 <= count <= prompt.num_tokens for prompt, count in plan.chunks)
    assert len({id(prompt) for prompt, _ in plan.chunks}) == len(plan.chunks)


@given(lengths, st.integers(0, 100_000))
def test_prompts_begin_only_with_room_for_all_their_kv(prompts: list[int], room: int) -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    for num_tokens in prompts:
        scheduler.add(waiting(num_tokens, new_kv_tokens=num_tokens + 1))
    plan = scheduler.plan(0.0, DecodeBatch(), room)
    assert sum(prompt.new_kv_tokens for prompt, _ in plan.chunks) <= room


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8))
def test_nobody_is_demoted_while_the_work_fits(prompts: list[int]) -> None:
    """4,000 tokens take 0.1 s: all of them are in time for half a second, whatever their order."""
    decode = beside(20, 20_000, TARGETS.tpot_s)
    classes = classify([waiting(n) for n in prompts], 0.0, MODEL, decode, TARGETS.tpot_s, 0.03)
    assert not classes.demoted
    assert [prompt.num_tokens for prompt in classes.on_time] == prompts
    assert classes.work_s == pytest.approx(sum(prefill_s(MODEL, n, 0) for n in prompts))


def test_overload_demotes_the_costliest_and_keeps_the_order_of_the_rest() -> None:
    prompts = [waiting(2_000, 0.1), waiting(30_000, 0.2), waiting(2_000, 0.3), waiting(2_000, 0.4)]
    classes = classify(prompts, 0.0, MODEL, DecodeBatch(), TARGETS.tpot_s, 0.03)
    assert classes.on_time == [prompts[0], prompts[2], prompts[3]]
    assert classes.demoted == [prompts[1]]


def test_a_prompt_that_takes_several_steps_is_on_time_if_the_last_one_ends_in_time() -> None:
    step_s, decode = 0.1, beside(1, 1)
    for num_tokens, half_s in ((8_000, step_s / 2), (2_000, 0.0)):  # one step ends when its prompt is due
        other, prompt = waiting(500), waiting(num_tokens)
        left = 1 - (MODEL.fixed_s + MODEL.per_token_s + MODEL.per_context_s + 2 * prompt.load_s) / step_s
        takes_s = (prefill_s(MODEL, 500, 0) + prefill_s(MODEL, num_tokens, 0)) / left
        for more_s, num_demoted in ((-1e-3, 1), (1e-3, 0)):
            prompt.deadline_s = takes_s + half_s + more_s
            assert len(classify([other, prompt], 0.0, MODEL, decode, step_s, 0.03).demoted) == num_demoted


def test_expected_decode_counts_as_cost() -> None:
    cheap, dear = waiting(8_000, 0.3, decode_s=0.01), waiting(8_000, 0.3, decode_s=0.5)
    classes = classify([dear, cheap], 0.0, MODEL, DecodeBatch(), TARGETS.tpot_s, 0.03)
    assert classes.on_time == [cheap]


@given(lengths, st.integers(0, 200))
@settings(max_examples=20)
def test_nobody_starves_under_endless_new_work(prompts: list[int], rows: int) -> None:
    """A late prompt is computed within (its work and that of older late ones) / aged_share, while small new
    ones that are in time keep the worker busy."""
    decode = beside(rows, rows * 500, TARGETS.tpot_s)
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    late = [waiting(num_tokens, -1.0) for num_tokens in prompts[:5]]
    for prompt in late:
        scheduler.add(prompt)
    total_s = sum(prefill_s(MODEL, prompt.num_tokens, 0) for prompt in late)
    bound_s = total_s / SETTINGS.aged_share + len(late) * TARGETS.tpot_s / SETTINGS.aged_share
    now, left = 0.0, set(map(id, late))
    while left and now <= bound_s:
        if len(scheduler) - scheduler.num_late < 5:
            scheduler.add(waiting(3_000, now + TARGETS.ttft_s))
        plan = scheduler.plan(now, decode, 10**9)
        tokens = decode.num_rows + sum(count for _, count in plan.chunks)
        attention = sum(chunk_attention(prompt.num_computed, count) for prompt, count in plan.chunks)
        now += MODEL.step_s(StepWork(tokens, decode.context, attention))
        for prompt, count in plan.chunks:
            prompt.num_computed += count
            if prompt.num_computed == prompt.num_tokens:
                scheduler.remove(prompt)
                left.discard(id(prompt))
    assert not left


def test_a_late_prompt_without_kv_in_the_end_keeps_others_from_beginning() -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    large = waiting(5_000, -1.0, new_kv_tokens=5_001)
    scheduler.add(large)
    began = []
    for step in range(1_500):
        now = step * 0.025
        small = waiting(100, now + 0.5, new_kv_tokens=101)
        scheduler.add(small)
        began.append(bool(scheduler.plan(now, beside(10, 10_000, 0.025), 1_000).chunks))
        scheduler.remove(small)
    assert began[0]
    assert not began[-1]
    assert scheduler.plan(40.0, beside(10, 10_000, 0.025), 6_000).chunks[0][0] is large


def test_late_prompts_run_oldest_first() -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    late = [waiting(6_000, -3.0), waiting(100, -2.0), waiting(4_000, -1.0)]
    for prompt in reversed(late):
        scheduler.add(prompt)
    done = run(scheduler, DecodeBatch(), 60.0)
    assert [done[id(prompt)] for prompt in late] == sorted(done.values())


def test_yielding_rows_are_in_steps_with_room_and_get_their_share_otherwise() -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    idle = beside(10, 10_000, TARGETS.tpot_s, num_yielding=4, yielding_context=4_000)
    assert scheduler.plan(0.0, idle, 10**9).num_yielding == 4
    full = beside(10, 600_000, TARGETS.tpot_s, num_yielding=40, yielding_context=40_000)
    plans = [scheduler.plan(0.025 * step, full, 10**9).num_yielding > 0 for step in range(1, 400)]
    assert 0 < sum(plans) < len(plans) / 4


@pytest.mark.parametrize(
    ("slack_s", "expected_s"),
    [
        (0.025, 0.025 * 0.985),
        (0.065, 0.025 * 0.985 + 0.25 * 0.040),
        (0.015, 0.025 * 0.985 - 0.1 * 0.010),
        (-5.0, 0.025 * 0.985 / 2),
        (math.inf, 0.05),
    ],
)
def test_budget_follows_the_tightest_stream(slack_s: float, expected_s: float) -> None:
    assert step_budget_s(TARGETS, slack_s, SETTINGS) == pytest.approx(expected_s)


def test_gap_limit_caps_every_step() -> None:
    targets = Targets(0.5, 0.025, gap_s=0.03)
    assert step_budget_s(targets, 10.0, SETTINGS) == pytest.approx(0.03 * 0.985)
    assert step_budget_s(targets, math.inf, SETTINGS) == pytest.approx(0.03 * 0.985)


# ---- batch work, pauses, short prompts -----------------------------------------------------------

LIVE = SloSettings(
    aged_share=0.05, max_pause_s=0.5, short_slack=0.5, yielding_load=math.inf, splits_yielding=True
)


def work_of(decode: DecodeBatch, chunks: list[tuple[Waiting, int]]) -> StepWork:
    return StepWork(
        decode.num_rows + sum(count for _, count in chunks),
        decode.context,
        sum(chunk_attention(prompt.num_computed, count) for prompt, count in chunks),
    )


def test_batch_prompts_take_what_the_others_leave_and_nothing_more() -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    batch = waiting(50_000, 0.1, is_batch=True)
    scheduler.add(batch)
    [(first, all_of_it)] = scheduler.plan(0.0, DecodeBatch(), 10**9).chunks
    assert first is batch
    scheduler.add(waiting(200))
    (first, count), (second, rest) = scheduler.plan(0.001, DecodeBatch(), 10**9).chunks
    assert (first.num_tokens, count, second) == (200, 200, batch)
    assert all_of_it - 400 < rest < all_of_it
    scheduler.add(waiting(20_000, 1.0))
    assert [prompt.num_tokens for prompt, _ in scheduler.plan(0.002, DecodeBatch(), 10**9).chunks] == [
        200,
        20_000,
    ]
    assert scheduler.late_s == pytest.approx(prefill_s(MODEL, 50_000, 0))


def test_batch_prompts_are_never_late_nor_demoted() -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    scheduler.add(waiting(100, 0.1, is_batch=True))
    scheduler.plan(5.0, DecodeBatch(), 10**9)
    assert (scheduler.num_late, scheduler.num_demoted, scheduler.newly_late) == (0, 0, [])


@given(
    st.lists(st.tuples(st.integers(1, 8_000), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 150),
    st.integers(0, 6),
)
@settings(max_examples=15)
def test_nobody_starves_live_whatever_class_while_others_keep_the_worker_full(
    prompts: list[tuple[int, bool]], rows: int, num_yielding: int
) -> None:
    decode = beside(
        rows, rows * 500, TARGETS.tpot_s, num_yielding=num_yielding, yielding_context=500 * num_yielding
    )
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS, LIVE)
    left = {id(one): one for n, is_batch in prompts for one in [waiting(n, -1.0, is_batch=is_batch)]}
    for prompt in left.values():
        scheduler.add(prompt)
    total_s = sum(prefill_s(MODEL, n, 0) for n, _ in prompts)
    quarter_s = TARGETS.tpot_s * LIVE.safety / 4
    bound_s = (total_s / quarter_s + len(prompts) + 1) * (LIVE.max_pause_s + 2 * TARGETS.tpot_s)
    now, yielded_at = 0.0, 0.0
    while left:
        assert now <= bound_s
        if len(scheduler) - len(left) < 5:
            scheduler.add(waiting(3_000, now + TARGETS.ttft_s))
        plan = scheduler.plan(now, msgspec.structs.replace(decode, paused_s=now - yielded_at), 10**9)
        if plan.num_yielding == num_yielding:
            yielded_at = now
        now += max(MODEL.step_s(work_of(decode, plan.chunks)), 1e-3)
        assert not num_yielding or now - yielded_at <= LIVE.max_pause_s + 4 * TARGETS.tpot_s
        for prompt, count in plan.chunks:
            prompt.num_computed += count
            if prompt.num_computed == prompt.num_tokens:
                scheduler.remove(prompt)
                left.pop(id(prompt), None)


def test_a_step_that_would_be_empty_takes_a_chunk_whatever_the_budget() -> None:
    """Targets that this machine can never meet stop nobody."""
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, Targets(0.5, 0.001, gap_s=0.002))
    scheduler.add(waiting(4_000))
    assert run(scheduler, DecodeBatch(), 10.0)


def test_rows_that_yield_run_when_nothing_else_does() -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    long = DecodeBatch(num_yielding=50, yielding_context=2_000_000)  # longer than any budget
    assert scheduler.plan(0.0, long, 10**9).num_yielding == 50


@given(st.integers(1, 300), st.integers(1, 300))
def test_of_many_rows_that_yield_as_many_run_as_the_others_leave_room_for(
    rows: int, num_yielding: int
) -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS, LIVE)
    decode = beside(
        rows, rows * 3_000, TARGETS.tpot_s, num_yielding=num_yielding, yielding_context=num_yielding * 3_000
    )
    running = scheduler.plan(0.0, decode, 0).num_yielding
    budget_s = decode.budget_s or 0.0

    def step_s(more: int) -> float:
        return MODEL.step_s(StepWork(rows + more, (rows + more) * 3_000))

    assert running == num_yielding or step_s(running + 1) > budget_s * (1 - 1e-9)
    assert running == 0 or step_s(running) <= budget_s * (1 + 1e-9)


@given(lengths, st.integers(1, 600))
def test_no_step_has_more_prompt_tokens_than_it_may(prompts: list[int], most: int) -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS, SloSettings(max_chunk_tokens=most))
    for index, num_tokens in enumerate(prompts):
        scheduler.add(waiting(num_tokens, 0.5 if index % 3 else -1.0))
    plan = scheduler.plan(0.0, DecodeBatch(), 10**9)
    assert 0 < sum(count for _, count in plan.chunks) <= most


def test_a_short_prompt_goes_first_where_a_long_one_can_wait_and_not_where_it_cannot() -> None:
    def first(deadline_s: float) -> int:
        scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS, LIVE)
        scheduler.add(waiting(8_000, deadline_s))  # takes 0.2 s
        scheduler.add(waiting(300, 0.5))
        return scheduler.plan(0.0, DecodeBatch(), 10**9).chunks[0][0].num_tokens

    assert first(0.4) == 300
    assert first(0.205) == 8_000


def test_a_step_that_completes_a_prompt_ends_when_it_is_due() -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    urgent = waiting(500, 0.02)
    for prompt in (urgent, waiting(20_000, 5.0)):
        scheduler.add(prompt)
    plan = scheduler.plan(0.0, DecodeBatch(), 10**9)
    assert plan.chunks[0] == (urgent, 500)
    assert 0.018 < MODEL.step_s(work_of(DecodeBatch(), plan.chunks)) <= 0.02


def test_a_late_prompt_that_was_paid_for_goes_on_in_what_is_left() -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS, LIVE)
    scheduler.add(waiting(50_000, -1.0))
    counts = [scheduler.plan(10.0 * step, DecodeBatch(), 10**9).chunks[0][1] for step in range(1, 4)]
    assert len(set(counts)) == 1


@given(lengths, st.floats(0, 1))
def test_whoever_goes_first_makes_nobody_late(prompts: list[int], share: float) -> None:
    queue = [waiting(n, 0.05 + 0.03 * index) for index, n in enumerate(prompts)]
    classes = classify(queue, 0.0, MODEL, DecodeBatch(), TARGETS.tpot_s, 0.03)
    order = shortest_first(classes, share)
    assert sorted(map(id, order)) == sorted(map(id, classes.on_time))
    own_s = dict(zip(map(id, classes.on_time), classes.own_s, strict=True))
    slack_s = dict(zip(map(id, classes.on_time), classes.slack_s, strict=True))
    rank = {id(prompt): index for index, prompt in enumerate(classes.on_time)}
    ahead_s: dict[int, float] = dict.fromkeys(rank, 0.0)
    for index, prompt in enumerate(order):
        for other in order[index + 1 :]:
            if rank[id(other)] < rank[id(prompt)]:
                ahead_s[id(other)] += own_s[id(prompt)]
    assert all(delay_s <= slack_s[one] + 1e-9 for one, delay_s in ahead_s.items() if delay_s)


def test_a_prompt_that_begins_takes_its_kv_and_goes_on_from_what_is_cached() -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    prompt = waiting(1_000, new_kv_tokens=1_001)
    scheduler.add(prompt)

    def begin(one: Waiting) -> None:
        one.num_computed, one.new_kv_tokens = 900, 0

    assert scheduler.plan(0.0, DecodeBatch(), 1_000, begin=begin).chunks == []
    assert scheduler.plan(0.0, DecodeBatch(), 1_001, begin=begin).chunks == [(prompt, 100)]


def test_a_lead_is_not_spent_at_once() -> None:
    assert step_budget_s(TARGETS, 10.0, SETTINGS) > 2.0
    live = replace(SETTINGS, longest=2.0)
    assert step_budget_s(TARGETS, 10.0, live) == pytest.approx(2 * 0.025 * 0.985)
    assert step_budget_s(TARGETS, math.inf, live) == step_budget_s(TARGETS, math.inf, SETTINGS)


def test_equal_inputs_give_equal_plans() -> None:
    def plans() -> list[list[int]]:
        scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
        for index in range(40):
            scheduler.add(waiting(200 + 97 * index % 1500, 0.1 + 0.01 * index))
        decode = beside(60, 60_000, TARGETS.tpot_s)
        return [[count for _, count in scheduler.plan(step / 50, decode, 10**9).chunks] for step in range(30)]

    assert plans() == plans()


SHARING = replace(LIVE, late_share=0.75, overdue_s=1.0, overdue_share=0.25)
FULL = {"num_yielding": 60, "yielding_context": 60 * 3_000}  # they would fill any step


def step_of(decode: DecodeBatch, *prompts: Waiting) -> tuple[StepPlan[Waiting], SloScheduler[Waiting]]:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS, SHARING)
    for prompt in prompts:
        scheduler.add(prompt)
    return scheduler.plan(0.0, decode, 10**9), scheduler


@given(st.integers(1, 120))
def test_late_prompts_have_their_share_before_rows_that_yield(rows: int) -> None:
    decode = beside(rows, rows * 500, TARGETS.tpot_s, **FULL)
    late = waiting(50_000, -0.5)
    plan, scheduler = step_of(decode, late)
    [(prompt, count)] = plan.chunks
    assert prompt is late
    assert decode.budget_s is not None
    alone_s = MODEL.step_s(StepWork(rows, rows * 500))
    chunk_s = MODEL.step_s(StepWork(rows + count, rows * 500, chunk_attention(0, count))) - alone_s
    share = chunk_s / (decode.budget_s - alone_s)
    assert SHARING.late_share - 0.01 <= share <= 1
    assert plan.num_yielding > 0
    assert scheduler.planned_late_s == pytest.approx(prefill_s(MODEL, count, 0))


def test_rows_that_yield_have_all_that_late_prompts_do_not_need() -> None:
    decode = beside(10, 5_000, TARGETS.tpot_s, num_yielding=20, yielding_context=20_000)
    plan, _ = step_of(decode, waiting(5, -0.5))
    assert (plan.num_yielding, plan.chunks[0][1]) == (20, 5)


def test_an_overdue_prompt_goes_before_those_on_time_within_its_share_and_the_budget() -> None:
    decode = beside(60, 60_000, TARGETS.tpot_s)
    overdue, on_time = waiting(50_000, -5.0), waiting(3_000, 0.5)
    plan, scheduler = step_of(decode, on_time, overdue)
    counts = {id(prompt): count for prompt, count in plan.chunks}
    assert 0 < counts[id(overdue)] < counts[id(overdue)] + counts[id(on_time)]
    assert decode.budget_s is not None
    assert MODEL.step_s(work_of(decode, plan.chunks)) <= decode.budget_s * (1 + 1e-9)
    assert scheduler.planned_late_s == pytest.approx(prefill_s(MODEL, counts[id(overdue)], 0))
    plan, _ = step_of(decode, waiting(3_000, 0.5), waiting(50_000, -0.5))  # late, not overdue
    assert [prompt.num_tokens for prompt, _ in plan.chunks] == [3_000]


def test_the_share_of_overdue_prompts_is_no_longer_promised_to_others() -> None:
    """4,000 tokens would just be in time for 0.1 s without it."""
    queue = [waiting(4_000, 0.1)]
    assert not classify(queue, 0.0, MODEL, DecodeBatch(), TARGETS.tpot_s, 0.03).demoted
    assert classify(queue, 0.0, MODEL, DecodeBatch(), TARGETS.tpot_s, 0.03, 0.75).demoted


def test_nothing_late_is_planned_where_nothing_is_late() -> None:
    _, scheduler = step_of(DecodeBatch(), waiting(100))
    assert scheduler.planned_late_s is None


def test_remove_of_one_that_is_not_here_is_an_error() -> None:
    scheduler: SloScheduler[Waiting] = SloScheduler(MODEL, TARGETS)
    with pytest.raises(ValueError, match="not in"):
        scheduler.remove(waiting(10))


def test_where_mixed_steps_have_a_price_prompts_come_in_few_long_chunks_and_streams_keep_their_pace() -> None:
    """A batch of 20 rows whose step takes 33 ms of 60, prompts of 90 ms each half a second."""
    model = StepModel(19e-3, 3e-3, 0.1e-3, 0.7e-6, 1e-8, mixed_s=20e-3)
    targets = Targets(0.4, 0.06)
    scheduler: SloScheduler[Waiting] = SloScheduler(model, targets)
    now, steps, mixed, first_s = 0.0, 0, 0, []
    arrivals = [0.5 * index for index in range(40)]
    while len(first_s) < 40:
        while arrivals and arrivals[0] <= now:
            scheduler.add(waiting(900, arrivals.pop(0) + 0.4))
        slack_s = (steps + 1) * 0.06 - now
        budget_s = step_budget_s(targets, slack_s, SETTINGS)
        plan = scheduler.plan(now, DecodeBatch(20, 16_000, budget_s, life_s=10.0, bearable_s=slack_s), 10**9)
        tokens = sum(count for _, count in plan.chunks)
        pairs = sum(chunk_attention(prompt.num_computed, count) for prompt, count in plan.chunks)
        now += model.step_s(StepWork(20 + tokens, 16_000, pairs))
        steps, mixed = steps + 1, mixed + bool(plan.chunks)
        for prompt, count in plan.chunks:
            prompt.num_computed += count
            if prompt.num_computed == prompt.num_tokens:
                scheduler.remove(prompt)
                first_s.append(now - prompt.deadline_s)
    assert max(first_s) <= 0.0
    assert mixed == 41  # each prompt in one, but the first: streams had no lead yet
    assert now / steps < 0.06


def test_without_streams_a_step_is_long_enough_for_its_fixed_part_to_be_little_of_it() -> None:
    slow = StepModel(20e-3, 0.0, 0.1e-3, 0.0, 0.0)
    scheduler: SloScheduler[Waiting] = SloScheduler(slow, Targets(0.2, 0.05))
    prompt = waiting(1_700, 0.2)
    scheduler.add(prompt)
    assert scheduler.plan(0.0, DecodeBatch(), 10**9).chunks == [(prompt, 1_700)]  # in chunks it were late
    streams = DecodeBatch(1, 500, 0.05)
    assert scheduler.plan(0.0, streams, 10**9).chunks == [(prompt, 299)]
