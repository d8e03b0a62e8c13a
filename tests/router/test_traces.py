"""Traces of requests: one server span with a child per stage, continuing the client's trace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from cluster.clock import ManualClock
from cluster.errors import ConfigError
from cluster.ids import RequestId, WorkerId
from cluster.request import LifecycleEvent
from cluster.request_context import enter_request
from router import service, traces
from router.conductor_io import Ended, Lifecycle
from router.delivery import RequestSummary
from router.traces import RequestTraces
from tests.support.page_world import page_world

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

E = LifecycleEvent
P, D = WorkerId("prefill-0"), WorkerId("decode-0")
NAME = RequestId("chatcmpl-1")
SUMMARY = RequestSummary(
    cached_tokens=4, attempts=1, prefill_worker=P, decode_worker=D,
    queue_s=0.2, prefill_s=0.3, kv_transfer_s=0.1, decode_s=0.9, ttft_s=0.5,
)  # fmt: skip
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def in_request(label: str, traceparent: str | None, call: Callable[[], Any]) -> None:
    """As the gateway does it: the request's context ends with its task."""

    def run() -> None:
        enter_request(label, traceparent)
        call()

    copy_context().run(run)


def make() -> tuple[RequestTraces, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    made = RequestTraces(exporter, "m", "1", ManualClock(), lambda request: SUMMARY, batch=False)
    return made, exporter


def play(made: RequestTraces, last: LifecycleEvent = E.FINISHED, detail: str = "") -> None:
    for event, at, worker in (
        (E.ARRIVED, 10.0, None),
        (E.PLACED, 10.0, D),
        (E.PREFILL_SENT, 10.1, P),
        (E.FIRST_TOKEN, 10.5, P),
        (E.DECODE_STARTED, 10.6, D),
        (last, 11.5, None),
    ):
        made.observe(Lifecycle(NAME, event, at, worker=worker, num_tokens=7, detail=detail))
    made.observe(Ended(NAME, SUMMARY))


def test_a_request_is_one_span_with_its_stages() -> None:
    made, exporter = make()
    in_request("req-9", PARENT, lambda: play(made))
    *stages, whole = exporter.get_finished_spans()
    assert (whole.name, whole.kind) == ("chat m", SpanKind.SERVER)
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == "b7ad6b7169203331"
    assert [span.name for span in stages] == ["queue", "prefill", "kv_transfer", "decode"]
    assert {span.parent.span_id for span in stages if span.parent} == {whole.context.span_id}
    # They cover it without gaps: the prefill began 0.2 s after arrival, when its worker came to it.
    times = [(span.start_time, span.end_time) for span in stages]
    assert times[0][0] == whole.start_time
    assert times[-1][1] == whole.end_time
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]]
    seconds = [round((end - start) / 1e9, 3) for start, end in times if start and end]
    assert seconds == [0.2, 0.3, 0.1, 0.9]
    assert [span.attributes.get("baton.worker") for span in stages if span.attributes is not None] == [
        *(None, P, None, D),
    ]
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.input_tokens"] == 7
    assert whole.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert whole.attributes["gen_ai.response.time_to_first_chunk"] == 0.5
    assert whole.attributes["baton.request_id"] == "req-9"


@pytest.mark.parametrize(
    "parent", [None, "", "nonsense", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"]
)
def test_without_a_usable_parent_a_trace_begins(parent: str | None) -> None:
    made, exporter = make()
    in_request("req-9", parent, lambda: play(made))
    whole = exporter.get_finished_spans()[-1]
    assert whole.parent is None


def test_a_failure_is_an_error() -> None:
    made, exporter = make()
    play(made, E.FAILED, "decode-0: its stream broke")
    whole = exporter.get_finished_spans()[-1]
    assert whole.status.status_code is StatusCode.ERROR
    assert whole.attributes is not None
    assert whole.attributes["baton.end"] == "failed"
    assert "baton.request_id" not in whole.attributes


def test_open_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_OPEN", 3)
    made, exporter = make()
    for number in range(5):
        made.observe(Lifecycle(RequestId(f"r{number}"), E.ARRIVED, 1.0))
    assert len(made._open) == 3
    for number in range(5):
        made.observe(Lifecycle(RequestId(f"r{number}"), E.FINISHED, 2.0))
        made.observe(Ended(RequestId(f"r{number}"), SUMMARY))
    assert len(exporter.get_finished_spans()) == 6  # three requests that never left their queue
    assert not made._open


def test_without_the_extra_it_says_what_to_install() -> None:
    pytest.importorskip("opentelemetry.exporter", reason="namespace package")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[otel\]'"):
            traces.otlp_exporter("http://127.0.0.1:4318")


async def test_a_router_traces_what_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: HTTP header in, spans out when the router stops."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(service, "otlp_exporter", lambda endpoint: exporter)
    async with page_world(tmp_path, otlp_endpoint="http://127.0.0.1:4318") as world:
        body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
        headers = {"traceparent": PARENT, "x-request-id": "mine"}
        await asyncio.gather(
            world.client.post("/v1/completions", json=body, headers=headers),
            world.client.post("/v1/completions", json=body),
        )
    wholes = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    labels = {
        f"{span.context.trace_id:032x}" == TRACE: span.attributes["baton.request_id"]
        for span in wholes
        if span.attributes is not None
    }
    assert len(wholes) == 2
    assert labels[True] == "mine"
    assert str(labels[False]).startswith("req-")
