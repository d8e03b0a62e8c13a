"""The conductor alive: its events come from streams, clients and one timer, its actions go out at once.

1. `feed` hands an event to the conductor, carries the actions out in order, hands deliveries over, and arms
   the timer for the next deadline. Nothing in it waits, so events never overlap.
2. `submit` is the gateway's way in; what it returns is fed by `Deliver` actions until `Ended`. A cluster that
   was ready once and has no worker at the moment still takes requests: they wait for one to come back.
3. Once workers are ready, one generation of our own goes through the whole path; only when it has succeeded
   are requests let in. From then on `watchers` see every lifecycle event and end of a request.
4. A bug in the conductor (an illegal transition, a broken assertion) leaves nothing to trust: every request
   fails, every worker is let go (which frees what it held for us), and `broken` is set so that the process
   ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from cluster.clock import Clock
from cluster.errors import BatonError, InternalError, NotReady, ProtocolError
from cluster.ids import RequestId, RouterId, WorkerId
from cluster.request import LifecycleEvent, RequestSpec
from cluster.sampling import SamplingParams
from cluster.wire.messages import Prefill, Reserve
from router.conductor import Conductor
from router.conductor_io import (
    Action,
    ClientLeft,
    Deliver,
    Ended,
    Event,
    FromWorker,
    Lifecycle,
    Send,
    Submitted,
    Tick,
)
from router.delivery import ClusterSnapshot, Failed, Readiness, RequestSummary, WorkerStatus
from router.live_stream import LiveStream
from router.outcome import message_too_long
from router.readiness import ReadinessJudge
from router.worker_links import WorkerLinks

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 2
WARM_UP_DEADLINE_S = 60.0
WARM_UP_RETRY_S = 1.0
NOTHING_KNOWN = RequestSummary.unknown(attempts=1)
_LEVELS = {
    LifecycleEvent.RETRIED: logging.WARNING,
    LifecycleEvent.FAILED: logging.WARNING,
    LifecycleEvent.RESUMED: logging.INFO,
}


class ConductorDriver:
    """Implements `RequestIntake` and `ClusterStatus`; `links.on_stream` takes the workers' streams. Belongs
    to one event loop."""

    def __init__(
        self,
        router: RouterId,
        conductor: Conductor,
        judge: ReadinessJudge,
        clock: Clock,
        *,
        block_size: int,
        heartbeat_interval_s: float,
        watchers: Sequence[Callable[[Lifecycle | Ended], None]] = (),
    ) -> None:
        self._router = router
        self._watchers = watchers
        self._conductor = conductor
        self._judge = judge
        self._clock = clock
        self._block_size = block_size
        self.links = WorkerLinks(
            router, self.feed, block_size=block_size, heartbeat_interval_s=heartbeat_interval_s
        )
        self._streams: dict[RequestId, LiveStream] = {}
        self._touched: deque[LiveStream] = deque()  # something was put there and not handed over yet
        self._events: deque[Event] = deque()
        self._is_feeding = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._warm_up: asyncio.Task[None] | asyncio.TimerHandle | None = None
        self._num_warm_ups = 0
        self.became_ready = asyncio.Event()
        self.broken = asyncio.Event()

    # ---- the gateway's side

    def submit(self, spec: RequestSpec) -> LiveStream:
        """Accept a request; see `RequestIntake`."""
        readiness = self.ready()
        may_wait = self._judge.may_recover or (spec.goes_on and self._judge.is_warm)
        if not readiness.ready and (self.broken.is_set() or not may_wait):
            raise NotReady(f"The cluster is not ready: {readiness.phase}.", retry_after_s=1.0)
        return self._submit(spec)

    def ready(self) -> Readiness:
        if self.broken.is_set():
            return Readiness(ready=False, phase="stopping")
        return self._judge.judge(self._conductor.workers.view())

    def cluster(self) -> ClusterSnapshot:
        readiness = self.ready()
        return ClusterSnapshot(
            state=readiness.phase,
            queued=self._conductor.num_queued,
            workers=tuple(self._status(worker) for worker in sorted(self._conductor.workers.ids())),
            stale_messages=self._conductor.stale_messages(),
            placement=self._conductor.placement_stats,
            role_shifts=self._conductor.workers.role_shifts(),
        )

    def max_model_len(self) -> int | None:
        return self._conductor.workers.view().max_model_len()

    @property
    def num_live(self) -> int:
        return self._conductor.num_live

    # ---- the loop

    def feed(self, event: Event) -> None:
        """Let the conductor handle an event, and everything that follows from it."""
        if self.broken.is_set():
            return
        self._events.append(event)
        if self._is_feeding:
            return  # carrying out an action brought it: it comes after those that are left
        self._is_feeding = True
        try:
            while self._events:
                for action in self._conductor.handle(self._events.popleft(), self._clock.now()):
                    self._carry_out(action)
                while self._touched:
                    self._touched.popleft().hand_over()
        except Exception:
            logger.critical("the conductor is broken; this router ends", exc_info=True)
            self._break()
            return
        finally:
            self._is_feeding = False
        self._arm()
        if not self._judge.is_warm:
            self._consider_warm_up()

    def start_draining(self) -> None:
        """Take no new requests; what runs goes on."""
        self._judge.is_draining = True

    def close(self) -> None:
        """End every request (their holders are told) and stop the timer."""
        self._judge.is_draining = True
        if self._warm_up is not None:
            self._warm_up.cancel()
        for request in list(self._streams):
            self.feed(ClientLeft(request, "the router stops"))
        if self._timer is not None:
            self._timer.cancel()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Deliver(request, delivery):
                stream = self._streams[request]
                stream.put(delivery)
                self._touched.append(stream)
            case Send():
                self._send(action)
            case Lifecycle():
                _log(action, self._streams.get(action.request))
                self._tell(action)
            case Ended(request, summary):
                stream = self._streams.pop(request)
                stream.end(summary)
                self._touched.append(stream)
                self._tell(action)

    def _tell(self, action: Lifecycle | Ended) -> None:
        if self._judge.is_warm:
            for watch in self._watchers:
                watch(action)

    def _send(self, send: Send) -> None:
        try:
            self.links.post(send.worker, send.message)
        except ProtocolError as error:
            message, epoch = send.message, self._conductor.workers.epoch(send.worker)
            if epoch is None or not isinstance(message, Prefill | Reserve):
                raise
            self._events.append(FromWorker(send.worker, epoch, message_too_long(message, str(error))))

    def _arm(self) -> None:
        """Keep one timer, due no later than the next deadline. One that is too early ticks for nothing."""
        if self._timer is not None and not self._conductor.may_be_due_before(self._timer_due):
            return
        due = self._conductor.next_deadline()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock.now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())

    def _break(self) -> None:
        self.broken.set()
        self._events.clear()
        if self._timer is not None:
            self._timer.cancel()
        for request, stream in self._streams.items():
            stream.put(Failed(InternalError("The router failed.")))
            stream.end(self._conductor.summary(request) or NOTHING_KNOWN)
            stream.hand_over()
        self._streams.clear()
        self.links.close()

    def _submit(self, spec: RequestSpec) -> LiveStream:
        stream = LiveStream(spec.request, self.feed, self._conductor.summary)
        self._streams[spec.request] = stream
        self.feed(Submitted(spec))
        if stream.has_ended and stream.failure is not None:
            raise stream.failure
        return stream

    # ---- warm-up

    def _consider_warm_up(self) -> None:
        if self.became_ready.is_set() or self._warm_up is not None:
            return
        if self.ready().phase == "warming_up":
            self._warm_up = asyncio.get_running_loop().create_task(self._run_warm_up())

    async def _run_warm_up(self) -> None:
        """One short generation over the way that requests take; again a little later if it fails."""
        self._num_warm_ups += 1
        num_tokens = min(2 * self._block_size + 1, (self.max_model_len() or 1) - WARM_UP_TOKENS)
        spec = RequestSpec(
            request=RequestId(f"warm-up-{self._router}-{self._num_warm_ups}"),
            token_ids=tuple(position % 8 for position in range(max(1, num_tokens))),
            sampling=SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0),
            cache_salt="warm-up",
            deadline_s=WARM_UP_DEADLINE_S,
        )
        try:
            stream = self._submit(spec)
            async for delivery in stream:
                if isinstance(delivery, Failed):
                    raise delivery.error
        except BatonError as error:
            logger.warning("warm-up %d failed, next in %g s: %s", self._num_warm_ups, WARM_UP_RETRY_S, error)
            self._warm_up = asyncio.get_running_loop().call_later(WARM_UP_RETRY_S, self._warm_up_again)
            return
        summary = stream.summary()
        logger.info("ready: warm-up took %.3f s to its first token", summary.ttft_s)
        self._judge.is_warm = True
        self._warm_up = None
        self.became_ready.set()

    def _warm_up_again(self) -> None:
        self._warm_up = None
        self._consider_warm_up()

    # ---- pictures

    def _status(self, worker: WorkerId) -> WorkerStatus:
        register = self._conductor.workers.register(worker)
        state, is_stuck, load = self._conductor.workers.state(worker)
        return WorkerStatus(
            worker=worker,
            role=register.role,
            epoch=register.epoch,
            pid=register.pid,
            state="stuck" if is_stuck else state.value,
            load=load,
            heartbeat_age_s=self.links.silence_s(worker),
            max_num_seqs=register.max_num_seqs,
        )


def _log(life: Lifecycle, stream: LiveStream | None) -> None:
    """Trouble is told; the rest is for those who look for it. Both names of the request are: the cluster's
    and the client's, which the worker's message that brought the trouble does not know."""
    level = _LEVELS.get(life.event, logging.DEBUG)
    if logger.isEnabledFor(level):
        where, detail = life.worker or "-", life.detail or "-"
        context = None if stream is None else stream.context
        names = {"request": life.request, "request_id": None if context is None else context.label}
        message = "%s %s worker=%s %s"
        logger.log(level, message, life.request, life.event.name, where, detail, extra=names)
