"""Elastic placement: joint choice of P and D over columns, planner, expected lengths. Pure."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from router.elastic import Ask, ElasticSettings, Place, TurnAway, choose_decode, place, predicted_ttft_s
from router.fleet import EdgeRow, Fleet
from router.output_lengths import OutputLengths
from router.planner import Kind, Planner, PlannerState, Roles, best_roles, predicted_rate, work_of

H100 = StepModel(0.9e-3, 5.0e-3, 19.1e-6, 46.8e-9, 1.05e-9)
H20 = StepModel(0.9e-3, 4.2e-3, 128e-6, 39.2e-9, 7.0e-9)
TARGETS = Targets(0.5, 0.025)
SETTINGS = ElasticSettings()


def fleet(models: list[StepModel], kv_tokens: int = 400_000) -> Fleet:
    return Fleet(models, [kv_tokens] * len(models), [50e9] * len(models))


def placed(pool: Fleet, num_tokens: int, **given: object) -> Place:
    decision = place(pool, Ask(num_tokens, 200.0, **given), TARGETS, SETTINGS)  # type: ignore[arg-type]
    assert isinstance(decision, Place)
    return decision


def test_equal_idle_workers_compute_where_they_decode() -> None:
    assert placed(fleet([H100] * 4), 1_000) == Place(0, 0, pytest.approx(placed(fleet([H100]), 1_000).ttft_s))


def test_the_soonest_first_token_wins() -> None:
    pool = fleet([H100] * 3)
    pool.work_s[:] = [0.3, 0.1, 0.2]
    assert placed(pool, 1_000).prefill == 1


def test_decode_load_slows_a_worker_down() -> None:
    pool = fleet([H100] * 2)
    pool.rows[0], pool.context[0] = 150, 300_000
    assert placed(pool, 1_000).prefill == 1


def test_rows_on_their_way_count_as_far_as_they_decode_at_the_same_time() -> None:
    """Four seconds of prompts are queued, rows decode for half of one: an eighth of them at once."""
    pool, targets = fleet([H100, H20]), msgspec.structs.replace(TARGETS, ttft_s=5.0)
    pool.can_prefill[1] = False
    pool.work_s[0], pool.coming_rows[1], pool.coming_context[1] = 4.0, 160, 320_000
    ask = Ask(2_000, 100.0, life_s=0.5)
    decision = place(pool, ask, targets, SETTINGS)
    assert isinstance(decision, Place)
    assert (decision.prefill, decision.decode) == (0, 1)
    # the same rows at once: the queue is shorter than they decode
    decision = place(pool, msgspec.structs.replace(ask, life_s=5.0), targets, SETTINGS)
    assert isinstance(decision, Place)
    assert (decision.prefill, decision.decode) == (0, 0)


def test_unequal_kinds_do_what_they_are_comparatively_good_at() -> None:
    pool = fleet([H100, H100, H20, H20])
    decision = placed(pool, 1_000)
    assert decision.prefill < 2 <= decision.decode


def test_with_a_gap_limit_nobody_is_handed_to_a_step_with_chunks_that_it_would_wait_for() -> None:
    pool, targets = fleet([H100, H20]), msgspec.structs.replace(TARGETS, gap_s=0.03)
    decision = place(pool, Ask(1_000, 200.0), targets, SETTINGS)
    assert isinstance(decision, Place)
    assert (decision.prefill, decision.decode) == (0, 1)
    pool.work_s[1] = 0.05  # its step in flight may be as long as the target
    decision = place(pool, Ask(1_000, 200.0), targets, SETTINGS)
    assert isinstance(decision, Place)
    assert (decision.prefill, decision.decode) == (0, 0)
    assert placed(pool, 1_000).decode == 1, "without the limit it may wait"


@pytest.mark.parametrize("num_more", [0, 10])  # workers beyond the ten that are looked at one by one
def test_with_a_gap_limit_rows_gather_only_where_no_prompt_comes_between(num_more: int) -> None:
    """Mixed steps that cost more make rows gather. Prompts come to them, too, in steps as long as the gap
    allows: a row that comes from elsewhere would wait for one of these, and for its own."""
    dear = StepModel(2e-3, 8e-3, 60e-6, 20e-9, 3e-9, mixed_s=3e-3)
    targets, ask = Targets(1.0, 0.04, 0.03), Ask(1_000, 150.0)
    pool = fleet([dear] * (4 + num_more))
    pool.rows[3], pool.context[3] = 10, 10_000
    assert choose_decode(pool, ask, 0, targets, SETTINGS, 0.0) == 0
    unlimited = msgspec.structs.replace(targets, gap_s=math.inf)
    assert choose_decode(pool, ask, 0, unlimited, SETTINGS, 0.0) == 3
    pool.can_prefill[3] = False  # it has rows alone
    assert choose_decode(pool, ask, 0, targets, SETTINGS, 0.0) == 3


@pytest.mark.parametrize("num_more", [0, 10])
def test_prompts_do_not_come_between_rows_of_a_slower_kind(num_more: int) -> None:
    dear, slower = msgspec.structs.replace(H100, mixed_s=2e-3), msgspec.structs.replace(H20, mixed_s=2e-3)
    targets = msgspec.structs.replace(TARGETS, gap_s=0.03)
    pool = fleet([dear, *[slower] * (1 + num_more)])
    assert choose_decode(pool, Ask(1_000, 200.0), 0, targets, SETTINGS, 0.0) > 0


@pytest.mark.parametrize("num_workers", [1, 14])  # looked at one by one, or all at once
def test_a_small_prompt_does_not_wait_for_kv_that_large_ones_have_no_room_for(num_workers: int) -> None:
    """Three of 90,000 tokens are promised what 20,000 are free of: none of them begins, a small one does."""
    pool = fleet([H100] * num_workers)
    ask = Ask(300, 200.0, life_s=5.0)
    pool.rows[:], pool.context[:] = 100, 30_000
    pool.coming_rows[:], pool.coming_context[:] = 3, 270_000
    free = predicted_ttft_s(pool, ask, TARGETS, SETTINGS)
    pool.kv_used[:], pool.kv_promised[:] = 380_000, 270_000
    found = predicted_ttft_s(pool, ask, TARGETS, SETTINGS)
    assert found == pytest.approx(free + 5.0 * 301 / 650_000)  # as long as its own tokens take to leave
    pool.coming_rows[:] = 900  # as small as it is itself: they were here before
    assert predicted_ttft_s(pool, ask, TARGETS, SETTINGS)[0] > 1.0
    pool.coming_rows[:], pool.kv_used[:] = 3, 400_301  # there is no room for anybody
    assert predicted_ttft_s(pool, ask, TARGETS, SETTINGS) == pytest.approx(free + 5.0 * 602 / 670_301)


def test_decode_stays_where_the_others_are_full() -> None:
    pool = fleet([H100, H20])
    pool.rows[1], pool.context[1] = 200, 200_000
    assert placed(pool, 1_000).decode == placed(pool, 1_000).prefill == 0


def test_rows_on_their_way_to_a_worker_leave_no_time_for_prompts_there() -> None:
    pool = fleet([H100, H20])
    pool.can_decode[0], pool.work_s[0] = False, 0.35  # not well in time
    pool.rows[1], pool.context[1] = 60, 60_000
    assert placed(pool, 200).prefill == 1
    pool.coming_rows[1], pool.coming_context[1] = 100, 60_000
    pool.far_load_s[1] = 100 * H20.per_token_s + 60_000 * H20.per_context_s
    assert placed(pool, 200).prefill == 0


def test_rows_that_hold_much_of_the_kv_are_not_slowed_down_by_prompts() -> None:
    pool = fleet([H100, H20])
    pool.can_decode[0], pool.work_s[0] = False, 0.35  # not well in time
    pool.rows[1], pool.context[1] = 20, 180_000
    assert placed(pool, 700).prefill == 1
    pool.kv_tokens[1] = 200_000
    assert placed(pool, 700).prefill == 0


def test_a_cached_prefix_draws_the_request() -> None:
    pool = fleet([H100] * 3)
    pool.work_s[1] = 0.02
    assert placed(pool, 8_000, cached=np.array([0.0, 7_500.0, 0.0])).prefill == 1


def test_decode_leaves_a_worker_that_alone_has_prompts_in_time() -> None:
    """By seconds alone the quick one would decode (its keys cost less of its prefill); but the slow one is
    late with most prompts, so its time is worth little else."""
    quick, slow = StepModel(15e-3, 0.0, 75e-6, 0.43e-6, 0.0), StepModel(19e-3, 0.0, 125e-6, 0.75e-6, 0.0)
    pool, targets = fleet([quick, slow]), Targets(0.2, 0.1)
    ask = Ask(900, 200.0)
    assert place(pool, ask, targets, SETTINGS) == Place(0, 0, pytest.approx(0.086, abs=5e-3))
    pool.expect(np.array([700.0, 900.0, 1_400.0]), SETTINGS.early * targets.ttft_s, targets.tpot_s)
    decision = place(pool, ask, targets, SETTINGS)
    assert isinstance(decision, Place)
    assert (decision.prefill, decision.decode) == (0, 1)
    pool.rows[1], pool.context[1] = 100, 100_000  # full: the quick one decodes, too
    assert place(pool, ask, targets, SETTINGS) == Place(0, 0, decision.ttft_s)


def test_a_prompt_goes_where_rows_that_grow_leave_room_for_it() -> None:
    pool = fleet([H100] * 2, kv_tokens=10_000)
    pool.rows[:] = [20, 1]
    pool.kv_used[:] = [7_000, 8_000]
    pool.context[:] = [1_000, 8_000]
    assert placed(pool, 1_000).prefill == 0
    assert placed(pool, 1_000, growth=150).prefill == 1


def test_where_mixed_steps_have_a_price_rows_gather_and_prompts_go_elsewhere() -> None:
    pool = fleet([msgspec.structs.replace(H100, mixed_s=5e-3)] * 3)
    pool.rows[1], pool.context[1] = 40, 40_000
    decision = placed(pool, 1_000)
    assert decision.prefill != 1
    assert decision.decode == 1
    pool.rows[1], pool.context[1] = 230, 375_000  # a step of 23.5 ms of 25: whoever has fewer
    assert placed(pool, 1_000).decode != 1
    free = fleet([H100] * 3)
    free.rows[1], free.context[1] = 40, 40_000
    decision = placed(free, 1_000)
    assert decision.prefill == decision.decode != 1


def test_rows_gather_where_steps_are_mostly_what_each_step_takes() -> None:
    """Of 8 ms, reading the weights takes 6: there is room for 30 rows, and none for prompts beside them."""
    pool = fleet([msgspec.structs.replace(H100, mixed_s=10e-3)] * 3)
    pool.rows[1], pool.context[1] = 12, 6_000
    ask, targets = Ask(500, 28.0), Targets(0.5, 0.008)
    gathered = place(pool, ask, targets, SETTINGS)
    assert isinstance(gathered, Place)
    assert gathered.prefill != 1
    assert gathered.decode == 1
    pool.context[1] = 40_000  # it is full
    elsewhere = place(pool, ask, targets, SETTINGS)
    assert isinstance(elsewhere, Place)
    assert elsewhere.decode != 1


@pytest.mark.parametrize(
    ("num_tokens", "rows", "context", "targets", "long", "short"),
    [
        pytest.param(1_500, 30, 45_000, Targets(5.0, 0.09), 200.0, 12.0, id="begins half a step late"),
        pytest.param(2_000, 4, 8_000, Targets(0.5, 0.008), 100.0, 7.0, id="steps of 6.3 ms gain 1.6 each"),
    ],
)
def test_answers_that_would_end_before_they_have_caught_up_do_not_gather(
    num_tokens: int, rows: int, context: int, targets: Targets, long: float, short: float
) -> None:
    pool = fleet([msgspec.structs.replace(H100, mixed_s=5e-3)] * 3)
    pool.rows[1], pool.context[1] = rows, context
    decode = [place(pool, Ask(num_tokens, answer), targets, SETTINGS).decode for answer in (long, short)]  # type: ignore[union-attr]
    assert decode[0] == 1
    assert decode[1] != 1


def test_rows_gather_where_prompts_are_in_time_only_if_nobody_decodes() -> None:
    model = StepModel(21e-3, 1e-3, 100e-6, 0.7e-6, 0.0)  # 900 tokens take 90 ms
    pool, targets, ask = fleet([model] * 3), Targets(0.2, 0.1), Ask(900, 200.0)
    pool.rows[1], pool.context[1] = 20, 18_000
    apart = place(pool, ask, targets, SETTINGS)
    assert isinstance(apart, Place)
    assert apart.prefill == apart.decode != 1
    pool.expect(np.array([500.0, 900.0]), SETTINGS.early * targets.ttft_s, targets.tpot_s)
    gathered = place(pool, ask, targets, SETTINGS)
    assert isinstance(gathered, Place)
    assert gathered.prefill != 1
    assert gathered.decode == 1
    pool.expect(np.array([50.0, 90.0]), SETTINGS.early * targets.ttft_s, targets.tpot_s)
    assert place(pool, ask, targets, SETTINGS) == apart  # prompts that are in time anywhere


def test_roles_are_kept() -> None:
    pool = fleet([H100] * 4)
    pool.can_prefill[:] = [True, False, False, False]
    pool.can_decode[:] = [False, True, True, True]
    pool.context[1] = 5_000
    decision = placed(pool, 1_000)
    assert decision.prefill == 0
    assert decision.decode == 2


def test_too_large_for_everyone_is_turned_away_for_good() -> None:
    assert place(fleet([H100], 1_000), Ask(1_000, 10.0), TARGETS, SETTINGS) == TurnAway(None)


def test_what_a_prompt_takes_itself_is_no_reason_to_turn_it_away() -> None:
    """Nobody waits: it would be no sooner later, and a worker that is believed slow never shows otherwise."""
    pool = fleet([H100] * 2)
    ask = Ask(100_000, 100.0, max_wait_s=1.0)
    decision = place(pool, ask, TARGETS, SETTINGS)
    assert isinstance(decision, Place)
    assert decision.ttft_s > 2.0
    pool.late_s[:] = 0.5
    assert isinstance(place(pool, ask, TARGETS, SETTINGS), Place)
    pool.late_s[:] = 1.5
    assert place(pool, ask, TARGETS, SETTINGS) == TurnAway(pytest.approx(0.5, abs=0.1))


def test_a_hopeless_backlog_is_turned_away_with_the_time_it_takes() -> None:
    pool = fleet([H100] * 2)
    pool.work_s[:], pool.late_s[:] = 5.0, [90.0, 100.0]
    decision = place(pool, Ask(1_000, 100.0, max_wait_s=60.0), TARGETS, SETTINGS)
    assert decision == TurnAway(pytest.approx((5 + 90) / 0.9635 - 60, rel=0.01))
    assert isinstance(place(pool, Ask(1_000, 100.0, max_wait_s=101.0), TARGETS, SETTINGS), Place)
    pool.work_s[1], pool.late_s[1] = 0.1, 100.0  # in time there: late work waits for it
    assert isinstance(place(pool, Ask(1_000, 100.0, max_wait_s=60.0), TARGETS, SETTINGS), Place)


def test_a_worker_full_of_kv_computes_nothing_while_others_have_room() -> None:
    pool = fleet([H100] * 3)
    pool.kv_used[0], pool.kv_promised[0] = 300_000, 99_500
    pool.kv_used[1], pool.work_s[1] = 100_000, 0.1
    pool.work_s[2] = 0.15
    assert placed(pool, 1_000, life_s=5.0).prefill == 1
    assert placed(pool, 400, life_s=5.0).prefill == 0  # it has room for this one
    pool.kv_used[1:] = 400_000  # all are full: where it becomes free soonest
    assert placed(pool, 1_000, life_s=5.0).prefill == 0


def test_kv_that_is_lacking_is_waited_for_as_long_as_rows_live() -> None:
    pool = fleet([H100])
    free_s = placed(pool, 1_000, life_s=8.0).ttft_s
    pool.kv_used[0] = 400_000
    full_s = placed(pool, 1_000, life_s=8.0).ttft_s
    assert full_s - free_s == pytest.approx(8.0 * 1_001 / 400_000)


def test_equals_are_used_in_turn() -> None:
    pool = fleet([H100] * 3)
    pool.last_placed[:] = [7, 5, 6]
    assert placed(pool, 1_000).prefill == 1


def test_what_cannot_send_decodes_what_it_computes_and_computes_what_it_decodes() -> None:
    """A live pool: prefill workers send, decode workers compute for themselves alone."""
    pool = fleet([H100] * 4)
    pool.can_decode[:2] = False
    pool.can_send[2:] = False
    decision = placed(pool, 1_000)
    assert decision.prefill < 2 <= decision.decode  # seconds of a worker that cannot decode are worth less
    pool.work_s[:2] = 1.0  # not in time
    decision = placed(pool, 1_000)
    assert decision.prefill == decision.decode
    pool.can_decode[2] = False  # it must not compute what it may not decode
    assert placed(pool, 1_000) == Place(3, 3, pytest.approx(decision.ttft_s))


def test_a_decode_worker_at_its_target_does_not_compute_for_itself_while_others_are_in_time() -> None:
    pool = fleet([H100] * 3)
    pool.can_decode[0] = False
    pool.can_send[1:] = False
    pool.rows[1], pool.context[1], pool.last_placed[0] = 1_400, 100_000, 9
    pool.rows[2], pool.context[2], pool.last_placed[0] = 1_400, 100_000, 9
    assert placed(pool, 1_000, cached=np.array([0.0, 990.0, 990.0])).prefill == 0


def test_cached_tokens_need_not_move() -> None:
    pool = fleet([H100, H100, H100])
    pool.can_decode[0] = False
    pool.can_prefill[1:] = False
    pool.context[1] = 20_000
    assert placed(pool, 50_000).decode == 2
    pool.bytes_s[:] = 1e9
    assert placed(pool, 50_000, cached=np.array([0.0, 49_000.0, 0.0])).decode == 1


def test_a_measured_edge_decides_between_equals() -> None:
    pool = fleet([H100, H100, H100])
    pool.can_decode[0] = False
    pool.can_prefill[1:] = False
    pool.edges[0] = EdgeRow(np.array([0.0, 0.5, 0.01]), np.array([0.0, 1e-9, 1e-9]))
    assert placed(pool, 5_000).decode == 2
    pool.edges[0].base_s[:] = [0.0, 0.01, 0.5]
    assert placed(pool, 5_000).decode == 1


loads = st.lists(
    st.tuples(st.floats(0, 2), st.integers(0, 300), st.integers(0, 400_000), st.integers(0, 400_000)),
    min_size=1,
    max_size=12,
)


@given(loads, st.integers(1, 300_000), st.floats(1, 2_000), st.booleans())
def test_decisions_are_equal_for_the_same_recorded_view(
    load: list[tuple[float, int, int, int]], num_tokens: int, output: float, is_mixed: bool
) -> None:
    pool = fleet([H20 if is_mixed and index % 2 else H100 for index in range(len(load))])
    for index, (work_s, rows, context, kv_used) in enumerate(load):
        pool.work_s[index], pool.rows[index] = work_s, rows
        pool.context[index], pool.kv_used[index] = context, kv_used
    recorded = pool.copy()
    ask = Ask(num_tokens, output)
    decision = place(pool, ask, TARGETS, SETTINGS)
    assert decision == place(recorded, ask, TARGETS, SETTINGS)
    assert pool.equals(recorded)  # a decision changes nothing


@given(loads, st.integers(1, 100_000))
def test_a_far_worker_is_chosen_only_with_room_for_the_kv_and_within_the_target(
    load: list[tuple[float, int, int, int]], num_tokens: int
) -> None:
    pool = fleet([H100, *[H20] * len(load)])
    for index, (_, rows, context, kv_used) in enumerate(load, 1):
        pool.rows[index], pool.context[index], pool.kv_used[index] = rows, context, kv_used
    chosen = choose_decode(pool, Ask(num_tokens, 200.0), 0, TARGETS, SETTINGS, 0.0)
    if chosen != 0:
        assert pool.kv_used[chosen] + num_tokens <= 400_000


def test_expected_output_is_learned_per_prompt_length() -> None:
    lengths = OutputLengths(prior_tokens=100.0)
    assert lengths.expect(1_000) == 100.0
    for _ in range(500):
        lengths.add(1_000, 400)
        lengths.add(50, 10)
    assert lengths.expect(1_000) == pytest.approx(400, rel=0.05)
    assert lengths.expect(50) == pytest.approx(10, rel=0.9)


AZURE_LIKE = [(1_100, 200), (400, 100), (4_000, 300), (200, 20)] * 5


def test_planner_gives_unequal_kinds_unequal_roles_and_never_less_than_all_doing_both() -> None:
    kinds = [Kind("h100", 8, H100), Kind("h20", 8, H20)]
    best, both = best_roles(kinds, AZURE_LIKE, Targets(0.3, 0.015))
    assert best.rate >= both.rate > 0
    assert sum(best.roles[1].__getattribute__(f"num_{role}") for role in ("prefill", "decode", "both")) == 8
    uniform, plain = best_roles(kinds[:1], AZURE_LIKE, TARGETS)
    assert uniform.rate == pytest.approx(plain.rate, rel=0.05)


def test_a_price_of_mixed_steps_makes_splitting_pay() -> None:
    priced = [Kind("h100", 8, H100, mixed_s=8e-3)]
    best, both = best_roles(priced, AZURE_LIKE, TARGETS)
    assert best.rate > both.rate * 1.1
    assert best.roles[0].num_prefill > 0


def test_an_impossible_target_predicts_nothing() -> None:
    best, both = best_roles([Kind("h100", 2, H100)], AZURE_LIKE, Targets(0.3, 0.004))
    assert best == both
    assert best.rate == pytest.approx(0.0, abs=1e-6)


def test_roles_change_only_for_a_lasting_gain() -> None:
    kinds = [Kind("h100", 8, H100, mixed_s=8e-3)]
    state = PlannerState((Roles(0, 0, 8),))
    planner = Planner(patience=3)
    seen = []
    for _ in range(3):
        state = planner.decide(state, kinds, AZURE_LIKE, TARGETS)
        seen.append(state.roles[0])
    assert seen[:2] == [Roles(0, 0, 8)] * 2
    assert seen[2] != Roles(0, 0, 8)
    assert planner.decide(state, kinds, AZURE_LIKE, TARGETS).roles == state.roles
    works = work_of(AZURE_LIKE, kinds, TARGETS)
    assert predicted_rate(kinds, state.roles, works, TARGETS) > 0
