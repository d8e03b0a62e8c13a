"""OpenTelemetry spans of requests, one per stage, made of the same events as the page and the metrics.

1. ARRIVED opens a lane and remembers the trace that the client's `traceparent` names, if any.
2. Later events advance the lane (`router.lanes`).
3. At the end one server span is written with the stages as its children: queue, prefill, kv_transfer, decode.

Spans are written after the fact, so a request costs nothing of it while it runs. No prompt, no answer, no
token is in them. The one owner of opentelemetry, an extra: without `--otlp-endpoint` nothing of it is
imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.clock import Clock
from cluster.errors import ConfigError
from cluster.ids import RequestId
from cluster.request import LifecycleEvent
from cluster.request_context import RequestContext, current_request
from router.conductor_io import Ended, Lifecycle
from router.delivery import RequestSummary
from router.lanes import ENDS, End, Lane, Stage, advance, close, open_lane

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

MAX_OPEN = 4096  # requests traced at a time; more go untraced

_NAMES = {stage: "kv_transfer" if stage is Stage.TRANSFER else stage.value for stage in Stage}
_NEEDED = "traces need OpenTelemetry: pip install 'baton-serve[otel]'"


class RequestTraces:
    """A watcher of the conductor's driver. `close` writes what is buffered."""

    def __init__(
        self,
        exporter: SpanExporter,
        model: str,
        version: str,
        clock: Clock,
        look_up: Callable[[RequestId], RequestSummary | None],
        *,
        batch: bool = True,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        self._model = model
        self._look_up = look_up
        self._unix_s = time.time() - clock.now()  # clock |-> unix time
        self._open: dict[RequestId, tuple[Lane, RequestContext | None]] = {}
        self._last: Lifecycle | None = None
        resource = Resource.create({"service.name": "baton", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        processor = BatchSpanProcessor(exporter) if batch else SimpleSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton.router", version)

    def observe(self, action: Lifecycle | Ended) -> None:
        """Take the next lifecycle event, or the end of a request."""
        if isinstance(action, Ended):
            self._on_ended(action)
        elif action.event is LifecycleEvent.ARRIVED:
            if len(self._open) < MAX_OPEN:
                self._open[action.request] = (open_lane(action), current_request())
        elif action.event in ENDS:
            self._last = action
        elif (known := self._open.get(action.request)) is not None:
            is_first = action.event is LifecycleEvent.FIRST_TOKEN
            advance(known[0], action, self._look_up(action.request) if is_first else None)

    def close(self) -> None:
        """Write what is buffered; waits for the collector, but not for long."""
        self._provider.force_flush(timeout_millis=2000)
        self._provider.shutdown()

    def _on_ended(self, ended: Ended) -> None:
        last, self._last = self._last, None
        known = self._open.pop(ended.request, None)
        if known is not None and last is not None and last.request == ended.request:
            close(known[0], last, ended.summary)
            self._write(*known, ended.summary, last.detail)

    def _write(
        self, lane: Lane, context: RequestContext | None, summary: RequestSummary, detail: str
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        operation = "chat" if lane.request.startswith("chatcmpl-") else "text_completion"
        assert lane.ended_at is not None
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=_parent(context),
            kind=SpanKind.SERVER,
            start_time=self._nanoseconds(lane.spans[0].at),
            attributes=self._attributes(lane, operation, context, summary),
        )
        ends = [*(later.at for later in lane.spans[1:]), lane.ended_at]
        for stage, ended_at in zip(lane.spans, ends, strict=True):
            worker = {Stage.PREFILL: lane.prefill, Stage.DECODE: lane.decode}.get(stage.stage)
            child = self._tracer.start_span(
                _NAMES[stage.stage],
                context=set_span_in_context(span),
                start_time=self._nanoseconds(stage.at),
                attributes={} if worker is None else {"baton.worker": worker},
            )
            child.end(self._nanoseconds(ended_at))
        if lane.end is End.FAILED:
            span.set_attribute("error.type", "failed")
            span.set_status(Status(StatusCode.ERROR, detail))
        span.end(self._nanoseconds(lane.ended_at))

    def _attributes(
        self, lane: Lane, operation: str, context: RequestContext | None, summary: RequestSummary
    ) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": lane.request,
            "gen_ai.usage.input_tokens": lane.num_prompt_tokens,
            "gen_ai.usage.output_tokens": lane.num_tokens,
            "gen_ai.usage.cache_read.input_tokens": lane.num_cached_tokens,
            "baton.attempts": lane.num_attempts,
            "baton.kv_bytes": lane.kv_bytes,
        }
        if lane.num_tokens:
            attributes["gen_ai.response.time_to_first_chunk"] = summary.ttft_s
        if lane.end is not None:
            attributes["baton.end"] = lane.end.value
        if context is not None:
            attributes["baton.request_id"] = context.label
        return attributes

    def _nanoseconds(self, at: float) -> int:
        return int((self._unix_s + at) * 1e9)


def _parent(context: RequestContext | None) -> Any:
    """The client's trace to continue; without one a new trace begins."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers = {}
    if context is not None and context.traceparent is not None:
        headers["traceparent"] = context.traceparent
        if context.tracestate is not None:
            headers["tracestate"] = context.tracestate
    return TraceContextTextMapPropagator().extract(headers, context=Context())


def otlp_exporter(endpoint: str) -> SpanExporter:
    """To a collector, OTLP over HTTP.

    Raises:
        ConfigError: the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(_NEEDED) from error
    exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=5)
    return exporter
