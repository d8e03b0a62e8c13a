"""What the page shows of requests: lifecycle events folded into lanes and a window of latencies. Pure.

1. Every event goes to the request's lane (`router.lanes`); a lane that changes gets the next change number.
2. The last lifecycle event of a request and then its `Ended` close the lane: it moves to the ring of ended
   lanes, and the window (`router.page_window`) takes its latencies.
3. A viewer asks for the lanes that changed since the last number it saw.

Costs nothing per token: only lifecycle events and `Ended` come here, about ten per request. Memory is bounded
by the constants below; requests beyond `MAX_LIVE` have no lane but still count. No text of anybody, no token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.ids import RequestId
from cluster.latency_targets import LatencyTargets
from cluster.request import LifecycleEvent
from router.conductor_io import Ended, Lifecycle
from router.delivery import RequestSummary
from router.lanes import ENDS, Lane, advance, close, open_lane, tpot_s
from router.page_window import LatencyWindow, Sample

MAX_LIVE = 200
MAX_ENDED = 60

_E = LifecycleEvent


@dataclass(slots=True)
class FeedCounts:
    """Since the router was ready."""

    num_arrived: int = 0
    num_ended: int = 0
    num_retried: int = 0

    @property
    def num_live(self) -> int:
        return self.num_arrived - self.num_ended


class PageFeed:
    """Owns lanes and window. `look_up` reads what is known of a live request (`Conductor.summary`)."""

    def __init__(
        self,
        targets: LatencyTargets | None = None,
        look_up: Callable[[RequestId], RequestSummary | None] = lambda request: None,
        now: float = 0.0,
    ) -> None:
        self.window = LatencyWindow(targets or LatencyTargets(), now)
        self.counts = FeedCounts()
        self._look_up = look_up
        self._live: dict[RequestId, Lane] = {}
        self._ended: deque[Lane] = deque(maxlen=MAX_ENDED)
        self._last: Lifecycle | None = None  # a request's last event; its `Ended` is the next action
        self._change = 0

    # ---- events in

    def observe(self, action: Lifecycle | Ended) -> None:
        """Take the next lifecycle event, or the end of a request."""
        if isinstance(action, Ended):
            self._on_ended(action)
        elif action.event is _E.ARRIVED:
            self._on_arrived(action)
        else:
            self._on_later(action)

    def _on_arrived(self, life: Lifecycle) -> None:
        self.counts.num_arrived += 1
        if len(self._live) < MAX_LIVE:
            lane = self._live[life.request] = open_lane(life)
            self._touch(lane)

    def _on_later(self, life: Lifecycle) -> None:
        if life.event is _E.RETRIED:
            self.counts.num_retried += 1
        elif life.event in ENDS:
            self._last = life
            return
        lane = self._live.get(life.request)
        if lane is not None:
            advance(lane, life, self._look_up(life.request) if life.event is _E.FIRST_TOKEN else None)
            self._touch(lane)

    def _on_ended(self, ended: Ended) -> None:
        last, self._last = self._last, None
        if last is None or last.request != ended.request:
            return  # it began before anybody watched
        summary, num_tokens = ended.summary, last.num_tokens
        self.counts.num_ended += 1
        ttft_s = summary.ttft_s if num_tokens else None
        sample = Sample(ENDS[last.event], num_tokens, ttft_s, tpot_s(num_tokens, summary))
        self.window.record(sample, last.at)
        lane = self._live.pop(ended.request, None)
        if lane is not None:
            close(lane, last, summary)
            self._touch(lane)
            self._ended.append(lane)

    def _touch(self, lane: Lane) -> None:
        self._change += 1
        lane.change = self._change

    # ---- pictures out

    @property
    def change(self) -> int:
        """Number of the latest change of any lane."""
        return self._change

    def lanes(self, since: int = 0) -> Iterator[Lane]:
        """Those that changed after change number `since`: ended ones first, then live ones by arrival."""
        for lane in (*self._ended, *self._live.values()):
            if lane.change > since:
                yield lane

    @property
    def num_without_lane(self) -> int:
        """Live requests that no lane shows."""
        return self.counts.num_live - len(self._live)
