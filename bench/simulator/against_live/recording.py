"""What is kept of a live run: each request as its client saw it, and what workers said of their steps.

1. `record_phase` offers a load to the running cluster and asks `/cluster` for the step models: meanwhile,
   twice a second (`Watch`), and afterwards.
2. A `Recording` has the phases of one cluster: two that measure the machine, then the loads to compare.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from bench.load.client.pool import run_plan
from bench.load.client.target import parse_target
from bench.load.figures.latency import derive
from bench.load.plan import Arrival
from bench.load.plans.build import build_plan
from bench.load.plans.lengths import parse_lengths
from bench.load.plans.settings import PlanSettings, Synthetic
from bench.load.records import RequestRecord, Status
from bench.quiet import CpuUse
from bench.served import ServedCluster
from cluster.errors import BatonError
from cluster.step_model import StepModel

WATCH_EVERY_S: Final = 0.5
QUIET_TIMEOUT_S: Final = 20.0
_WATCH_ENDS_S: Final = 10.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is offered: `closed_loop` requests at a time, `num_requests` of them; or `rate` for `seconds`."""

    name: str
    input: str
    output: str
    closed_loop: int | None = None
    num_requests: int | None = None
    rate: float | None = None
    seconds: float | None = None
    seed: int = 0


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended well and had text; seconds."""

    scheduled_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float | None
    queue_s: float  # from its arrival at the router to its first chunk
    prefill_s: float  # to its first token
    transfer_s: float  # from then until it decodes elsewhere; 0: it decodes where it was computed
    tail_s: float  # from its last token to the end of the answer
    is_local: bool


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    role: str
    step_model: StepModel
    step_error: float
    step_error_p90: float
    num_blocks: int
    steps: int


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """`at_s`: since the load began. `models`: how long steps took then, in the order of `Phase.workers`;
    `errors_p90`: how much longer than that one step in ten took at least, a share."""

    at_s: float
    models: list[StepModel]
    errors_p90: list[float]


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """`workers`: as they were when it had ended. `others_cores`: busy for others meanwhile, on average;
    `stolen_cores`: taken by the machine's host."""

    load: Load
    moments: list[Moment]
    others_cores: float
    stolen_cores: float
    arrivals: list[tuple[float, int, int]]  # of all offered: (when, prompt tokens, answer tokens)
    requests: list[Served]
    workers: list[WorkerSeen]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    layout: str
    arguments: list[str]
    cpu: str
    started_with: list[WorkerSeen]
    measuring: dict[str, Phase]
    loads: list[Phase]


def record_phase(cluster: ServedCluster, model: str, max_model_len: int | None, load: Load) -> Phase:
    """
    Raises:
        BatonError: nothing of it was served.
    """
    settings = PlanSettings(
        model=model,
        arrival=_arrival(load),
        workload=Synthetic(input=parse_lengths(load.input), output=parse_lengths(load.output)),
        num_requests=load.num_requests,
        duration_s=load.seconds,
        max_model_len=max_model_len,
        seed=load.seed,
        salt=time.time_ns() % 2**31,
        extra_body={"timings": True},
    )
    plan = build_plan(settings, None)
    pids = _pids(cluster)
    before = CpuUse.begin(pids)
    with Watch(cluster) as watch:
        run = run_plan(plan, parse_target(cluster.url))
    others_cores, stolen_cores = before.others(CpuUse.begin(pids))
    answered = [record for record in run.records if record.status is Status.OK and record.chunk_times_s]
    requests = [_served(record) for record in answered]
    if not requests:
        raise BatonError(f"the cluster served none of the {len(run.records)} requests of `{load.name}`")
    if not cluster.wait_quiet(QUIET_TIMEOUT_S):
        raise BatonError(f"workers were not idle {QUIET_TIMEOUT_S:.0f} s after load `{load.name}` had ended")
    return Phase(
        load=load,
        moments=watch.moments(run.start_ns / 1e9),
        others_cores=others_cores,
        stolen_cores=stolen_cores,
        arrivals=[(one.scheduled_s, one.input_tokens or 1, one.output_tokens or 1) for one in plan.requests],
        requests=requests,
        workers=seen(cluster.get("/cluster")),
    )


class Watch:
    """Asks a cluster for its step models while it serves, on a thread of its own."""

    def __init__(self, cluster: ServedCluster) -> None:
        self._cluster = cluster
        self._is_over = threading.Event()
        self._seen: list[tuple[float, list[WorkerSeen]]] = []  # by `perf_counter`
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._main, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(_WATCH_ENDS_S)

    def moments(self, start_s: float) -> list[Moment]:
        """
        Raises:
            BatonError: the cluster did not answer.
        """
        if self._error is not None or self._thread.is_alive():
            raise BatonError(f"the cluster's step models could not be watched: {self._error or 'no answer'}")
        return [
            Moment(
                at_s=at_s - start_s,
                models=[one.step_model for one in workers],
                errors_p90=[one.step_error_p90 for one in workers],
            )
            for at_s, workers in self._seen
        ]

    def _main(self) -> None:
        try:
            while True:
                workers = seen(self._cluster.get("/cluster"))
                self._seen.append((time.perf_counter(), workers))
                if self._is_over.wait(WATCH_EVERY_S):
                    break
        except Exception as error:  # told by `moments`
            self._error = error


def _pids(cluster: ServedCluster) -> list[int]:
    body = cluster.get("/cluster")
    found = {int(worker["pid"]) for worker in body["workers"]} | {int(body["router_pid"])}
    if body["launcher_pid"]:
        found.add(int(body["launcher_pid"]))
    return sorted(found)


def _arrival(load: Load) -> Arrival:
    if load.closed_loop is not None:
        return Arrival(kind="closed-loop", seed=load.seed, closed_loop=load.closed_loop)
    return Arrival(kind="poisson", seed=load.seed, rate=load.rate)


def seen(body: dict[str, Any]) -> list[WorkerSeen]:
    """Of a reply of `/cluster`.

    Raises:
        BatonError: a worker has no step model: it has run no step.
    """
    found = []
    for worker in body["workers"]:
        if worker["step_model"] is None:
            raise BatonError(f"worker {worker['id']} has no step model yet")
        found.append(
            WorkerSeen(
                worker=worker["id"],
                role=worker["role"],
                step_model=msgspec.convert(worker["step_model"], StepModel),
                step_error=worker["step_error"],
                step_error_p90=worker["step_error_p90"],
                num_blocks=worker["kv_blocks"]["total"],
                steps=worker["steps"],
            )
        )
    return sorted(found, key=lambda one: one.worker)


def _served(record: RequestRecord) -> Served:
    latency, timings = derive(record), record.timings
    assert latency.ttft_s is not None, "it ended well"
    assert record.input_tokens is not None, "the server counts"
    assert record.end_s is not None, "it ended"
    return Served(
        scheduled_s=record.scheduled_s,
        input_tokens=record.input_tokens,
        output_tokens=latency.output_len,
        ttft_s=latency.ttft_s,
        tpot_s=latency.tpot_s,
        queue_s=_seconds(timings, "queue_ms"),
        prefill_s=_seconds(timings, "prefill_ms"),
        transfer_s=_seconds(timings, "kv_transfer_ms"),
        tail_s=record.end_s - record.chunk_times_s[-1],
        is_local=timings.get("prefill_worker") == timings.get("decode_worker"),
    )


def _seconds(timings: dict[str, float | int | str], name: str) -> float:
    value = timings.get(name, 0.0)
    return float(value) / 1e3
