"""A router process: the live conductor, its clients, and links to workers that do what the live ones do.

1. A worker's first message is `Register`: refused, or welcomed and fed as `WorkerJoined`
   (`router.worker_links`).
2. A request takes what it may use of its tenant's limits (shared through Redis where there are several
   routers), or its client comes again when it is told to.
   Every event goes to `Conductor.handle`, its actions out in order (`router.driver`).
3. A worker that says nothing for too long gets a second look, then it is given up and its stream fenced.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from bench.simulator.network import Endpoint
from bench.simulator.process import Process
from bench.simulator.shared_limits import SharedLimits
from bench.simulator.site import Site
from bench.simulator.violation import Violation
from cluster.ids import Epoch, RequestId, RouterId, WorkerId
from cluster.request import RequestSpec
from cluster.wire.messages import Heartbeat, Refused, Register, Role, Welcome
from router.conductor import Conductor
from router.conductor_io import (
    Action,
    Deliver,
    Ended,
    Event,
    FromWorker,
    Lifecycle,
    Send,
    Submitted,
    Tick,
    WorkerGone,
    WorkerJoined,
)
from router.quotas.book import Hold, QuotaBook, Wait
from router.quotas.limits import Demand
from router.registration import refusal
from router.silence import judge
from router.worker_links import FENCE_S

if TYPE_CHECKING:
    from bench.simulator.clients import Client


class _Link:
    """The router's end of a worker's stream."""

    def __init__(self, router: RouterProcess, endpoint: Endpoint) -> None:
        self._router = router
        self.endpoint = endpoint
        self.register: Register | None = None
        self.last_sign_at = 0.0
        self.is_suspected = False
        self.is_fenced = False

    def on_message(self, message: Any) -> None:
        register = self.register
        if register is None:
            self._router.on_register(self, message)
        else:
            self._router.on_worker_message(self, register, message)

    def on_closed(self) -> None:
        self._router.let_out(self, "it closed its stream")


class RouterProcess(Process):
    """One life of a router. Its requests end with it."""

    def __init__(self, site: Site, slot: int, epoch: Epoch) -> None:
        super().__init__(site.queue, site.rng, f"router-{slot}", epoch)
        self.slot = slot
        self.conductor = Conductor(site.scenario.conductor)
        self.clients: dict[RequestId, Client] = {}
        self._quotas = QuotaBook()
        self._shared = None if site.redis is None else SharedLimits(site.redis, self, RouterId(str(self)))
        self._holds: dict[RequestId, Hold] = {}
        self._site = site
        self._links: dict[WorkerId, _Link] = {}
        self._epochs: dict[WorkerId, Epoch] = {}
        self._events: deque[Event] = deque()
        self._is_feeding = False
        self._is_warm = False
        scenario = site.scenario
        self._silence_limit_s = scenario.missed_heartbeats * scenario.heartbeat_interval_s

    def takes_requests(self) -> bool:
        """As the gateway: once a decode worker was ready. From then on requests wait, or are told."""
        if self.is_alive and not self._is_warm:
            self._is_warm = self.conductor.workers.view().has_ready(Role.DECODE)
        return self.is_alive and self._is_warm

    def submit(self, client: Client, spec: RequestSpec) -> None:
        """Accept it, or let the client come again; perhaps after a lease of its tenant's limits."""

        def decided(verdict: Hold | Wait) -> None:
            if isinstance(verdict, Wait):
                assert verdict.retry_after_s is not None, "a prompt longer than what a minute has"
                self._site.counters["rate limited"] += 1
                client.come_again(verdict.retry_after_s)
                return
            self._holds[spec.request] = verdict
            self.clients[spec.request] = client
            self.feed(Submitted(spec))

        limits = self._site.scenario.limits
        demand = Demand(len(spec.token_ids), spec.sampling.max_tokens)
        if self._shared is None:
            decided(self._quotas.take(spec.tenant, limits, demand, self.now()))
        else:
            self._shared.take(spec.tenant, limits, demand, decided)

    def limits_are_quiet(self) -> bool:
        """Nothing of any tenant's limits is held."""
        return self._quotas.quiet() and (self._shared is None or self._shared.quiet())

    def feed(self, event: Event) -> None:
        """As `ConductorDriver.feed`."""
        self._events.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._events:
                for action in self._handle(self._events.popleft()):
                    if isinstance(action, Lifecycle):
                        self.clients[action.request].lifecycle(action)
                    elif isinstance(action, Send):
                        link = self._links.get(action.worker)
                        if link is not None:
                            link.endpoint.post(action.message)
                    elif isinstance(action, Deliver):
                        self.clients[action.request].deliver(action.delivery)
                    else:
                        self._ended(action)
        finally:
            self._is_feeding = False
        if not self._is_arming:
            self.arm()

    def _ended(self, ended: Ended) -> None:
        client = self.clients.pop(ended.request)
        self._settle(ended.request, len(client.spec.token_ids) + client.num_tokens)
        client.ended()

    def _settle(self, request: RequestId, num_tokens: int) -> None:
        hold = self._holds.pop(request)
        if self._shared is None:
            self._quotas.settle(hold, num_tokens, self.now())
        else:
            self._shared.settle(hold, num_tokens)

    def next_deadline(self) -> float | None:
        return self.conductor.next_deadline()

    def tick(self) -> None:
        self.feed(Tick())

    def _handle(self, event: Event) -> list[Action]:
        try:
            return self.conductor.handle(event, self.now())
        except Exception as error:  # the live router ends here: never to be seen in a run
            raise Violation("core", f"{self}: {event}: {type(error).__name__}: {error}") from error

    # ---- links

    def accept(self, endpoint: Endpoint) -> None:
        endpoint.handler = _Link(self, endpoint)

    def on_register(self, link: _Link, register: Any) -> None:
        assert isinstance(register, Register), register
        present = [other.register for other in self._links.values() if other.register is not None]
        block_size = self._site.scenario.block_size
        reason = refusal(register, present, self._epochs.get(register.worker), block_size)
        if reason is not None:
            link.endpoint.post(Refused(reason=reason))
            link.endpoint.close()
            return
        link.register = register
        link.last_sign_at = self.now()
        old = self._links.get(register.worker)
        self._links[register.worker] = link
        self._epochs[register.worker] = register.epoch
        if old is not None:
            old.endpoint.close()
        interval_s = self._site.scenario.heartbeat_interval_s
        link.endpoint.post(Welcome(router=RouterId(self.name), heartbeat_interval_s=interval_s))
        self.feed(WorkerJoined(register))
        self._watch(link, self._silence_limit_s)

    def on_worker_message(self, link: _Link, register: Register, message: Any) -> None:
        if link.is_fenced:
            self._drop(link, register, message)
        elif self._links.get(register.worker) is link:
            link.last_sign_at = self.now()
            self.feed(FromWorker(register.worker, register.epoch, message))

    def _drop(self, link: _Link, register: Register, message: Any) -> None:
        """Of a process that was given up: the conductor counts it. Its next heartbeat or stream ends it."""
        present = self._links.get(register.worker)
        register_here = None if present is None else present.register
        if register_here is not None and register_here.epoch == register.epoch:
            link.endpoint.close()
            return
        self.feed(FromWorker(register.worker, register.epoch, message))
        if isinstance(message, Heartbeat):
            link.endpoint.close()

    def let_out(self, link: _Link, reason: str) -> None:
        register = link.register
        if register is not None and self._links.get(register.worker) is link:
            del self._links[register.worker]
            self.feed(WorkerGone(register.worker, register.epoch, reason))

    def _watch(self, link: _Link, in_s: float) -> None:
        self.later(in_s, self._check, link, self.now() + in_s)

    def _check(self, link: _Link, due: float) -> None:
        assert link.register is not None
        if self._links.get(link.register.worker) is not link:
            return
        now = self.now()
        silent_s = now - link.last_sign_at
        verdict = judge(silent_s, now - due, self._silence_limit_s, link.is_suspected)
        link.is_suspected = verdict.is_suspected
        if verdict.look_in_s is not None:
            self._watch(link, verdict.look_in_s)
        else:
            self._site.counters["found hung"] += 1
            self.let_out(link, f"no sign of life for {silent_s:.1f} s")
            link.is_fenced = True
            self.later(FENCE_S, link.endpoint.close)
