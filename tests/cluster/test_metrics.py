"""Every series there should be is there; whatever a dashboard or an alert names exists, labels included."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.ids import WorkerId
from cluster.latency_targets import LatencyTargets
from cluster.metrics import Metrics, Outcome, RequestRecord, new_metrics
from cluster.wire.messages import Role, WorkerLoad

ROOT = Path(__file__).resolve().parents[2]
P, D = WorkerId("prefill-0"), WorkerId("decode-0")
LOAD = WorkerLoad(
    running=3, waiting=2, blocks_used=30, blocks_cached=10, blocks_free=60, steps=5, borrowed_pieces=40,
    drafts=9, right_drafts=6,
)  # fmt: skip
GOOD = RequestRecord(
    Outcome.STOP, 10, 4, 5, 1, 1.2, ttft_s=0.3, tpot_s=0.05,
    queue_s=0.1, prefill_s=0.2, kv_transfer_s=0.01, decode_s=0.9,
)  # fmt: skip
REFUSED = RequestRecord(Outcome.OVERLOADED, 0, 0, 0, 0, 0.001)

Samples = dict[str, list[tuple[dict[str, str], float]]]


def metrics(**settings: Any) -> Metrics:
    """All that can happen has happened once."""
    made = new_metrics("1", "m", LatencyTargets(ttft_s=0.5, tpot_s=0.1), block_size=32, **settings)
    made.observe_request(GOOD)
    made.observe_request(REFUSED)
    made.observe_token_gap(0.05)
    made.observe_http("/metrics", 200)
    made.observe_router(ready=True, in_flight=9, queued=1)
    made.observe_stale({"epoch": 2})
    made.observe_worker(P, Role.PREFILL, "ready", WorkerLoad(waiting=1, blocks_free=5))
    made.observe_worker(D, Role.DECODE, "ready", LOAD)
    return made


def samples(made: Metrics) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(made.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    [number] = [number for seen, number in found[name] if labels.items() <= seen.items()]
    return number


def test_targets_are_counted_for_every_request_that_says_something_of_us() -> None:
    made = metrics()
    for outcome in (Outcome.CLIENT_LEFT, Outcome.INVALID):
        made.observe_request(RequestRecord(outcome, 5, 0, 3, 1, 1.0, ttft_s=9.0))
    made.observe_request(RequestRecord(Outcome.LENGTH, 5, 0, 3, 1, 1.0, ttft_s=0.4, tpot_s=0.2))
    made.observe_request(RequestRecord(Outcome.LENGTH, 5, 0, 1, 1, 1.0, ttft_s=0.4))  # one token
    made.observe_request(RequestRecord(Outcome.WORKER_LOST, 5, 0, 3, 3, 1.0, ttft_s=0.4, tpot_s=0.01))
    found = samples(made)
    counted = {
        (labels["slo"], labels["outcome"]): number for labels, number in found["baton_slo_requests_total"]
    }
    assert counted == {
        ("ttft", "met"): 4, ("ttft", "missed"): 1,
        ("tpot", "met"): 2, ("tpot", "missed"): 3,
        ("both", "met"): 2, ("both", "missed"): 3,
    }  # fmt: skip
    assert value(found, "baton_goodput_requests_total") == 2


def test_decisions_and_rejections() -> None:
    made = metrics()
    made.observe_request(RequestRecord(Outcome.STOP, 5, 0, 3, 2, 1.0, ttft_s=0.1, local_prefill=True))
    found = samples(made)
    decisions = {
        (labels["outcome"], labels["reason"]): number
        for labels, number in found["baton_route_decisions_total"]
        if number
    }
    assert decisions == {("remote", "first"): 1, ("local", "retry"): 1, ("rejected", "overloaded"): 1}
    assert value(found, "baton_admission_rejected_total", reason="overloaded") == 1
    assert value(found, "baton_admission_rejected_total", reason="not_ready") == 0


def test_the_series_of_a_worker() -> None:
    made = metrics()
    found = samples(made)
    assert value(found, "baton_kv_cache_usage_perc", worker=D) == 0.3
    assert value(found, "baton_worker_requests_running", worker=D) == 3
    assert value(found, "baton_cache_config_info", worker=D, block_size="32", num_blocks="100") == 1
    made.observe_worker(
        D, Role.DECODE, "stuck", WorkerLoad(blocks_free=50, steps=2, borrowed_pieces=4)
    )  # restarted, smaller
    found = samples(made)
    assert value(found, "baton_cache_config_info", worker=D) == 1
    assert value(found, "baton_worker_steps_total", worker=D) == 7  # 5, and 2 since the restart
    assert value(found, "baton_engine_borrowed_pieces_total", worker=D) == 44
    assert value(found, "baton_spec_decode_num_draft_tokens_total") == 9
    assert value(found, "baton_spec_decode_num_accepted_tokens_total") == 6
    assert value(found, "baton_worker_state", worker=D, state="stuck") == 1
    made.forget_worker(D)
    made.forget_worker(D)
    assert made.known_workers() == {P}
    assert not [
        name for name, rows in samples(made).items() for labels, _ in rows if labels.get("worker") == D
    ]


def test_the_number_of_series_does_not_grow_with_requests() -> None:
    made = metrics()
    before = sum(map(len, samples(made).values()))
    for number in range(500):
        made.observe_request(
            RequestRecord(Outcome.STOP, number, 0, 1 + number, 1, 0.01 * number, ttft_s=0.01)
        )
        made.observe_http("other", 404)
    assert sum(map(len, samples(made).values())) == before + 2  # that route and its creation time


# ---- vLLM's names --------------------------------------------------------------------------------


def test_vllm_names_are_there_only_when_asked_for() -> None:
    assert not [name for name in samples(metrics()) if name.startswith("vllm:")]


def test_vllm_names_say_the_same() -> None:
    """What the Gateway API's model-server protocol asks for, and what dashboards read."""
    found = samples(metrics(vllm_names=True))
    one = {"model_name": "m", "engine": "0"}
    assert value(found, "vllm:num_requests_waiting", **one) == 4  # 1 in the router, 2 and 1 at workers
    assert value(found, "vllm:num_requests_running", **one) == 5  # 9 in flight less those
    assert value(found, "vllm:kv_cache_usage_perc", **one) == 0.3
    assert value(found, "vllm:cache_config_info", block_size="32", num_gpu_blocks="100", **one) == 1
    for ours, theirs in (
        ("baton_ttft_seconds", "vllm:time_to_first_token_seconds"),
        ("baton_tpot_seconds", "vllm:request_time_per_output_token_seconds"),
        ("baton_itl_seconds", "vllm:inter_token_latency_seconds"),
        ("baton_e2e_seconds", "vllm:e2e_request_latency_seconds"),
    ):
        mirrored = [(labels | one, number) for labels, number in found[f"{ours}_bucket"]]
        assert found[f"{theirs}_bucket"] == mirrored
        assert found[f"{theirs}_count"] == [(one, found[f"{ours}_count"][0][1])]
    assert found["vllm:generation_tokens_total"] == [(one, 5)]
    assert found["vllm:prefix_cache_hits_total"] == [(one, 4)]
    assert found["vllm:spec_decode_num_draft_tokens_total"] == [(one, 9)]
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == [(one, 6)]


# ---- what is deployed ----------------------------------------------------------------------------

DASHBOARD = json.loads((ROOT / "deploy/grafana/baton.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((ROOT / "deploy/prometheus/baton-alerts.yaml").read_text(encoding="utf-8"))


def rule_list() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for rule in rule_list():
        yield rule["expr"]


KNOWN = samples(metrics(vllm_names=True))
ADDED_BY_PROMETHEUS = {"instance", "job"}
RECORDED = {rule["record"] for rule in rule_list() if "record" in rule}


def test_every_metric_that_is_named_exists_with_its_labels() -> None:
    num_checked = 0
    for expression in expressions():
        for name, selector in re.findall(r"\b(baton_\w+|vllm:\w+)(\{[^}]*\})?", expression):
            num_checked += 1
            assert name in KNOWN, f"{name} in {expression}"
            labels = {label for seen, _ in KNOWN[name] for label in seen}
            for label, operator, wanted in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
                assert label in labels | ADDED_BY_PROMETHEUS, f"{label} of {name}"
                if operator == "=":
                    assert any(seen.get(label) == wanted for seen, _ in KNOWN[name]) or label == "state", (
                        expression
                    )
        named = re.findall(r"\b(baton_\w+)", expression)
        labels = {label for name in named for seen, _ in KNOWN[name] for label in seen} | ADDED_BY_PROMETHEUS
        for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} <= labels, expression
    assert num_checked > 60


def test_outcomes_in_rules_are_outcomes() -> None:
    outcomes = {outcome.value for outcome in Outcome}
    for expression in expressions():
        for listed in re.findall(r'baton_request_total\{[^}]*outcome[=!]~"([^"]*)"', expression):
            assert set(listed.split("|")) <= outcomes, expression


def test_expressions_are_balanced_and_recorded_names_are_recorded() -> None:
    for expression in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression
        for name in re.findall(r"\bbaton:[\w:]+", expression):
            assert name in RECORDED


def test_every_alert_says_what_it_is_about() -> None:
    alerts = [rule for rule in rule_list() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 8
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["for"]
        assert set(rule["annotations"]) == {"summary", "description"}
        for label in re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())):
            assert label in rule["expr"] or label in ("instance", "worker")


def test_panels_do_not_overlap_and_ids_are_theirs_alone() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("name", ["ttft", "tpot"])
def test_the_targets_are_series_too(name: str) -> None:
    expected = {"ttft": 0.5, "tpot": 0.1}
    assert value(samples(metrics()), "baton_slo_target_seconds", slo=name) == expected[name]
