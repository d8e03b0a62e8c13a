"""What goes wrong, and where: each kind of fault, its possible targets at a moment, and what it does to one.

1. At random events (`Scenario.fault_every`), or at a given one (`strike_at`), a kind and a target are chosen.
2. The requests that the target holds are marked, for the table of faults and outcomes.
3. What lasts (a stopped process, a stalled stream, a slow edge) ends after a while; `repair` ends all of it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.simulator.network import Endpoint
from bench.simulator.prefill_process import PrefillEdge, PrefillProcess
from bench.simulator.process import Process
from bench.simulator.router_process import RouterProcess
from bench.simulator.shared_limits import Redis
from bench.simulator.worker_process import WorkerProcess
from cluster.wire.messages import Role

if TYPE_CHECKING:
    from bench.simulator.clients import Client
    from bench.simulator.simulation import Simulation

Target = WorkerProcess | RouterProcess | Endpoint | PrefillEdge


class Injector:
    """Strikes one simulation. `counts`: how often each kind happened."""

    def __init__(self, simulation: Simulation, rng: random.Random) -> None:
        self._simulation = simulation
        self._site = simulation.site
        self._rng = rng
        self._repairs: dict[int, Callable[[], None]] = {}  # of what lasts, by number
        self._holding_up: set[int] = set()  # those of them that may make a lease expire
        self._num_lasting = 0
        self._late_until = 0.0  # messages of a stream that was slow are under way until then
        self.counts: Counter[str] = Counter()
        workers, routers = self._workers, self._routers
        self.kinds: dict[str, tuple[Callable[[], list[Any]], Callable[[Any], None]]] = {
            "crash prefill": (lambda: workers(Role.PREFILL), WorkerProcess.die),
            "crash decode": (lambda: workers(Role.DECODE), WorkerProcess.die),
            "crash router": (routers, simulation.crash_router),
            "hang prefill": (self._writers, self._hang),
            "cut off prefill": (self._writers, self._cut_off),
            "hang decode": (lambda: workers(Role.DECODE), self._hang),
            "hang router": (routers, self._hang),
            "hang, then kill": (workers, self._hang_and_kill),
            "hang, replaced": (lambda: [*self._writers(), *workers(Role.DECODE)], self._hang_and_replace),
            "drain and restart": (workers, self._drain),
            "cut control stream": (lambda: self._streams(RouterProcess), Endpoint.cut),
            "cut KV stream": (lambda: self._streams(PrefillProcess), Endpoint.cut),
            "delay control stream": (lambda: self._streams(RouterProcess), self._stall),
            "delay KV stream": (lambda: self._streams(PrefillProcess), self._stall),
            "reorder across streams": (self._all_streams, self._jitter),
            "duplicate": (self._all_streams, lambda end: end.duplicate(self._rng.randint(1, 6))),
            "slow KV edge": (self._edges, self._slow_edge),
            "slow engine": (workers, self._slow_engine),
            "failed step": (workers, self._fail_step),
            "clock jump": (lambda: [*workers(), *routers()], self._jump),
            "client abort": (self._clients, lambda client: client.leave()),
        }
        if simulation.scenario.shifts_roles:
            self.kinds["shift role"] = (self._movable, self._shift)
        if simulation.site.redis is not None:
            self.kinds["Redis gone"] = (self._shared_state, self._lose_redis)

    def start(self) -> None:
        """Strike at random events from now on."""
        every = self._site.scenario.fault_every
        if every is not None:
            self._site.queue.alarm(1 + int(self._rng.expovariate(1 / every)), self._strike_at_random)

    def strike_at(self, num_events: int, kind: str, choice: int) -> None:
        """One fault only, before the call that comes after `num_events` more."""

        def strike() -> None:
            self.strike(kind, choice)

        self._site.queue.alarm(num_events, strike)

    def num_targets(self, kind: str) -> int:
        return len(self.kinds[kind][0]())

    def strike(self, kind: str, choice: int) -> bool:
        """Now, the `choice`-th target (modulo their number); False if there is none."""
        targets, strike = self.kinds[kind]
        present = targets()
        if not present:
            return False
        target = present[choice % len(present)]
        self.counts[kind] += 1
        self._site.num_faults += 1
        self._site.log.note(kind, _name(target))
        self._mark(kind, target)
        strike(target)
        return True

    def repair(self) -> None:
        """End everything that lasts."""
        self._site.queue.cancel_alarm()
        for number in list(self._repairs):
            self._end(number)
        for worker in self._site.alive():
            worker.fails_next_step = False

    def _strike_at_random(self) -> None:
        if self._simulation.workload.is_over:
            return
        kinds = list(self.kinds)
        for _ in range(len(kinds)):
            if self.strike(self._rng.choice(kinds), self._rng.randrange(1 << 16)):
                break
        self._simulation.check_now()
        self.start()

    # ---- targets

    def _workers(self, role: Role | None = None) -> list[WorkerProcess]:
        return [
            worker for worker in self._site.alive() if not worker.is_stopped and role in (None, worker.role)
        ]

    def _movable(self) -> list[WorkerProcess]:
        """Workers that may take the other role: one that decodes is left."""
        return [worker for worker in self._workers() if self._simulation.may_shift(worker)]

    def _writers(self) -> list[WorkerProcess]:
        """The prefill workers in the middle of sending a piece, or all if there is none."""
        present = self._workers(Role.PREFILL)
        busy: list[WorkerProcess] = [
            worker
            for worker in present
            if isinstance(worker, PrefillProcess) and any(edge.is_sending for edge in worker.edges.values())
        ]
        return busy or present

    def _routers(self) -> list[RouterProcess]:
        return [router for router in self._site.routers if router.is_alive and not router.is_stopped]

    def _streams(self, far_side: type[Process]) -> list[Endpoint]:
        """Both ends of every stream whose other side is such a process."""
        near = [
            end
            for worker in self._site.alive()
            for end in worker.endpoints
            if isinstance(end.peer.process, far_side) and not end.is_cut
        ]
        return [end for pair in near for end in (pair, pair.peer)]

    def _all_streams(self) -> list[Endpoint]:
        return self._streams(RouterProcess) + self._streams(PrefillProcess)

    def _edges(self) -> list[PrefillEdge]:
        return [
            edge
            for worker in self._site.alive()
            if isinstance(worker, PrefillProcess)
            for edge in worker.edges.values()
            if edge.is_up
        ]

    def _shared_state(self) -> list[Redis]:
        redis = self._site.redis
        return [] if redis is None or redis.is_away else [redis]

    def _clients(self) -> list[Client]:
        return [client for client in self._simulation.clients if client.router is not None]

    def _mark(self, kind: str, target: Any) -> None:
        """The requests this fault can hit."""
        if isinstance(target, PrefillEdge):
            target = target.owner
        if isinstance(target, Endpoint):
            ends = (target.process, target.peer.process)
            target = next(process for process in ends if isinstance(process, WorkerProcess))
        for client in self._simulation.clients:
            router = client.router
            if router is None:
                continue
            if client is target or router is target or isinstance(target, Redis):
                client.touched.add(kind)
            elif isinstance(target, WorkerProcess):
                workers = router.conductor.workers
                if workers.epoch(target.worker) == target.epoch and client.request in workers.in_flight_of(
                    target.worker
                ):
                    client.touched.add(kind)

    # ---- what lasts

    def _last(self, seconds: float, end: Callable[[], None], *, holds_up: bool) -> None:
        """`end` ends it, after this time or at `repair`. `holds_up`: a lease may expire that is wanted."""
        self._num_lasting += 1
        self._repairs[self._num_lasting] = end
        if holds_up:
            self._holding_up.add(self._num_lasting)
            self._site.held_up_until = float("inf")
        self._site.queue.after(seconds, self._end, self._num_lasting)

    def _end(self, number: int) -> None:
        end = self._repairs.pop(number, None)
        if end is not None:
            end()
            if number in self._holding_up:
                self._holding_up.discard(number)
                if not self._holding_up:
                    self._site.held_up_until = max(self._site.queue.now, self._late_until)

    def _some_time(self) -> float:
        """Between what nobody notices and what everybody does."""
        return self._rng.choice([0.02, 0.2, 1.0, 4.0, 9.0]) * (0.5 + self._rng.random())

    def _hang(self, process: Process) -> None:
        process.stop()
        self._last(self._some_time(), lambda: _resume(process), holds_up=_renews(process))

    def _cut_off(self, worker: WorkerProcess) -> None:
        """Its host is paused and its network gone: it is thought to be lost, and comes back."""
        for end in list(worker.endpoints):
            end.cut()
        self._hang(worker)

    def _hang_and_kill(self, worker: WorkerProcess) -> None:
        worker.stop()
        self._last(self._some_time(), lambda: worker.die() if worker.is_alive else None, holds_up=False)

    def _hang_and_replace(self, worker: WorkerProcess) -> None:
        """Its node is thought to be lost: the next epoch runs beside it, until it goes on."""
        worker.stop()
        self._site.queue.after(self._site.scenario.restart_s, self._simulation.succeed, worker)
        self._last(self._some_time(), lambda: _resume(worker), holds_up=_renews(worker))

    def _stall(self, end: Endpoint) -> None:
        ends = (end, end.peer) if self._rng.random() < 0.5 else (end,)
        for each in ends:
            each.stall()

        def heal() -> None:
            for each in ends:
                each.heal()

        self._last(self._some_time(), heal, holds_up=_is_control(end))

    def _jitter(self, end: Endpoint) -> None:
        end.slow_down(self._rng.choice([10.0, 100.0]))

        def as_usual() -> None:
            end.slow_down(1.0)
            self._late_until = max(self._late_until, end.busy_until)

        self._last(self._some_time(), as_usual, holds_up=_is_control(end))

    def _slow_edge(self, edge: PrefillEdge) -> None:
        edge.slowness = self._rng.choice([20.0, 300.0])

        def end() -> None:
            edge.slowness = 1.0

        self._last(self._some_time(), end, holds_up=False)

    def _slow_engine(self, worker: WorkerProcess) -> None:
        worker.slowness = self._rng.choice([5.0, 40.0])

        def end() -> None:
            worker.slowness = 1.0

        self._last(self._some_time(), end, holds_up=False)

    def _lose_redis(self, redis: Redis) -> None:
        """Stopped, or gone and back without what it knew."""
        redis.go_away()
        is_empty = self._rng.random() < 0.5
        self._last(self._some_time(), lambda: redis.come_back(empty=is_empty), holds_up=False)

    # ---- what happens at once

    def _drain(self, worker: WorkerProcess) -> None:
        worker.terminate(self._rng.choice([0.05, self._site.scenario.drain_grace_s]))

    def _shift(self, worker: WorkerProcess) -> None:
        self._simulation.shift(worker)
        self._drain(worker)

    def _fail_step(self, worker: WorkerProcess) -> None:
        worker.fails_next_step = True

    def _jump(self, process: Process) -> None:
        self._site.held_up_until = max(self._site.held_up_until, self._site.queue.now)
        process.jump(self._rng.choice([0.3, 3.0, 30.0]))


def _renews(process: Process) -> bool:
    """Whether it renews leases, or hears that they are renewed."""
    return not isinstance(process, PrefillProcess)


def _is_control(end: Endpoint) -> bool:
    """A stream between a router and a worker."""
    return isinstance(end.process, RouterProcess) or isinstance(end.peer.process, RouterProcess)


def _resume(process: Process) -> None:
    if process.is_alive and process.is_stopped:
        process.resume()


def _name(target: Any) -> str:
    if isinstance(target, Endpoint):
        return f"{target.process} <- {target.peer.process}"
    if isinstance(target, PrefillEdge):
        return f"{target.owner} -> {target.peer.worker}.{target.peer.epoch}"
    if isinstance(target, Redis):
        return "Redis"
    return str(target) if isinstance(target, Process) else str(target.request)
