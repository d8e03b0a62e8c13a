"""One run: a cluster, its clients, perhaps faults; then everything must be over, and nothing left.

1. Routers and workers start; clients begin once the workers have registered.
2. Faults come at random events until the last request is submitted; when the last has ended, what still lasts
   is repaired: who is stopped goes on, streams flow. The dead are started again all along.
3. The cluster gets quiet within `QUIET_S`: no blocks, leases, timers, counters are left.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.simulator import inspection
from bench.simulator.clients import Client, Workload
from bench.simulator.decode_process import DecodeProcess
from bench.simulator.faults import Injector
from bench.simulator.prefill_process import PrefillProcess
from bench.simulator.router_process import RouterProcess
from bench.simulator.scenario import Scenario
from bench.simulator.site import Site
from bench.simulator.verdict import Outcome
from bench.simulator.violation import Violation
from bench.simulator.worker_process import WorkerProcess
from cluster.ids import Epoch, WorkerId
from cluster.wire.messages import Role

START_S = 0.5  # clients begin
CHECK_S = 0.2  # between two checks of one worker's books
LONGEST_S = 2000.0  # a run that is not over by then hangs
QUIET_S = 180.0
_QUIET_STEP_S = 1.0
_REPORTED_S = 3.0  # within this time every worker has dialled its routers and told them what it has cached


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to. `violation` is None when every rule held."""

    label: str  # names the run: its seed, or the one fault it has
    seed: int
    digest: int
    violation: str | None
    num_events: int
    virtual_s: float
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    touched: dict[str, dict[str, int]] = field(default_factory=dict)  # fault |-> outcome |-> requests
    counters: dict[str, int] = field(default_factory=dict)


class Simulation:
    """Owns the processes of one run."""

    def __init__(
        self,
        scenario: Scenario,
        write: Callable[[str], None] | None = None,
        fault_rng: random.Random | None = None,
    ) -> None:
        self.num_events_at_end: int | None = None  # when the last request had ended
        self._num_checks = 0
        self._roles: dict[WorkerId, Role] = {}  # of the next epoch of every worker
        self.scenario = scenario
        self.site = Site(scenario, write)
        self.site.on_exit = self._exited
        self.workload = Workload(self.site, self.site.queue.stop)
        self.clients = [Client(self.site, self.workload, index) for index in range(scenario.num_clients)]
        self.injector = Injector(self, fault_rng or random.Random(f"{scenario.seed}/faults"))
        for slot in range(scenario.num_routers):
            self.site.routers.append(RouterProcess(self.site, slot, Epoch(1)))
        for index in range(scenario.num_prefill):
            self._start(WorkerId(f"prefill-{index}"), Role.PREFILL, Epoch(1))
        for index in range(scenario.num_decode):
            self._start(WorkerId(f"decode-{index}"), Role.DECODE, Epoch(1))

    def run(self) -> Report:
        """To its end, or to the first violation."""
        violation: str | None = None
        try:
            self._run()
        except Violation as error:
            violation = str(error)
            self.site.log.note("violation", violation)
        return self._report(violation)

    def begin(self) -> None:
        """Schedule what starts a run."""
        queue = self.site.queue
        for client in self.clients:
            queue.at(START_S, client.begin)
        queue.at(START_S, self.injector.start)
        queue.after(CHECK_S, self._check)

    def _run(self) -> None:
        queue = self.site.queue
        self.begin()
        if not queue.run(LONGEST_S):
            running = [client.request for client in self.clients if client.oracle is not None]
            raise Violation("end", f"still running after {LONGEST_S:g} s: {running}")
        self.num_events_at_end = queue.num_events
        self.injector.repair()
        self._get_quiet()

    def _get_quiet(self) -> None:
        queue = self.site.queue
        end = queue.now + QUIET_S
        while (left := self._left()) is not None:
            if queue.now >= end:
                raise Violation("quiet", left)
            queue.run(queue.now + _QUIET_STEP_S)
        queue.run(queue.now + _REPORTED_S)
        for worker in self.site.workers.values():
            for router in self.site.routers:
                inspection.check_index(router, worker)
            inspection.check_empty(worker)
        if self.site.redis is not None:
            self.site.redis.check_bound(self.scenario.limits)

    def _left(self) -> str | None:
        for worker in self.site.alive():
            if self.site.workers[worker.worker] is not worker:
                return f"{worker} still runs beside its successor"
        for worker in self.site.workers.values():
            if not worker.is_alive:
                return f"{worker} is not back"
            if (left := inspection.left_on_worker(worker)) is not None:
                return left
        for router in self.site.routers:
            if not router.is_alive:
                return f"{router} is not back"
            if (left := inspection.left_on_router(router)) is not None:
                return left
        return None

    def _check(self) -> None:
        self.check_now()
        self.site.queue.after(CHECK_S, self._check)

    def check_now(self) -> None:
        """The books and leases of the next worker, the attempts of the next router.

        Raises:
            Violation: I1, I3, I6 or lost.
        """
        self._num_checks += 1
        router = self.site.routers[self._num_checks % len(self.site.routers)]
        if router.is_alive:
            inspection.check_conductor(router)
        workers = self.site.alive()
        if workers:
            worker = workers[self._num_checks % len(workers)]
            inspection.check_books(worker)
            inspection.check_lease_times(worker)
            inspection.check_orphans(worker)

    # ---- the launcher

    def _start(self, worker: WorkerId, role: Role, epoch: Epoch) -> None:
        process: WorkerProcess = (
            PrefillProcess(self.site, worker, epoch)
            if role is Role.PREFILL
            else DecodeProcess(self.site, worker, epoch)
        )
        self._roles[worker] = role
        self.site.add(process)
        process.start()

    def _count(self, worker: WorkerProcess) -> None:
        """What happened in a life that is over."""
        load = worker.core.load()
        self.site.counters["preemptions"] += load.preemptions
        self.site.counters["stale messages"] += load.stale_messages

    def _exited(self, process: WorkerProcess) -> None:
        """Start the next epoch, unless it is here already."""
        self._count(process)
        self.site.log.note(process, "ends")
        if self.site.workers[process.worker] is process:
            self.site.queue.after(self.scenario.restart_s, self.succeed, process)

    def succeed(self, process: WorkerProcess) -> None:
        """The next epoch of this worker, if none was started yet."""
        if self.site.workers[process.worker] is process:
            role = self._roles[process.worker]
            self.site.counters["shifted"] += role is not process.role
            self._start(process.worker, role, Epoch(process.epoch + 1))

    def may_shift(self, worker: WorkerProcess) -> bool:
        """Whether a worker would be left that decodes, as far as the launcher knows."""
        others = [other for other in self.site.workers.values() if other.worker != worker.worker]
        return self._roles[worker.worker] is Role.PREFILL or any(
            other.is_alive and other.role is self._roles[other.worker] is Role.DECODE for other in others
        )

    def shift(self, worker: WorkerProcess) -> None:
        """Its next epoch has the other role, however this one ends."""
        is_decode = self._roles[worker.worker] is Role.DECODE
        self._roles[worker.worker] = Role.PREFILL if is_decode else Role.DECODE

    def crash_router(self, router: RouterProcess) -> None:
        """Its requests are lost with it; another is started in its place."""
        router.die()
        for client in self.clients:
            if client.router is router:
                client.router_died()
        self.site.queue.after(self.scenario.restart_s, self._restart_router, router)

    def _restart_router(self, router: RouterProcess) -> None:
        self.site.routers[router.slot] = RouterProcess(self.site, router.slot, Epoch(router.epoch + 1))

    def _report(self, violation: str | None) -> Report:
        touched: dict[str, dict[str, int]] = {}
        for (fault, outcome), count in self.workload.touched.items():
            touched.setdefault(fault, {})[outcome.value] = count
        for worker in self.site.alive():
            self._count(worker)
        return Report(
            label=f"seed {self.scenario.seed}",
            seed=self.scenario.seed,
            digest=self.site.log.digest,
            violation=violation,
            num_events=self.site.queue.num_events,
            virtual_s=self.site.queue.now,
            outcomes={outcome.value: self.workload.outcomes[outcome] for outcome in Outcome},
            faults=dict(self.injector.counts),
            touched=touched,
            counters=dict(self.site.counters),
        )
