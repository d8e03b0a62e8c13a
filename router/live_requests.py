"""The requests of a router that are not over: which there are, when each is due, and what is told of them.

1. `add`: a request arrives.
2. `wait`: it has one deadline at a time, that of its present wait or its own if that is sooner; `pop_due`
   names those whose time is over.
3. `record`: each thing that happens to it, for traces, logs and metrics.
4. `close`: it is over and forgotten; `Ended` is the last that is said of it.

Apart from the conductor, which decides all this, so that a request, its deadline and its last word can only
come and go together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from cluster.ids import RequestId
from cluster.request import LifecycleEvent, RequestSpec, RequestState
from router.attempt import LiveRequest, targets_of
from router.conductor_io import Action, Ended, Lifecycle
from router.config import ConductorConfig
from router.deadlines import Deadlines


class LiveRequests:
    """Owns the requests and their deadlines."""

    def __init__(self, config: ConductorConfig, emit: Callable[[Action], None]) -> None:
        self._config = config
        self._emit = emit
        self._num_added = 0
        self._requests: dict[RequestId, LiveRequest] = {}
        self._deadlines: Deadlines[RequestId] = Deadlines()

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request: RequestId) -> LiveRequest:
        return self._requests[request]

    def values(self) -> Collection[LiveRequest]:
        return self._requests.values()

    def get(self, request: RequestId) -> LiveRequest | None:
        return self._requests.get(request)

    @property
    def num_deadlines(self) -> int:
        return len(self._deadlines)

    def next_deadline(self) -> float | None:
        """When the next of them is due; None if none waits."""
        return self._deadlines.next()

    def may_be_due_before(self, at: float) -> bool:
        """Whether `next_deadline()` can be sooner than `at`: cheap enough for every event."""
        return self._deadlines.may_end_before(at)

    def add(self, spec: RequestSpec, now: float) -> LiveRequest:
        """A request that is not here yet, in QUEUED."""
        assert spec.request not in self._requests, f"request id used twice: {spec.request}"
        self._num_added += 1
        live = LiveRequest(
            request=spec.request,
            spec=spec,
            arrived_at=now,
            deadline_at=None if spec.deadline_s is None else now + spec.deadline_s,
            order=(spec.priority << 48) + self._num_added,
            targets=targets_of(spec.slo, self._config.slo),
            wait_until=now + self._config.queue_timeout_s,
        )
        self._requests[spec.request] = live
        self.record(live, LifecycleEvent.ARRIVED, now)
        return live

    def wait(self, live: LiveRequest, until: float) -> None:
        """Its present wait ends then."""
        self._deadlines.set(live.request, until if live.deadline_at is None else min(until, live.deadline_at))

    def pop_due(self, now: float) -> list[LiveRequest]:
        """Those whose deadline is not after `now`, earliest first; they have none any more."""
        return [self._requests[request] for request in self._deadlines.pop_due(now)]

    def record(self, live: LiveRequest, event: LifecycleEvent, now: float, detail: str = "") -> None:
        is_new = event is LifecycleEvent.ARRIVED
        num_tokens = len(live.spec.token_ids) if is_new else len(live.output_ids)
        self._emit(Lifecycle(live.request, event, now, num_tokens=num_tokens, detail=detail))

    def close(
        self, live: LiveRequest, state: RequestState, event: LifecycleEvent, detail: str, now: float
    ) -> None:
        """It ends in `state`; nothing of it is on any worker."""
        live.move(state)
        self.record(live, event, now, detail)
        self._deadlines.drop(live.request)
        del self._requests[live.request]
        self._emit(Ended(live.request, live.summary()))
