"""The report against hostile text, values of any kind, and results of other tools."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.report import ReportRun, ReportSearch, render_report
from tests.bench.load.report_data import made_result, make_run
from tests.bench.load.report_page import check

HOSTILE = "</title></svg><script>alert(1)</script><img src=http://x onerror=y>\"'&\x00\ud800"


def test_hostile_names_errors_and_notes_stay_text() -> None:
    run = make_run(2.0, 12, 1, fail_every=2)
    for record in run.records:
        record.error = record.error and HOSTILE
        record.timings = {"queue_ms": HOSTILE, HOSTILE: 1.0}
    changes = {
        "label": HOSTILE,
        "model_id": HOSTILE,
        "notes": [HOSTILE],
        "invalid_reasons": [HOSTILE],
        "valid": False,
        "failures": {HOSTILE: 2},
        "slo_attainment_by_metric": {HOSTILE: 0.5, "ttft": 0.4},
        "slos_ms": {HOSTILE: 3.0},
        "environment": {HOSTILE: HOSTILE, "list": [HOSTILE, {HOSTILE: HOSTILE}]},
        "date": HOSTILE,
    }
    searches = [
        ReportSearch(
            HOSTILE,
            {
                "probes": [{"rate": 1.0, "attainment": 0.5}],
                "answers": [{"rate": 1.0, "target": 0.9, "notes": [HOSTILE]}],
            },
        )
    ]
    arrival = {"kind": HOSTILE, "seed": 1, "rate": 2.0}
    runs = [ReportRun(made_result(**changes, arrival={**arrival, "rate": rate}), run) for rate in (2.0, 3.0)]
    for page in (render_report(runs[:1], searches), render_report(runs, searches)):
        check(page)
        assert "alert(1)</script>" not in page
        assert "&lt;script&gt;alert(1)" in page


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(
        leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3)
    )


@settings(max_examples=30, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(sorted(made_result())), json_values(), max_size=8))
def test_results_with_values_of_any_kind_make_a_page(changes: dict[str, Any]) -> None:
    check(render_report([ReportRun({**made_result(), **changes}), ReportRun(made_result())]))


@settings(max_examples=20, deadline=None)
@given(outcome=st.dictionaries(st.sampled_from(["probes", "answers", "settings"]), json_values(), max_size=3))
def test_searches_with_values_of_any_kind_make_a_page(outcome: dict[str, Any]) -> None:
    check(render_report([], [ReportSearch("t", outcome)]))


def test_a_result_of_vllm_itself_is_read() -> None:
    result = {
        "date": "20260101-000000",
        "backend": "vllm",
        "model_id": "m",
        "num_prompts": 10,
        "request_rate": "inf",
        "max_concurrency": 8,
        "median_ttft_ms": 12.0,
        "p99_ttft_ms": 30.0,
        "output_throughput": 100.0,
    }
    page = render_report([ReportRun(result)])
    check(page)
    assert "closed loop: 8 requests in flight" in page
    assert ">12 ms<" in page
