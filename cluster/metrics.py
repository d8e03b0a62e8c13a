"""Prometheus metrics of one router: requests as they end, workers as they report.

1. The gateway observes each request once, when it is over (`observe_request`), and each gap between two
   deliveries to a client (`observe_token_gap`).
2. The router reports every worker's load (`observe_worker`); a worker's counters grow by what they gained
   since the last report, and start again from zero when it restarts, as Prometheus expects of a reset.
3. `forget_worker` drops the series of a worker that left; `render` writes the page.

The one owner of prometheus_client. The registry is passed in, nothing is global. Label values come from
enums, route tables and worker names, never from a request, so the number of series is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from cluster.ids import WorkerId
from cluster.metrics_placement import PlacementMetrics
from cluster.wire.messages import Role, WorkerLoad

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Shaped by service-level objectives, 5 ms to 60 s; TTFT and TPOT targets lie between 10 ms and 10 s.
LATENCY_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0),
)
TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.0025, *LATENCY_BUCKETS_S)
TOKEN_BUCKETS = tuple(float(4**power) for power in range(10))  # 1 ... 262144
WORKER_STATES = ("starting", "ready", "draining", "lost", "stuck")


class Outcome(Enum):
    """How a request ended, for `baton_request_total`."""

    STOP = "stop"
    LENGTH = "length"
    CLIENT_LEFT = "client_left"
    INVALID = "invalid"  # the client's fault, nothing was queued
    OVERLOADED = "overloaded"
    NOT_READY = "not_ready"
    DEADLINE = "deadline_exceeded"
    WORKER_LOST = "worker_lost"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that is over. Times are None where it never got that far."""

    outcome: Outcome
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_attempts: int
    e2e_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None  # (last token - first token) / (generated - 1)
    queue_s: float | None = None
    prefill_s: float | None = None
    kv_transfer_s: float | None = None  # None for a local prefill
    decode_s: float | None = None
    local_prefill: bool = False


class Metrics:
    """All series of one router; safe to call from its event loop only."""

    def __init__(self, registry: CollectorRegistry, version: str, model: str) -> None:
        self._registry = registry
        self._seen: dict[WorkerId, tuple[Role, WorkerLoad]] = {}

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"baton_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
            return Histogram(f"baton_{name}_seconds", text, buckets=buckets, registry=registry)

        def tokens(name: str, text: str) -> Histogram:
            return Histogram(f"baton_{name}", text, buckets=TOKEN_BUCKETS, registry=registry)

        self.placement = PlacementMetrics(registry)
        build = Info("baton_build", "What runs here", registry=registry)
        build.info({"version": version, "model": model})

        self._requests = counter("request", "Requests that are over", ("outcome",))
        self._http = counter("http_responses", "HTTP responses", ("route", "status"))
        self._attempts = counter("request_attempts", "Attempts over all requests, first ones included")
        self._prefills = counter("prefills", "Where prompts were prefilled", ("where",))
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests")
        self._cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens whose KV was found, not computed"
        )
        self._generated_tokens = counter("generation_tokens", "Tokens generated for clients")
        self._ttft = seconds("ttft", "Arrival to first token")
        self._tpot = seconds("tpot", "Mean time per output token after the first, per request")
        self._itl = seconds("itl", "Gap between two deliveries of tokens to a client")
        self._e2e = seconds("e2e", "Arrival to last byte")
        self._queue = seconds("queue", "Arrival to prefill started")
        self._prefill = seconds("prefill", "Prefill started to first token sampled")
        self._transfer = seconds("kv_transfer", "First token sampled to decoding", TRANSFER_BUCKETS_S)
        self._decode = seconds("decode", "Decoding started to last token")
        self._prompt_size = tokens("request_prompt_tokens", "Prompt tokens per request")
        self._output_size = tokens("request_generation_tokens", "Generated tokens per request")

        self._ready = gauge("ready", "1 when a request can be served")
        self._running = gauge("requests_running", "Requests in progress", ("role",))
        self._waiting = gauge("requests_waiting", "Requests accepted and not started", ("role",))
        self._blocks = gauge("kv_blocks", "KV blocks by state", ("worker", "state"))
        self._state = gauge("worker_state", "1 for the state a worker is in", ("worker", "role", "state"))
        self._leases = gauge("kv_leases", "Leases a decode worker holds", ("worker",))
        self._queued_tokens = gauge(
            "queued_prefill_tokens", "Prompt tokens accepted, not computed", ("worker",)
        )
        self._prefill_rate = gauge("prefill_tokens_per_second", "Smoothed prefill speed", ("worker",))
        self._step = gauge("decode_step_seconds", "Smoothed length of a decode step", ("worker",))
        self._step_error = gauge(
            "step_prediction_error_ratio",
            "Actual / predicted - 1 of the latest steps: median of its size, 90 % quantile",
            ("worker", "quantile"),
        )
        self._prefill_work = gauge(
            "queued_prefill_seconds", "Predicted prefill work that waits", ("worker", "when")
        )
        self._transfer_bytes = counter("kv_transfer_bytes", "KV bytes received by decode workers")
        self._steps = counter("worker_steps", "Forward passes", ("worker",))
        self._preemptions = counter("preemptions", "Sequences preempted", ("worker",))
        self._stale = counter("stale_messages", "Late or duplicate messages dropped", ("worker",))
        self._router_stale = counter(
            "router_stale_messages", "Messages of workers that the router dropped", ("reason",)
        )
        self._seen_stale: dict[str, int] = {}
        self._worker_gauges = (self._leases, self._queued_tokens, self._prefill_rate, self._step)
        self._worker_counters = (self._steps, self._preemptions, self._stale)
        for outcome in Outcome:
            self._requests.labels(outcome.value)

    # ---- requests --------------------------------------------------------------------------------

    def observe_request(self, record: RequestRecord) -> None:
        """Count a request that is over, whatever its outcome."""
        self._requests.labels(record.outcome.value).inc()
        self._attempts.inc(record.num_attempts)
        for histogram, value in (
            (self._ttft, record.ttft_s),
            (self._tpot, record.tpot_s),
            (self._queue, record.queue_s),
            (self._prefill, record.prefill_s),
            (self._transfer, record.kv_transfer_s),
            (self._decode, record.decode_s),
        ):
            if value is not None:
                histogram.observe(value)
        if record.ttft_s is None:
            return
        self._prefills.labels("local" if record.local_prefill else "remote").inc()
        self._prompt_tokens.inc(record.num_prompt_tokens)
        self._cached_tokens.inc(record.num_cached_tokens)
        self._generated_tokens.inc(record.num_generated_tokens)
        self._prompt_size.observe(record.num_prompt_tokens)
        self._output_size.observe(record.num_generated_tokens)
        self._e2e.observe(record.e2e_s)

    def observe_token_gap(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def observe_http(self, route: str, status: int) -> None:
        """`route` must come from the route table ("other" when nothing matched)."""
        self._http.labels(route, str(status)).inc()

    # ---- workers ---------------------------------------------------------------------------------

    def observe_router(self, *, ready: bool, in_flight: int, queued: int) -> None:
        self._ready.set(ready)
        self._running.labels("router").set(in_flight - queued)
        self._waiting.labels("router").set(queued)

    def observe_stale(self, totals: Mapping[str, int]) -> None:
        """Messages the router dropped so far, by reason."""
        for reason, total in totals.items():
            self._router_stale.labels(reason).inc(total - self._seen_stale.get(reason, 0))
        self._seen_stale = dict(totals)

    def observe_worker(self, worker: WorkerId, role: Role, state: str, load: WorkerLoad) -> None:
        """A worker's gauges as of now; its counters grow by what they gained since the last call."""
        _, before = self._seen.get(worker, (role, WorkerLoad()))
        self._seen[worker] = (role, load)
        for name in WORKER_STATES:
            self._state.labels(worker, role.value, name).set(name == state)
        for name, num_blocks in (
            ("used", load.blocks_used),
            ("cached", load.blocks_cached),
            ("free", load.blocks_free),
        ):
            self._blocks.labels(worker, name).set(num_blocks)
        self._leases.labels(worker).set(load.leases)
        self._queued_tokens.labels(worker).set(load.queued_prefill_tokens)
        self._prefill_rate.labels(worker).set(load.prefill_tokens_per_s)
        self._step.labels(worker).set(load.decode_step_s)
        self._step_error.labels(worker, "0.5").set(load.step_error)
        self._step_error.labels(worker, "0.9").set(load.step_error_p90)
        self._prefill_work.labels(worker, "on_time").set(load.on_time_prefill_s)
        self._prefill_work.labels(worker, "late").set(load.late_prefill_s)
        self._steps.labels(worker).inc(_gain(before.steps, load.steps))
        self._preemptions.labels(worker).inc(_gain(before.preemptions, load.preemptions))
        self._stale.labels(worker).inc(_gain(before.stale_messages, load.stale_messages))
        if role is Role.DECODE:
            self._transfer_bytes.inc(_gain(before.kv_bytes_received, load.kv_bytes_received))

    def forget_worker(self, worker: WorkerId) -> None:
        """Drop the series of a worker that is not part of the cluster any more."""
        role, _ = self._seen.pop(worker, (None, None))
        if role is None:
            return
        for name in WORKER_STATES:
            self._state.remove(worker, role.value, name)
        for name in ("used", "cached", "free"):
            self._blocks.remove(worker, name)
        for quantile in ("0.5", "0.9"):
            self._step_error.remove(worker, quantile)
        for when in ("on_time", "late"):
            self._prefill_work.remove(worker, when)
        for gauge in self._worker_gauges:
            gauge.remove(worker)
        for counter in self._worker_counters:
            counter.remove(worker)

    def known_workers(self) -> frozenset[WorkerId]:
        return frozenset(self._seen)

    def render(self) -> bytes:
        """The text exposition format; requests per role are summed over the workers last seen."""
        for role in Role:
            loads = [load for seen_role, load in self._seen.values() if seen_role is role]
            self._running.labels(role.value).set(sum(load.running for load in loads))
            self._waiting.labels(role.value).set(sum(load.waiting for load in loads))
        return generate_latest(self._registry)


def new_metrics(version: str, model: str) -> Metrics:
    """Series of their own for one router process."""
    return Metrics(CollectorRegistry(), version, model)


def _gain(before: int, now: int) -> int:
    """Growth of a worker's counter; a smaller value means that the worker restarted from zero."""
    return now - before if now >= before else now
