import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.figures.metrics import summarize
from bench.load.figures.slo import parse_slos
from bench.load.plan import Arrival
from bench.load.records import RunRecord
from bench.load.results.compare import (
    Comparison,
    Row,
    as_dict,
    as_text,
    compare_results,
    plain,
    ratio_text,
)
from bench.load.results.likeness import differences, in_words
from bench.load.results.result import build_result
from cluster.errors import BatonError
from tests.bench.load.load_values import plan_of, run_of, steady_run


def result_of(
    run: RunRecord, label: str, slos: str = "ttft=200ms", arrival: Arrival | None = None
) -> dict[str, Any]:
    summary = summarize(run, parse_slos(slos))
    return build_result(plan_of(run, arrival), run, summary, {"num_cores": 2}, label=label)


def row(comparison: Comparison, key: str) -> Row:
    (found,) = [one for one in comparison.rows if one.metric.key == key]
    return found


FAST = result_of(steady_run(ttft_s=0.1, tpot_s=0.01), "fast")
WARM = "without 2 s of warm-up and 0 s of cool-down: requests scheduled from 2.000 s to 9.900 s"
SLOW = result_of(steady_run(ttft_s=0.3, tpot_s=0.02), "slow")


def test_ratios_to_the_first_and_which_is_better() -> None:
    found = compare_results([SLOW, FAST])
    assert found.labels == ("slow", "fast")
    ttft = row(found, "median_ttft_ms")
    assert ttft.values == (pytest.approx(300.0), pytest.approx(100.0))
    assert ttft.ratios == (1.0, pytest.approx(1 / 3))
    assert (ttft.verdict(0), ttft.verdict(1)) == ("", "better")
    through = row(found, "output_throughput")
    assert through.ratios[1] == pytest.approx(FAST["output_throughput"] / SLOW["output_throughput"])
    assert through.verdict(1) == "better"
    assert row(compare_results([FAST, SLOW]), "median_ttft_ms").verdict(1) == "worse"
    assert row(compare_results([FAST, SLOW]), "per_core.output_throughput").verdict(1) == "worse"


def test_a_ratio_that_does_not_exist_is_none() -> None:
    found = compare_results([SLOW, FAST])  # nothing of the slow run met the SLO
    good = row(found, "request_goodput")
    assert good.values[0] == 0
    assert good.ratios == (None, None)
    assert good.verdict(1) == ""
    missing = compare_results([FAST, {**SLOW, "median_ttft_ms": None}])
    assert row(missing, "median_ttft_ms").ratios == (1.0, None)


def test_equal_work_has_no_warnings() -> None:
    assert compare_results([FAST, FAST]).warnings == ()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model_id": "other"}, "model"),
        ({"workload": {**FAST["workload"], "kind": "lognormal"}}, "the workload: kind: fixed → lognormal"),
        ({"slos_ms": {"ttft": 1.0}}, "the SLOs (ms): ttft: 200.0 → 1.0"),
        ({"num_cores": 64}, "cores"),
        ({"arrival": {**FAST["arrival"], "seed": 8}}, "the seeds: arrivals: 7 → 8"),
        ({"workload": {**FAST["workload"], "seed": 8}}, "the seeds: workload: none → 8"),
        ({"window": {**FAST["window"], "rule": WARM}}, "the measured window: whole run → without 2 s of"),
        ({"arrival": {**FAST["arrival"], "rate": 11.0}}, "the arrivals: rate: 10.0 → 11.0"),
        ({"trace": {"sha256": "aa", "speedup": 1.0, "num_rows": 5}}, "trace"),
        ({"window": {**FAST["window"], "num_run_offered": 5}}, "number of requests"),
    ],
)
def test_unlike_runs_warn(change: dict[str, Any], what: str) -> None:
    (warning,) = compare_results([FAST, {**FAST, "label": "other", **change}]).warnings
    assert warning.startswith("`fast` and `other` differ in the ")
    assert what in warning


@pytest.mark.parametrize(
    ("change", "is_judged"),
    [
        ({"model_id": "other"}, False),
        ({"workload": {**FAST["workload"], "kind": "lognormal"}}, False),
        ({"arrival": {**FAST["arrival"], "rate": 11.0}}, False),
        ({"arrival": {**FAST["arrival"], "kind": "closed-loop", "rate": None, "closed_loop": 4}}, False),
        ({"trace": {"sha256": "aa", "speedup": 1.0, "num_rows": 5}}, False),
        ({"arrival": {**FAST["arrival"], "seed": 8}}, False),
        ({"workload": {**FAST["workload"], "seed": 8}}, False),
        ({"window": {**FAST["window"], "num_run_offered": 5}}, False),
        ({"window": {**FAST["window"], "rule": WARM}}, False),
        ({"num_cores": 64}, True),
        ({"slos_ms": {"ttft": 1.0}}, True),
    ],
)
def test_what_was_offered_is_no_merit(change: dict[str, Any], is_judged: bool) -> None:
    found = compare_results([SLOW, {**FAST, **change}])
    ttft = row(found, "median_ttft_ms")
    assert ttft.ratios[1] == pytest.approx(1 / 3)
    assert ttft.verdict(1) == ("better" if is_judged else "")
    assert found.is_judged is is_judged
    text = as_text(found)
    assert "×0.33" in text
    assert ("(better)" in text) is is_judged
    assert ("no ratio between them is better or worse" in text) is not is_judged
    both = compare_results([SLOW, {**FAST, **change}, FAST])
    assert row(both, "median_ttft_ms").verdict(2) == "better"


def test_what_every_run_draws_anew_is_no_difference() -> None:
    again = {**FAST, "workload": {**FAST["workload"], "salt": 9, "num_requests": 3}}
    assert compare_results([{**FAST, "workload": {**FAST["workload"], "salt": 8}}, again]).warnings == ()


def test_a_steady_window_is_the_same_one_wherever_it_fell() -> None:
    rule = "steady window: without {} s at each side of the offering (p90 of E2E over 9 requests): requests"
    runs = [
        {**one, "window": {**one["window"], "rule": rule.format(i)}} for i, one in enumerate((SLOW, FAST))
    ]
    assert compare_results(runs).warnings == ()


def test_differences_are_named_by_path_and_never_read_the_same() -> None:
    one = {"output": {"tokens": 64, "kind": "fixed"}, "deep": {"text": "x" * 500 + "a"}, "only": 1}
    other = {"output": {"tokens": 16, "kind": "fixed"}, "deep": {"text": "x" * 500 + "b"}}
    told = differences(one, other)
    assert told[0] == "output.tokens: 64 → 16"
    left, right = told[1].removeprefix("deep.text: ").split(" → ")
    assert left != right
    assert max(len(left), len(right)) <= 62
    assert told[2:] == ["only: 1 → none"]
    assert differences(5, 7) == ["5 → 7"]
    assert differences(one, one) == []
    assert in_words([str(i) for i in range(9)]) == "0, 1, 2, 3, 4, 5, and 3 more"


@given(st.text(max_size=200), st.text(max_size=200))
def test_a_cut_difference_is_a_difference(one: str, other: str) -> None:
    for told in differences({"k": one}, {"k": other}):
        left, _, right = told.removeprefix("k: ").partition(" → ")
        assert left != right or " → " in one + other


@pytest.mark.parametrize(
    ("value", "text"),
    [(11290, "11,290"), (123.45, "123.5"), (0.000123, "0.000123"), (0.0, "0"), (7.0, "7"), (300.0, "300")],
)
def test_numbers_have_no_exponent(value: float, text: str) -> None:
    assert plain(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.05, "×1/20"), (1.5, "×1.50"), (20.3, "×20"), (0.33, "×0.33"), (0.0, "×0.00")]
)
def test_ratios_read_as_factors(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text


def test_an_invalid_run_warns_with_its_reasons() -> None:
    bad = {**FAST, "label": "bad", "valid": False, "invalid_reasons": ["The client sent late: 9 ms."]}
    (warning,) = compare_results([FAST, bad]).warnings
    assert warning == "`bad` is not valid, so it is not judged: The client sent late: 9 ms."


@pytest.mark.parametrize("invalid", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_nothing_is_judged_by_an_invalid_run(invalid: tuple[int, ...]) -> None:
    """Its values are shown; ratios and verdicts are left to the runs that may be believed."""
    runs = [{**one, "label": name} for one, name in ((SLOW, "a"), (FAST, "b"), (FAST, "c"))]
    for index in invalid:
        runs[index] |= {"valid": False, "invalid_reasons": ["It lagged."]}
    found = compare_results(runs)
    assert found.valid == tuple(index not in invalid for index in range(3))
    for one in found.rows:
        for index in range(3):
            is_judged = index not in invalid and 0 not in invalid
            assert one.values[index] is not None
            if not is_judged:
                assert (one.ratios[index], one.verdict(index)) == (None, "")
    judged = {index for one in found.rows for index in (1, 2) if one.verdict(index)}
    assert judged == (set() if 0 in invalid else {1, 2} - set(invalid))
    header = as_text(found).splitlines()[0]
    assert header.count("(INVALID)") == len(invalid)
    told = [warning for warning in found.warnings if "is not valid" in warning]
    assert [warning[1] for warning in told] == ["abc"[index] for index in invalid]
    assert all(warning.endswith("It lagged.") for warning in told)
    assert as_dict(found)["valid"] == list(found.valid)


@pytest.mark.parametrize("cut", [0, 1])
def test_an_incomplete_run_is_marked_and_nothing_is_judged_by_it(cut: int) -> None:
    runs = [{**one, "label": name} for one, name in ((SLOW, "a"), (FAST, "b"), (FAST, "c"))]
    runs[cut]["is_complete"] = False
    found = compare_results(runs)
    assert found.complete == tuple(index != cut for index in range(3))
    judged = {index for one in found.rows for index in (1, 2) if one.ratios[index] is not None}
    assert judged == (set() if cut == 0 else {2})
    text = as_text(found)
    assert text.splitlines()[0].count("(INCOMPLETE)") == 1
    (warning,) = [one for one in found.warnings if "incomplete" in one]
    assert "before everything planned was offered" in warning
    assert as_dict(found)["complete"] == list(found.complete)
    runs[cut]["valid"] = False
    assert "(INVALID, INCOMPLETE)" in as_text(compare_results(runs)).splitlines()[0]


def test_where_nothing_can_be_judged_it_says_so() -> None:
    bad = {**FAST, "label": "bad", "valid": False, "invalid_reasons": ["It lagged."]}
    nothing = result_of(run_of([]), "nothing")
    for runs in (
        [bad, FAST],
        [FAST, bad],
        [bad, bad],
        [{**FAST, "is_complete": False}, SLOW],
        [FAST, nothing],
    ):
        found = compare_results(runs)
        assert not found.is_judged
        assert as_dict(found)["is_judged"] is False
        last = as_text(found).splitlines()[-1]
        assert last == f"Nothing could be judged against `{found.labels[0]}`."
    assert compare_results([FAST, bad, SLOW]).is_judged
    assert "Nothing could be judged" not in as_text(compare_results([FAST, bad, SLOW]))


def test_a_caution_of_a_run_is_passed_on() -> None:
    caution = "The server went away after 3.0 s."
    found = compare_results([FAST, {**SLOW, "cautions": [caution]}])
    assert found.warnings[-1] == f"`slow`, caution: {caution}"


def test_goodput_under_other_slos_is_another_figure() -> None:
    """It is shown, and not judged; what does not depend on SLOs is."""
    found = compare_results([FAST, {**SLOW, "slos_ms": {"ttft": 9000.0}}])
    for key in ("request_goodput", "slo_attainment", "token_goodput"):
        one = row(found, key)
        assert one.ratios[1] is None
        assert one.values[1] is not None
    assert row(found, "median_ttft_ms").ratios[1] is not None
    assert any("differ in the SLOs" in warning for warning in found.warnings)


def test_a_run_without_answers_compares() -> None:
    nothing = result_of(run_of([]), "nothing")
    found = compare_results([nothing, FAST])
    assert row(found, "median_ttft_ms").ratios == (None, None)
    assert any("no request that ended OK" in warning for warning in found.warnings)
    assert "–" in as_text(found)


def test_labels() -> None:
    assert compare_results([FAST, FAST, SLOW]).labels == ("fast", "fast #2", "slow")
    assert compare_results([FAST, SLOW], ["a", "b"]).labels == ("a", "b")
    assert compare_results([{**FAST, "label": None}, SLOW]).labels == ("openai", "slow")


def test_what_cannot_be_compared() -> None:
    with pytest.raises(BatonError, match="two or more"):
        compare_results([FAST])
    with pytest.raises(BatonError, match="1 labels for 2"):
        compare_results([FAST, FAST], ["a"])


def test_text_is_an_aligned_table() -> None:
    text = as_text(compare_results([SLOW, {**FAST, "model_id": "x" * 500}]))
    header, rule, *lines = text.splitlines()
    assert header.split() == ["slow", "fast"]
    assert set(rule) == {"-", " "}
    column = header.index("slow")
    (ttft,) = [line for line in lines if line.startswith("TTFT median (ms)")]
    assert ttft[column:].split() == ["300", "100", "×0.33"]
    (warning,) = [line for line in lines if line.startswith("warning:")]
    assert len(warning) < 300


def test_dict_is_json() -> None:
    found = as_dict(compare_results([SLOW, FAST]))
    json.dumps(found, allow_nan=False)
    (ttft,) = [one for one in found["rows"] if one["metric"] == "p99_ttft_ms"]
    assert ttft["better"] == "lower"
    assert ttft["unit"] == "ms"
    assert ttft["ratios"][1] == pytest.approx(1 / 3)
