"""The cluster as `/metrics` and `/cluster` tell of it."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.metrics import Metrics
from router.delivery import ClusterSnapshot, ClusterStatus, WorkerStatus
from router.generation import InFlight
from router.role_watch import RoleWatch


def observe_cluster(
    metrics: Metrics, status: ClusterStatus, in_flight: InFlight, snapshot: ClusterSnapshot
) -> None:
    """Bring the gauges up to date with what the router sees now."""
    metrics.observe_router(
        ready=status.ready().ready and not in_flight.draining,
        in_flight=len(in_flight),
        queued=snapshot.queued,
    )
    metrics.observe_stale({reason.value: num for reason, num in snapshot.stale_messages.items()})
    metrics.observe_role_shifts(
        {(before.value, after.value): num for (before, after), num in snapshot.role_shifts.items()}
    )
    placement = snapshot.placement
    metrics.placement.observe(
        placement.placements,
        placement.rejections,
        placement.errors,
        predicted_s=placement.predicted_s,
        measured_s=placement.measured_s,
        error_s=placement.error_s,
    )
    for worker in metrics.known_workers() - {worker.worker for worker in snapshot.workers}:
        metrics.forget_worker(worker)
    for item in snapshot.workers:
        metrics.observe_worker(item.worker, item.role, item.state, item.load)


def roles_json(roles: RoleWatch | None, snapshot: ClusterSnapshot) -> dict[str, Any]:
    """Workers that came back in another role, and the one that is about to; as `/cluster` shows it."""
    return {
        "done": [
            {"from": before.value, "to": after.value, "times": num}
            for (before, after), num in snapshot.role_shifts.items()
        ],
        "under_way": None if roles is None else roles.picture(snapshot.workers),
        "planned": roles is not None,
    }


def worker_json(worker: WorkerStatus) -> dict[str, Any]:
    """As `/cluster` shows it."""
    load = worker.load
    return {
        "id": worker.worker,
        "role": worker.role.value,
        "epoch": worker.epoch,
        "pid": worker.pid,
        "state": worker.state,
        "heartbeat_age_s": round(worker.heartbeat_age_s, 3),
        "kv_blocks": {
            "used": load.blocks_used,
            "cached": load.blocks_cached,
            "free": load.blocks_free,
            "total": load.blocks_used + load.blocks_cached + load.blocks_free,
        },
        "running": load.running,
        "waiting": load.waiting,
        "queued_prefill_tokens": load.queued_prefill_tokens,
        "leases": load.leases,
        "steps": load.steps,
        "preemptions": load.preemptions,
        "stale_messages": load.stale_messages,
        "prefill_tokens_per_s": round(load.prefill_tokens_per_s, 1),
        "decode_step_ms": round(load.decode_step_s * 1000, 3),
        "step_model": msgspec.to_builtins(load.step_model),
        "step_error": round(load.step_error, 4),
        "step_error_p90": round(load.step_error_p90, 4),
        "kv_bytes_sent": load.kv_bytes_sent,
        "kv_bytes_received": load.kv_bytes_received,
    }
