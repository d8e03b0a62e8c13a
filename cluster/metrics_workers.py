"""Prometheus series of workers: gauges as last reported, counters that grow by what was gained in between."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.ids import WorkerId
from cluster.wire.messages import Role, WorkerLoad

WORKER_STATES = ("starting", "ready", "draining", "lost", "stuck")
BLOCK_STATES = ("used", "cached", "free")


class WorkerMetrics:
    """A worker's counters start again from zero when it restarts, as Prometheus expects of a reset."""

    def __init__(self, registry: CollectorRegistry, block_size: int) -> None:
        self._block_size = block_size
        self._seen: dict[WorkerId, tuple[Role, WorkerLoad]] = {}

        def counter(name: str, text: str, labels: tuple[str, ...] = ("worker",)) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *more: str) -> Gauge:
            return Gauge(f"baton_{name}", text, ("worker", *more), registry=registry)

        self._state = gauge("worker_state", "1 for the state a worker is in", "role", "state")
        self._blocks = gauge("kv_blocks", "KV blocks by state", "state")
        self._usage = gauge("kv_cache_usage_perc", "Part of the KV blocks that requests hold, 0 to 1")
        self._cache = gauge("cache_config_info", "1; how the KV pool is made", "block_size", "num_blocks")
        self._leases = gauge("kv_leases", "Leases a decode worker holds")
        self._running = gauge("worker_requests_running", "Sequences in a worker's batch")
        self._waiting = gauge("worker_requests_waiting", "Sequences accepted by a worker, not in its batch")
        self._queued_tokens = gauge("queued_prefill_tokens", "Prompt tokens accepted, not computed")
        self._prefill_rate = gauge("prefill_tokens_per_second", "Smoothed prefill speed")
        self._step = gauge("decode_step_seconds", "Smoothed length of a decode step")
        self._step_error = gauge(
            "step_prediction_error_ratio",
            "Actual / predicted - 1 of the latest steps: median of its size, 90 % quantile",
            "quantile",
        )
        self._prefill_work = gauge("queued_prefill_seconds", "Predicted prefill work that waits", "when")
        self._transfer_bytes = counter("kv_transfer_bytes", "KV bytes received by decode workers", ())
        self._steps = counter("worker_steps", "Forward passes")
        self._borrowed = counter(
            "engine_borrowed_pieces", "Pieces of steps computed on cores of workers that rested"
        )
        self.drafts = counter("spec_decode_num_draft_tokens", "Tokens guessed, for decode steps to check", ())
        self.right_drafts = counter("spec_decode_num_accepted_tokens", "Guessed tokens that were right", ())
        self._preemptions = counter("preemptions", "Sequences preempted")
        self._stale = counter("stale_messages", "Late or duplicate messages dropped")

    def observe(self, worker: WorkerId, role: Role, state: str, load: WorkerLoad) -> None:
        """A worker as of now. One that has another role by now begins anew."""
        seen_role, before = self._seen.get(worker, (role, WorkerLoad()))
        if seen_role is not role:
            self.forget(worker)
            before = WorkerLoad()
        self._show_cache(worker, load, before if worker in self._seen else None)
        self._seen[worker] = (role, load)
        for name in WORKER_STATES:
            self._state.labels(worker, role.value, name).set(name == state)
        for gauge, value in (
            (self._leases, load.leases),
            (self._running, load.running),
            (self._waiting, load.waiting),
            (self._queued_tokens, load.queued_prefill_tokens),
            (self._prefill_rate, load.prefill_tokens_per_s),
            (self._step, load.decode_step_s),
        ):
            gauge.labels(worker).set(value)
        for gauge, label, value in (
            (self._step_error, "0.5", load.step_error),
            (self._step_error, "0.9", load.step_error_p90),
            (self._prefill_work, "on_time", load.on_time_prefill_s),
            (self._prefill_work, "late", load.late_prefill_s),
        ):
            gauge.labels(worker, label).set(value)
        for counter, gained in (
            (self._steps, _gain(before.steps, load.steps)),
            (self._borrowed, _gain(before.borrowed_pieces, load.borrowed_pieces)),
            (self._preemptions, _gain(before.preemptions, load.preemptions)),
            (self._stale, _gain(before.stale_messages, load.stale_messages)),
        ):
            counter.labels(worker).inc(gained)
        if role is Role.DECODE:
            self._transfer_bytes.inc(_gain(before.kv_bytes_received, load.kv_bytes_received))
            self.drafts.inc(_gain(before.drafts, load.drafts))
            self.right_drafts.inc(_gain(before.right_drafts, load.right_drafts))

    def forget(self, worker: WorkerId) -> None:
        """Drop the series of a worker that is not part of the cluster any more."""
        if worker not in self._seen:
            return
        role, load = self._seen.pop(worker)
        for name in WORKER_STATES:
            self._state.remove(worker, role.value, name)
        for name in BLOCK_STATES:
            self._blocks.remove(worker, name)
        self._cache.remove(worker, str(self._block_size), str(num_blocks(load)))
        for quantile in ("0.5", "0.9"):
            self._step_error.remove(worker, quantile)
        for when in ("on_time", "late"):
            self._prefill_work.remove(worker, when)
        for series in (
            *(self._usage, self._leases, self._running, self._waiting, self._queued_tokens),
            *(self._prefill_rate, self._step, self._steps, self._borrowed, self._preemptions, self._stale),
        ):
            series.remove(worker)

    def known(self) -> frozenset[WorkerId]:
        return frozenset(self._seen)

    def loads(self, role: Role) -> list[WorkerLoad]:
        """As last observed."""
        return [load for seen_role, load in self._seen.values() if seen_role is role]

    def _show_cache(self, worker: WorkerId, load: WorkerLoad, before: WorkerLoad | None) -> None:
        total = num_blocks(load)
        if before is not None and num_blocks(before) != total:
            self._cache.remove(worker, str(self._block_size), str(num_blocks(before)))
        self._cache.labels(worker, str(self._block_size), str(total)).set(1)
        self._usage.labels(worker).set(load.blocks_used / total if total else 0)
        for name, number in zip(
            BLOCK_STATES, (load.blocks_used, load.blocks_cached, load.blocks_free), strict=True
        ):
            self._blocks.labels(worker, name).set(number)


def num_blocks(load: WorkerLoad) -> int:
    return load.blocks_used + load.blocks_cached + load.blocks_free


def _gain(before: int, now: int) -> int:
    """Growth of a worker's counter; a smaller value means that the worker restarted from zero."""
    return now - before if now >= before else now
