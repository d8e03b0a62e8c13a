"""The fleet simulation: conservation, exact times of tiny runs, determinism, and the limits of policies."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.figures.slo import parse_slos
from bench.load.plans.trace_formats import TraceRow
from bench.simulator.fleet.elastic import ElasticPolicy
from bench.simulator.fleet.fixed import FixedPolicy, FixedSettings
from bench.simulator.fleet.policies import parse_policy
from bench.simulator.fleet.request import Request
from bench.simulator.fleet.search import find_best, max_goodput, rates
from bench.simulator.fleet.simulation import Simulation
from bench.simulator.fleet.trial import Setup, impossible, run_trial
from bench.simulator.fleet.worker import PrefixCache, Worker
from bench.simulator.fleet.workload import make_requests
from bench.simulator.hardware import HANDOFF_S, KINDS, Hardware
from cluster.slo_classes import Targets
from cluster.step_model import StepModel, StepWork

H100, H20 = KINDS["h100-llama3-8b"], KINDS["h20-llama3-8b"]
TARGETS = Targets(0.5, 0.025)


def rows(count: int, seed: int = 0, longest: int = 3_000) -> list[TraceRow]:
    draw = random.Random(seed)
    return [TraceRow(index / 5, draw.randint(1, longest), draw.randint(1, 300)) for index in range(count)]


def serve(pool: Sequence[Hardware], requests: list[Request], policy: Any, until_s: float = 1e9) -> Simulation:
    simulation = Simulation(pool, requests, policy, TARGETS.tpot_s)
    simulation.run(until_s)
    return simulation


def step_s(tokens: int, context: int = 0, attention: float = 0.0) -> float:
    return H100.model.step_s(StepWork(tokens, context, attention))


def test_one_request_alone_takes_the_sum_of_its_steps() -> None:
    request = Request(0, 1.0, 300, 4)
    serve([H100], [request], FixedPolicy(FixedSettings(512)))
    first = 1.0 + step_s(300, 0, 300 * 301 / 2)
    assert request.first_s == pytest.approx(first, rel=1e-12)
    decode = [step_s(1, 301), step_s(1, 302), step_s(1, 303)]
    assert request.finish_s == pytest.approx(first + sum(decode), rel=1e-12)
    assert request.worst_gap_s == pytest.approx(decode[-1], rel=1e-6)


def test_a_static_split_moves_the_kv_and_the_gap_shows_it() -> None:
    request = Request(0, 0.0, 1_000, 3)
    simulation = serve([H100, H100], [request], FixedPolicy(FixedSettings(4_096, num_prefill=1)))
    moved_s = 1_000 * 131_072 / 50e9 + HANDOFF_S
    assert request.first_s is not None
    assert request.worst_gap_s == pytest.approx(moved_s + step_s(1, 1_001), rel=1e-9)
    assert simulation.transferred_bytes == 1_000 * 131_072


def test_an_arrival_cuts_a_run_of_decode_steps_at_the_end_of_its_current_step() -> None:
    early, late = Request(0, 0.0, 100, 1_000), Request(1, 1.0001, 100, 2)
    serve([H100], [early, late], FixedPolicy(FixedSettings(512)))
    assert late.first_s is not None
    wait_s = late.first_s - late.arrival_s
    assert step_s(101) * 0.9 <= wait_s <= step_s(1, 400) + step_s(101, 400, 5_050) * 1.01


POLICIES = ["elastic", "colocated:256", "colocated:512:srf:rr", "static:1p2d", "static:2p1d:rr:srf:1000"]


@pytest.mark.parametrize("text", POLICIES)
@given(st.integers(0, 10_000), st.floats(5, 400), st.integers(4_000, 40_000))
@settings(max_examples=8)
def test_no_policy_exceeds_kv_or_starves_a_request(text: str, seed: int, rate: float, kv_tokens: int) -> None:
    small = [
        Hardware(k.name, k.model, kv_tokens, k.kv_bytes_per_token, k.link_bytes_s) for k in (H100, H100, H20)
    ]
    requests = make_requests(rows(200, seed), rate, 150, seed)
    policy = parse_policy(text, 3).make(TARGETS, True)
    watched = _Watched(policy)
    serve(small, requests, watched)
    assert all(request.finish_s is not None or request.is_rejected for request in requests)
    assert all(
        request.num_prompt + request.num_output > kv_tokens for request in requests if request.is_rejected
    )
    assert all(worker.kv_used == 0 and worker.rows == 0 and worker.context == 0 for worker in watched.workers)


class _Watched:
    """Passes everything on and checks each worker's KV before each step."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.workers: Sequence[Worker] = ()

    def attach(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self._policy.attach(workers)

    def is_waiting(self, worker: Worker) -> bool:
        assert 0 <= worker.kv_used <= worker.hardware.kv_tokens, (worker.index, worker.kv_used)
        return bool(self._policy.is_waiting(worker))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@pytest.mark.parametrize("text", POLICIES)
def test_equal_seeds_give_equal_runs(text: str) -> None:
    def run(seed: int) -> list[tuple[float | None, float | None, float]]:
        requests = make_requests(rows(300), 120.0, 300, seed)
        serve([H100, H100, H20], requests, parse_policy(text, 3).make(TARGETS, True))
        return [(one.first_s, one.finish_s, one.worst_gap_s) for one in requests]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_below_saturation_elastic_demotes_nobody_and_meets_everything() -> None:
    setup = Setup(rows(400), [H100] * 4, parse_policy("elastic", 4), parse_slos("ttft=0.5s,tpot=25ms"))
    outcome = run_trial(setup, 40.0, 0)
    assert outcome.attainment == 1.0
    assert outcome.num_finished == outcome.num_offered


def test_elastic_serves_more_than_a_fixed_chunk_under_overload() -> None:
    def attainment(text: str) -> float:
        slos = parse_slos("ttft=0.3s,tpot=12ms")
        return run_trial(Setup(rows(500), [H100] * 2, parse_policy(text, 2), slos, 20.0), 62.0, 0).attainment

    assert attainment("elastic") > attainment("colocated:512") + 0.1


def test_gap_limit_is_kept_by_elastic() -> None:
    slos = parse_slos("ttft=1s,tpot=25ms,gap=30ms")
    setup = Setup(rows(400), [H100] * 2, parse_policy("elastic", 2), slos, 20.0)
    outcome = run_trial(setup, 40.0, 0)
    assert outcome.attainment_by_metric["gap"] > 0.95


def test_mixed_steps_cost_what_the_hardware_says() -> None:
    model = msgspec.structs.replace(H100.model, mixed_s=1.0)
    priced = Hardware("priced", model, 10**6, 1, 1e12)
    early, late = Request(0, 0.0, 100, 50), Request(1, 0.02, 100, 1)
    serve([priced], [early, late], FixedPolicy(FixedSettings(512)))
    assert early.worst_gap_s > 1.0


def test_prefix_cache_keeps_the_latest_and_counts_only_prefixes() -> None:
    cache = PrefixCache()
    cache.touch((1, 2, 3), 4)
    assert cache.match((1, 2, 9)) == 2
    assert cache.match((2, 3)) == 2
    assert cache.match((9, 1)) == 0
    cache.touch((7, 8), 4)
    assert len(cache) == 4
    assert cache.match((1, 2, 3)) == 2  # the tail of the older prompt went first


def test_cached_prefixes_are_not_computed_again() -> None:
    shared = tuple(range(8))
    requests = [Request(index, index * 2.0, 4_200, 2, shared) for index in range(3)]
    simulation = serve([H100, H100], requests, ElasticPolicy(TARGETS))
    assert simulation.num_cached_tokens == 2 * 8 * 512
    assert requests[1].first_s is not None
    assert requests[0].first_s is not None
    assert requests[1].first_s - 2.0 < requests[0].first_s / 3


def test_the_search_brackets_the_rate_and_the_best_of_many_is_found() -> None:
    slos = parse_slos("ttft=0.5s,tpot=25ms")
    setup = Setup(rows(400), [H100], parse_policy("colocated:512", 1), slos, 5.0)
    found, outcomes = max_goodput(setup, (0,))
    rate = rates(found)[0]
    assert {one.attainment >= 0.9 for one in outcomes if one.rate == rate} == {True}
    policies = [parse_policy(text, 1) for text in ("colocated:64", "colocated:512")]
    best, best_rate = find_best(setup, policies, 0)
    assert best.text == "colocated:512"
    assert best_rate == pytest.approx(rate, rel=0.07)


def test_impossible_targets_are_told() -> None:
    slow = Setup(rows(10), [H100, H20], parse_policy("elastic", 2), parse_slos("ttft=1s,tpot=5.5ms"))
    assert [sentence.split(":")[0] for sentence in impossible(slow)] == ["h100-llama3-8b"]
    late = Setup(rows(10), [H100], parse_policy("elastic", 1), parse_slos("ttft=1ms,tpot=25ms"))
    assert "TTFT" in impossible(late)[0]
    assert run_trial(late, 5.0, 0).attainment == 0.0


def test_a_tiny_run_is_pinned() -> None:
    """Golden: changes of the model of steps, transfers or policies show here first."""
    model = StepModel(1e-3, 4e-3, 20e-6, 50e-9, 1e-9)
    pool = [Hardware("tiny", model, 50_000, 100_000, 10e9)] * 2
    requests = [Request(index, index * 0.01, 400 + 100 * index, 5) for index in range(4)]
    serve(pool, requests, ElasticPolicy(Targets(0.2, 0.02)))
    assert [round(one.first_s or 0, 5) for one in requests] == [0.00908, 0.02113, 0.03736, 0.04647]
    assert [round(one.finish_s or 0, 5) for one in requests] == [0.03736, 0.05153, 0.05748, 0.06663]
