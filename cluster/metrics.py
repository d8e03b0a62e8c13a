"""Prometheus metrics of one router: requests as they end, workers as they report.

1. The gateway observes each request once, when it is over (`observe_request`), and each gap between two
   deliveries to a client (`observe_token_gap`).
2. The router reports every worker's load (`observe_worker`, see `cluster.metrics_workers`); `forget_worker`
   drops the series of a worker that left.
3. `render` writes the page; with `vllm_names`, a part of it once more (`cluster.metrics_vllm`).

`cluster/metrics*.py` own prometheus_client. The registry is passed in, nothing is global. Label values come
from enums, route tables and worker names, never from a request, so the number of series is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.registry import Collector

from cluster.ids import WorkerId
from cluster.latency_targets import LatencyTargets
from cluster.metrics_histogram import CheapHistogram
from cluster.metrics_placement import PlacementMetrics
from cluster.metrics_vllm import ClusterLoad, VllmNames
from cluster.metrics_workers import WorkerMetrics, num_blocks
from cluster.wire.messages import Role, WorkerLoad

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Shaped by service-level objectives, 5 ms to 60 s; TTFT and TPOT targets lie between 10 ms and 10 s.
LATENCY_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0),
)
TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.0025, *LATENCY_BUCKETS_S)
QUOTA_LIMITS = ("requests", "tokens", "concurrent")
TOKEN_BUCKETS = tuple(float(4**power) for power in range(10))  # 1 ... 262144


class Outcome(Enum):
    """How a request ended, for `baton_request_total`."""

    STOP = "stop"
    LENGTH = "length"
    CLIENT_LEFT = "client_left"
    INVALID = "invalid"  # the client's fault, nothing was queued
    RATE_LIMITED = "rate_limited"  # its API key had used up a limit
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
    """All series of one router; safe to call from its event loop only. `render` takes milliseconds: it may
    run on a thread, while requests are observed, but no workers are."""

    def __init__(
        self,
        registry: CollectorRegistry,
        version: str,
        model: str,
        targets: LatencyTargets | None = None,
        *,
        policy: str = "elastic",
        block_size: int = 0,
        vllm_names: bool = False,
    ) -> None:
        self._registry = registry
        self._targets = targets or LatencyTargets()
        self._policy = policy
        self._block_size = block_size
        self._num_in_flight = self._num_queued = 0

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
        self._slo = counter("slo_requests", "Requests by whether they met a target", ("slo", "outcome"))
        self._goodput = counter("goodput_requests", "Requests that met both targets")
        self._quota_refused = counter("quota_refused", "Requests refused by a limit of their key", ("limit",))
        for limit in QUOTA_LIMITS:
            self._quota_refused.labels(limit)
        self._shared_up = gauge("shared_state_up", "0 while what routers share (Redis) is away")
        self._shared_losses = counter("shared_state_losses", "Times that it went away")
        self._shared_up.set(1)
        self._decisions = counter("route_decisions", "Where requests went", ("policy", "outcome", "reason"))
        self._rejected = counter("admission_rejected", "Requests that found no place", ("reason",))
        target = gauge("slo_target_seconds", "The targets of requests that ask for nothing else", ("slo",))
        target.labels("ttft").set(self._targets.ttft_s)
        target.labels("tpot").set(self._targets.tpot_s)
        self._prefills = counter("prefills", "Where prompts were prefilled", ("where",))
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests")
        self._cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens whose KV was found, not computed"
        )
        self._generated_tokens = counter("generation_tokens", "Tokens generated for clients")
        self._ttft = seconds("ttft", "Arrival to first token")
        self._tpot = seconds("tpot", "Mean time per output token after the first, per request")
        self._itl = CheapHistogram(
            "baton_itl_seconds",
            "Gap between two deliveries of tokens to a client",
            LATENCY_BUCKETS_S,
            registry,
        )
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
        self._router_stale = counter(
            "router_stale_messages", "Messages of workers that the router dropped", ("reason",)
        )
        self._seen_stale: dict[str, int] = {}
        self._role_shifts = counter(
            "role_shifts", "Workers that came back in another role", ("from_role", "to_role")
        )
        self._seen_shifts: dict[tuple[str, str], int] = {}
        for outcome in Outcome:
            self._requests.labels(outcome.value)
        for slo in ("ttft", "tpot", "both"):
            for met in ("met", "missed"):
                self._slo.labels(slo, met)
        for where in ("local", "remote"):
            for reason in ("first", "retry"):
                self._decisions.labels(policy, where, reason)
        for rejection in _REJECTIONS:
            self._rejected.labels(rejection.value)
            self._decisions.labels(policy, "rejected", rejection.value)
        self._workers = WorkerMetrics(registry, block_size)
        if vllm_names:
            registry.register(VllmNames(model, self._mirrored(), self._load))

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
        self._observe_slo(record)
        if record.outcome in _REJECTIONS and record.ttft_s is None:
            self._rejected.labels(record.outcome.value).inc()
            self._decisions.labels(self._policy, "rejected", record.outcome.value).inc()
        if record.ttft_s is None:
            return
        where = "local" if record.local_prefill else "remote"
        reason = "retry" if record.num_attempts > 1 else "first"
        self._decisions.labels(self._policy, where, reason).inc()
        self._prefills.labels(where).inc()
        self._prompt_tokens.inc(record.num_prompt_tokens)
        self._cached_tokens.inc(record.num_cached_tokens)
        self._generated_tokens.inc(record.num_generated_tokens)
        self._prompt_size.observe(record.num_prompt_tokens)
        self._output_size.observe(record.num_generated_tokens)
        self._e2e.observe(record.e2e_s)

    def observe_token_gap(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def observe_quota_refused(self, limit: str) -> None:
        """`limit`: one of `QUOTA_LIMITS`."""
        self._quota_refused.labels(limit).inc()

    def observe_shared_state(self, *, is_up: bool) -> None:
        """It is there, or it went away just now."""
        self._shared_up.set(is_up)
        self._shared_losses.inc(not is_up)

    def observe_http(self, route: str, status: int) -> None:
        """`route` must come from the route table ("other" when nothing matched)."""
        self._http.labels(route, str(status)).inc()

    def _observe_slo(self, record: RequestRecord) -> None:
        """A client that left or asked for nonsense says nothing of us; every other request counts."""
        if record.outcome in (Outcome.CLIENT_LEFT, Outcome.INVALID, Outcome.RATE_LIMITED):
            return
        is_whole = record.outcome in (Outcome.STOP, Outcome.LENGTH)
        is_good = is_whole and self._targets.both_met(record.ttft_s, record.tpot_s)
        for slo, is_met in (
            ("ttft", self._targets.ttft_met(record.ttft_s)),
            ("tpot", is_whole and self._targets.tpot_met(record.ttft_s, record.tpot_s)),
            ("both", is_good),
        ):
            self._slo.labels(slo, "met" if is_met else "missed").inc()
        if is_good:
            self._goodput.inc()

    # ---- the cluster -----------------------------------------------------------------------------

    def observe_router(self, *, ready: bool, in_flight: int, queued: int) -> None:
        self._num_in_flight, self._num_queued = in_flight, queued
        self._ready.set(ready)
        self._running.labels("router").set(in_flight - queued)
        self._waiting.labels("router").set(queued)

    def observe_stale(self, totals: Mapping[str, int]) -> None:
        """Messages the router dropped so far, by reason."""
        for reason, total in totals.items():
            self._router_stale.labels(reason).inc(total - self._seen_stale.get(reason, 0))
        self._seen_stale = dict(totals)

    def observe_role_shifts(self, totals: Mapping[tuple[str, str], int]) -> None:
        """Workers that came back in another role so far, by (from, to)."""
        for roles, total in totals.items():
            self._role_shifts.labels(*roles).inc(total - self._seen_shifts.get(roles, 0))
        self._seen_shifts = dict(totals)

    def observe_worker(self, worker: WorkerId, role: Role, state: str, load: WorkerLoad) -> None:
        """A worker as of now."""
        self._workers.observe(worker, role, state, load)

    def forget_worker(self, worker: WorkerId) -> None:
        """Drop the series of a worker that is not part of the cluster any more."""
        self._workers.forget(worker)

    def known_workers(self) -> frozenset[WorkerId]:
        return self._workers.known()

    def render(self) -> bytes:
        """The text exposition format; requests per role are summed over the workers last seen."""
        for role in Role:
            loads = self._workers.loads(role)
            self._running.labels(role.value).set(sum(load.running for load in loads))
            self._waiting.labels(role.value).set(sum(load.waiting for load in loads))
        return generate_latest(self._registry)

    def _load(self) -> ClusterLoad:
        """Of the whole cluster: who waits, waits wherever it does."""
        decode = self._workers.loads(Role.DECODE)
        loads = [*decode, *self._workers.loads(Role.PREFILL)]
        num_waiting = self._num_queued + sum(load.waiting for load in loads)
        total = sum(num_blocks(load) for load in decode)
        return ClusterLoad(
            num_waiting=num_waiting,
            num_running=max(0, self._num_in_flight - num_waiting),
            kv_usage=sum(load.blocks_used for load in decode) / total if total else 0.0,
            block_size=self._block_size,
            num_blocks=total,
        )

    def _mirrored(self) -> dict[str, Collector]:
        return {
            "time_to_first_token_seconds": self._ttft,
            "request_time_per_output_token_seconds": self._tpot,
            "inter_token_latency_seconds": self._itl,
            "e2e_request_latency_seconds": self._e2e,
            "request_queue_time_seconds": self._queue,
            "request_prefill_time_seconds": self._prefill,
            "request_decode_time_seconds": self._decode,
            "prompt_tokens": self._prompt_tokens,
            "generation_tokens": self._generated_tokens,
            "prefix_cache_queries": self._prompt_tokens,
            "prefix_cache_hits": self._cached_tokens,
            "spec_decode_num_draft_tokens": self._workers.drafts,
            "spec_decode_num_accepted_tokens": self._workers.right_drafts,
        }


_REJECTIONS = (Outcome.OVERLOADED, Outcome.NOT_READY)


def new_metrics(
    version: str,
    model: str,
    targets: LatencyTargets | None = None,
    *,
    policy: str = "elastic",
    block_size: int = 0,
    vllm_names: bool = False,
) -> Metrics:
    """Series of their own for one router process; `policy` names what places requests."""
    return Metrics(
        CollectorRegistry(),
        version,
        model,
        targets,
        policy=policy,
        block_size=block_size,
        vllm_names=vllm_names,
    )
