"""DistServe's coefficients against numbers computed by hand, and its system, restated, against ours."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from bench.simulator.distserve import OPT_13B, DistServeTimes, MixedSteps, learned_model
from bench.simulator.fleet.request import Request
from bench.simulator.golden import __main__ as command
from bench.simulator.golden import reference
from bench.simulator.golden.cases import CASES, TARGETS, Case, Pool, Reference
from bench.simulator.golden.lengths import MOST_TOKENS, NAMES, PAPER_MEANS, sharegpt_like
from bench.simulator.golden.measure import GRID, measure
from bench.simulator.golden.protocol import bisect, passes, rate_per_gpu, requests_at
from bench.simulator.hardware import HANDOFF_S, hardware, parse_pool
from cluster.slo_classes import Targets
from cluster.step_model import StepWork, chunk_attention

TP1, TP2 = DistServeTimes(OPT_13B[1]), DistServeTimes(OPT_13B[2])


def prefill_s(times: DistServeTimes, *prompts: int) -> float:
    return times.step_s(0, 0, sum(prompts), sum(chunk_attention(0, one) for one in prompts))


def test_step_times_are_those_of_the_coefficients() -> None:
    """By hand, to a microsecond; in ms. TP1, a prompt of 1,000: 18.102546 + 101.912257 + 7.122264, 1 for the
    stage, 2 + 0.1 for control. TP1, 50 rows of 800 keys: 19.934703 + 25.077426 + 1.925349 + 2 + 4."""
    assert prefill_s(TP1, 1_000) == pytest.approx(130.237068e-3, abs=1e-6)
    assert prefill_s(TP2, 1_000) == pytest.approx((14.742974 + 68.577207 + 2.449573 + 3.1) / 1e3, abs=1e-6)
    assert TP1.step_s(50, 40_000, 0, 0.0) == pytest.approx(52.937478e-3, abs=1e-6)
    assert TP1.step_s(100, 40_000, 0, 0.0) == pytest.approx(
        (7.166189 + 23.192002 + 15.831096 + 6.0) / 1e3, abs=1e-6
    )
    assert TP1.growth_s(50, 40_000) == pytest.approx(
        TP1.step_s(50, 40_050, 0, 0.0) - TP1.step_s(50, 40_000, 0, 0.0)
    )


def test_prompts_of_one_step_share_the_intercept_and_chunks_pay_it_again() -> None:
    both, first, second = prefill_s(TP1, 300, 500), prefill_s(TP1, 300), prefill_s(TP1, 500)
    intercept_s = 21.102546e-3
    assert both == pytest.approx(first + second - intercept_s, abs=1e-8)
    whole = prefill_s(TP1, 800)
    chunks = first + TP1.step_s(0, 0, 500, chunk_attention(300, 500))
    assert chunks == pytest.approx(whole + intercept_s, abs=1e-8)


def test_a_mixed_step_takes_both_halves_or_reads_the_weights_once() -> None:
    pairs = chunk_attention(0, 256)
    halves = prefill_s(TP2, 256) + TP2.step_s(30, 20_000, 0, 0.0)
    fused = DistServeTimes(OPT_13B[2], MixedSteps.FUSED)
    assert TP2.step_s(30, 20_000, 256, pairs) == pytest.approx(halves)
    assert fused.step_s(30, 20_000, 256, pairs) == pytest.approx(halves - (13.294796 + 2) / 1e3, abs=1e-8)
    assert fused.step_s(30, 20_000, 0, 0.0) == TP2.step_s(30, 20_000, 0, 0.0)


@pytest.mark.parametrize("degree", OPT_13B)
def test_policies_plan_with_a_model_of_the_steps_that_is_as_wrong_as_it_says(degree: int) -> None:
    for mixed in MixedSteps:
        times = DistServeTimes(OPT_13B[degree], mixed)
        model = learned_model(times)
        for rows, keys, chunk in ((32, 855, 0), (64, 855, 0), (0, 0, 1024), (16, 855, 512), (64, 855, 32)):
            context, pairs = rows * keys, chunk_attention(0, chunk)
            planned = model.step_s(StepWork(rows + chunk, context, pairs))
            assert planned == pytest.approx(times.step_s(rows, context, chunk, pairs), rel=0.11)


def test_a_kind_by_name_has_those_times() -> None:
    assert [kind.name for kind in parse_pool("distserve-opt13b-tp2:1,distserve-opt13b-tp1:2", None)] == [
        "distserve-opt13b-tp2",
        *["distserve-opt13b-tp1"] * 2,
    ]
    kind = hardware("distserve-opt13b-tp4-fused")
    assert kind.times == DistServeTimes(OPT_13B[4], MixedSteps.FUSED)
    assert kind.kv_tokens == 356_736
    assert kind.step_s(1, 500, 0, 0.0) == pytest.approx(12.432860e-3, abs=1e-6)


def test_the_restated_system_takes_what_waits_in_one_step_and_rows_take_turns() -> None:
    first, second, third = Request(0, 0.0, 400, 3), Request(1, 0.01, 600, 2), Request(2, 0.02, 100, 2)
    reference.serve([first, second, third], TP2, TP1, most_keys=1_000)
    first_s = prefill_s(TP2, 400)
    assert first.first_s == pytest.approx(first_s)
    assert second.first_s == third.first_s == pytest.approx(first_s + prefill_s(TP2, 600, 100))
    steps = [TP1.step_s(1, 401, 0, 0.0), TP1.step_s(1, 402, 0, 0.0)]
    assert first.finish_s == pytest.approx(first_s + sum(steps))
    early, late = Request(0, 0.0, 600, 3), Request(1, 0.0, 600, 3)  # 1,202 keys: one row in a step
    reference.serve([early, late], TP2, TP1, most_keys=1_000)
    one, two = TP1.step_s(1, 601, 0, 0.0), TP1.step_s(1, 602, 0, 0.0)
    assert early.first_s is not None
    assert early.finish_s == pytest.approx(early.first_s + 2 * one + two)
    assert late.finish_s == pytest.approx(early.first_s + 2 * one + 2 * two)


def test_alone_a_request_takes_the_same_in_ours_but_for_the_handoff() -> None:
    [ours] = [case for case in CASES if case.name == "ours, their placement, keys as the memory allows"]
    theirs, mine = Request(0, 0.5, 700, 40), Request(0, 0.5, 700, 40)
    Reference("").serve([theirs])
    ours.serve([mine])
    assert mine.first_s == pytest.approx(theirs.first_s)
    assert theirs.finish_s is not None
    assert mine.finish_s == pytest.approx(theirs.finish_s + HANDOFF_S)


@pytest.mark.parametrize("mixed", ["sum", "fused"])
def test_elastic_keeps_decode_off_the_worker_that_first_tokens_need(mixed: str) -> None:
    """At a rate where DistServe's placement has 90 % in time, elastic has as many, and most answers are
    where that placement has them."""
    [theirs] = [case for case in CASES if case.name == "ours, the same with KV over NVLink"]
    [ours] = [case for case in CASES if case.name == f"elastic, TP2 + TP1, mixed steps: {mixed}"]
    rows = sharegpt_like("paper", 1_000)
    shares = []
    for case in (theirs, ours):
        requests = requests_at(rows, 4.3, 500, seed=1)
        case.serve(requests)
        first_s = [(one.first_s or 0.0) - one.arrival_s for one in requests]
        good = [
            late <= TARGETS.ttft_s and one.tpot_s <= TARGETS.tpot_s
            for late, one in zip(first_s, requests, strict=True)
        ]
        shares.append(sum(good) / len(good))
    assert shares[1] > shares[0] - 0.01
    assert sum(one.decode_at == 1 for one in requests) > 0.8 * len(requests)


def test_without_overload_our_simulator_gives_the_restated_system_s_quantiles() -> None:
    rows = sharegpt_like("paper", 400)
    [ours] = [case for case in CASES if case.name == "ours, their placement, keys as the memory allows"]
    found = []
    cases: list[Case] = [Reference(""), ours]
    for case in cases:
        requests = requests_at(rows, 3.0, 150, seed=1)
        case.serve(requests)
        ttfts = [request.first_s - request.arrival_s for request in requests if request.first_s is not None]
        tpots = [request.tpot_s for request in requests]
        found.append([np.percentile(values, share) for values in (ttfts, tpots) for share in (50, 90)])
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_more_load_is_never_faster() -> None:
    rows = sharegpt_like("paper", 400)
    cases: list[Case] = [Reference(""), Pool("", (2, 1), "static:1p1d:163008"), Pool("", (1, 1), "elastic")]
    for case in cases:
        waits = []
        for rate in (0.5, 3.0, 12.0):
            requests = requests_at(rows, rate, 100, seed=2)
            case.serve(requests)
            waits.append(fmean((one.finish_s or 1e9) - one.arrival_s for one in requests))
        assert all(less < more for less, more in pairwise(waits)), (case, waits)


def test_the_search_ends_on_their_grid() -> None:
    assert bisect(lambda rate: rate <= 1.6) == 1.5625
    assert bisect(lambda rate: rate <= 1.71) == 1.5625
    assert bisect(lambda rate: rate <= 1.72) == 1.71875
    assert bisect(lambda rate: False) == 0.0
    fine = bisect(lambda rate: rate <= 1.71, width=0.02)
    assert fine == pytest.approx(1.71, abs=0.02)
    assert fine // GRID * GRID == 1.5625


def test_looser_targets_allow_no_less_and_a_run_that_does_not_end_fails() -> None:
    rows = sharegpt_like("paper", 400)
    rates = [
        rate_per_gpu(Reference("").serve, rows, 3, Targets(scale * 0.2, scale * 0.1), 0, num_requests=100)
        for scale in (0.5, 1.0, 2.0)
    ]
    assert 0 <= rates[0] <= rates[1] <= rates[2] <= 5
    assert rates[0] < rates[2]
    assert not passes([Request(0, 0.0, 10, 2)], TARGETS)


def test_a_case_is_measured_in_both_ways() -> None:
    rows = sharegpt_like("paper", 400)
    result = measure(Pool("one", (1, 1), "static:1p1d:163008", is_link_free=True), rows, 1, 0)
    assert result["printed_per_seed"][0] <= result["fine_per_seed"][0] < result["printed_per_seed"][0] + GRID
    assert result["num_gpus"] == 2


@pytest.mark.parametrize("name", NAMES)
def test_lengths_are_within_the_limit_and_two_kinds_have_the_paper_s_means(name: str) -> None:
    rows = sharegpt_like(name, 20_000)
    assert len(rows) == 20_000
    assert all(row.input_tokens + row.output_tokens <= MOST_TOKENS for row in rows)
    means = fmean(row.input_tokens for row in rows), fmean(row.output_tokens for row in rows)
    assert (means == pytest.approx(PAPER_MEANS, rel=0.02)) == (name != "gpt4")
    assert rows == sharegpt_like(name, 20_000)


def test_the_command_keeps_what_is_done_and_measures_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = Reference("one"), Reference("other", 1, 1)
    monkeypatch.setattr(command, "NUM_ROWS", 400)
    out = tmp_path / "golden.json"
    for cases in ((one,), (one, other)):
        monkeypatch.setattr(command, "TABLES", (command.Table("A table", "paper", cases),))
        assert command.main(["--seeds", "1", "--out", str(out), "--resume"]) == 0
        if cases == (one,):
            saved = json.loads(out.read_bytes())
            saved["results"][0]["fine_per_seed"] = [9.0]
            out.write_text(json.dumps(saved))
    shown = capsys.readouterr().out
    assert "9.00 to 9.00" in shown
    results = json.loads(out.read_bytes())["results"]
    assert [result["case"] for result in results] == ["one", "other"]
    with pytest.raises(SystemExit):
        command.main(["--resume"])
