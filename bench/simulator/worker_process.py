"""A worker process: a live core, an engine that takes virtual time, and links to the routers.

1. It dials every router, says `Register`, and dials again when a stream ends (`cluster.worker_driver`).
2. Every event goes to `core.handle`; the actions go to routers, to the engine, or to the role's KV side.
3. A step reads the pool when it begins and when it ends; its outcome is the next event.
4. SIGTERM drains it: it leaves when nothing runs or the grace time is over.
"""

from __future__ import annotations

from typing import Any

from bench.simulator.model import Engine, Pool
from bench.simulator.network import Endpoint
from bench.simulator.process import Process
from bench.simulator.scenario import BLOCK_BYTES
from bench.simulator.site import Site
from bench.simulator.violation import Violation
from cluster.cache_reports import CacheReports
from cluster.engine.batch import StepPlan
from cluster.engine.following import following_plan
from cluster.ids import Epoch, RouterId, WorkerId
from cluster.kv.block_manager import BlockManager
from cluster.wire.kv_events import KvResync
from cluster.wire.messages import (
    Drain,
    Heartbeat,
    KVGeometry,
    Refused,
    Register,
    Role,
    Welcome,
    WorkerState,
)
from cluster.worker_io import (
    Action,
    Event,
    FromRouter,
    RouterLost,
    RunStep,
    StepDone,
    StepFailed,
    Tick,
    ToRouter,
)
from decode_worker.core import DecodeCore
from prefill_worker.core import PrefillCore

FINGERPRINT = "scripted/1"
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_WELCOME_TIMEOUT_S = 10.0


class _Link:
    """The worker's end of its stream to a router."""

    def __init__(self, worker: WorkerProcess, slot: int, endpoint: Endpoint) -> None:
        self._worker = worker
        self.slot = slot
        self.endpoint = endpoint
        self.router: RouterId | None = None  # None before `Welcome`

    def on_message(self, message: Any) -> None:
        if isinstance(message, Refused):
            self._worker.refused(message)
        elif self.router is None:
            assert isinstance(message, Welcome), message
            self.router = message.router
            self._worker.welcomed(self, message.heartbeat_interval_s)
        elif isinstance(message, KvResync):
            self._worker.resync(self.router)
        else:
            self._worker.dispatch(FromRouter(self.router, message))

    def on_closed(self) -> None:
        self._worker.lost_router(self)


class WorkerProcess(Process):
    """One epoch of a worker, either role. Subclasses carry out what concerns KV edges."""

    core: PrefillCore | DecodeCore

    def __init__(self, site: Site, worker: WorkerId, role: Role, epoch: Epoch, num_blocks: int) -> None:
        super().__init__(site.queue, site.rng, worker, epoch)
        self.site = site
        self.worker = worker
        self.role = role
        self.blocks = BlockManager(num_blocks, site.scenario.block_size, FINGERPRINT)
        self.pool = Pool(num_blocks, site.scenario.block_size)
        self.engine = Engine(self.pool, self.blocks, site.oracles, str(self))
        self.slowness = 1.0  # of its steps
        self.fails_next_step = False
        self._links: dict[RouterId, _Link] = {}
        self._reports = CacheReports(self.blocks)
        self._last_state = WorkerState.READY
        self._is_leaving = False
        self._num_events = 0

    def start(self) -> None:
        for slot in range(len(self.site.routers)):
            self._dial(slot, 0)

    # ---- the core

    def dispatch(self, event: Event) -> None:
        """As `WorkerDriver.dispatch`."""
        now = self.now()
        try:
            actions = self.core.handle(event, now)
        except Exception as error:  # the live worker ends here: never to be seen in a run
            raise Violation("core", f"{self}: {event}: {type(error).__name__}: {error}") from error
        for action in actions:
            if isinstance(action, ToRouter):
                link = self._links.get(action.router)
                if link is not None:
                    link.endpoint.post(action.message)
            elif isinstance(action, RunStep):
                self._run(action.plan)
            else:
                self.carry(action)
        if self._reports.is_due(now):
            self._report()
        if self._is_leaving or self.core.state() is not self._last_state:
            self._after_change()
        if not self._is_arming:
            self.arm()

    def carry(self, action: Action) -> None:
        """What concerns peers."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        return self.core.next_deadline()

    def tick(self) -> None:
        self.dispatch(Tick())

    def _after_change(self) -> None:
        state = self.core.state()
        if state is not self._last_state:
            self._last_state = state
            for link in self._links.values():
                self._beat(link)
        if self._is_leaving:
            self._leave_if_idle()

    # ---- steps

    def _run(self, plan: StepPlan) -> None:
        self.engine.begin(plan)
        self._compute(plan)

    def _compute(self, plan: StepPlan) -> None:
        scenario = self.site.scenario
        compute_s = (scenario.step_s + scenario.token_s * plan.num_tokens) * self.slowness
        self.later(compute_s * (0.8 + 0.4 * self._rng.random()), self._end_step, plan, compute_s)

    def _end_step(self, plan: StepPlan, compute_s: float) -> None:
        self.site.log.note(self, "step")
        self.site.counters["steps"] += 1
        if self.fails_next_step:
            self.fails_next_step = False
            self.engine.spoil(plan)
            self.dispatch(StepFailed("out of memory"))
            return
        output = self.engine.finish(plan, compute_s)
        following = following_plan(plan, output) if self.core.may_go_on() else None
        if following is None:
            self.dispatch(StepDone(output))
            return
        self.engine.begin(following)  # at once; the core hears of it while that step computes
        done = StepDone(output, went_on=True)
        self.later(self._telling_s(compute_s), self._tell, done, following)

    def _telling_s(self, compute_s: float) -> float:
        """Until the core hears of a step that went on."""
        return compute_s * self._rng.random()

    def _tell(self, done: StepDone, following: StepPlan) -> None:
        """No step ends before the core has dealt with the one before."""
        self.site.counters["went on"] += 1
        self.dispatch(done)
        self._compute(following)

    # ---- routers

    def register(self) -> Register:
        scenario = self.site.scenario
        return Register(
            worker=self.worker,
            role=self.role,
            epoch=self.epoch,
            pid=self.epoch,
            model="scripted",
            fingerprint=FINGERPRINT,
            max_model_len=scenario.max_prompt_tokens + scenario.max_new_tokens + 1,
            max_num_seqs=scenario.decode.max_num_seqs,
            geometry=KVGeometry(
                first_layer=0,
                num_layers=1,
                first_head=0,
                num_heads=1,
                head_dim=BLOCK_BYTES // 2,
                block_size=scenario.block_size,
                num_blocks=self.blocks.num_blocks,
                dtype="float32",
            ),
            kv_address=self.worker if self.role is Role.DECODE else None,
            warm_edges=scenario.prefill.warm_edges if self.role is Role.PREFILL else 0,
        )

    def welcomed(self, link: _Link, interval_s: float) -> None:
        assert link.router is not None
        self._links[link.router] = link
        self._reports.joined(link.router)
        self._beat_on(link, interval_s)

    def resync(self, router: RouterId) -> None:
        self._reports.resync(router)
        self._report(force=True)

    def refused(self, message: Refused) -> None:
        """Its successor is here: the process ends with an error."""
        self.site.counters["refused"] += 1
        self.die()

    def lost_router(self, link: _Link) -> None:
        if link.router is not None and self._links.get(link.router) is link:
            del self._links[link.router]
            self._reports.lost(link.router)
            self.dispatch(RouterLost(link.router))
        if self.is_alive:
            self.later(_BACKOFF_S[0], self._dial, link.slot, 0)

    def _dial(self, slot: int, failures: int) -> None:
        if not self._is_leaving:
            self.later(self.site.network.delay(), self._dialled, slot, failures)

    def _dialled(self, slot: int, failures: int) -> None:
        router = self.site.routers[slot]
        if not router.is_alive:
            self.later(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)], self._dial, slot, failures + 1)
            return
        near, far = self.site.network.control_stream(self, router)
        link = _Link(self, slot, near)
        near.handler = link
        router.accept(far)
        near.post(self.register())
        self.later(_WELCOME_TIMEOUT_S, self._give_up, link)

    def _give_up(self, link: _Link) -> None:
        """No `Welcome` in time."""
        if link.router is None and link.endpoint.is_open:
            link.endpoint.close()
            self.lost_router(link)

    def _beat_on(self, link: _Link, interval_s: float) -> None:
        if link.endpoint.is_open:
            self._report(force=True)
            self._beat(link)
            self.later(interval_s, self._beat_on, link, interval_s)

    def _report(self, *, force: bool = False) -> None:
        for router, report in self._reports.due(self.now(), force=force):
            self._links[router].endpoint.post(report)

    def _beat(self, link: _Link) -> None:
        link.endpoint.post(Heartbeat(state=self.core.state(), load=self.core.load()))

    # ---- drain

    def terminate(self, grace_s: float) -> None:
        """SIGTERM."""
        if self._is_leaving:
            return
        self._is_leaving = True
        if not self._links:  # nobody's request can be here
            self._exit()
            return
        self.later(grace_s, self._exit)
        for router in list(self._links):
            self.dispatch(FromRouter(router, Drain(grace_s=grace_s)))
            if not self.is_alive:
                return

    def _leave_if_idle(self) -> None:
        load = self.core.load()
        if load.running == 0 and load.waiting == 0 and self.core.state() is WorkerState.DRAINING:
            self._exit()

    def _exit(self) -> None:
        if self.is_alive:
            self.site.counters["drained"] += 1
            self.leave()

    def _end(self) -> None:
        super()._end()
        self.site.on_exit(self)
