"""A request's deliveries between the conductor's driver, which puts, and the gateway, which takes.

The gateway may iterate, which costs a turn of the event loop per delivery, or have each delivery handed over
with the event that brought it (`push_to`), and change between the two at any time: nothing is lost or passed
over. The driver puts all that an event brings, and then hands it over: what is known of a request by then,
its end included, is known to whoever takes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cluster.errors import BatonError
from cluster.ids import RequestId
from cluster.request_context import current_request
from router.conductor_io import ClientFinished, ClientLeft, Event
from router.delivery import Delivery, Failed, RequestSummary, Take


class LiveStream:
    """Implements `router.delivery.RequestStream`. Holds at most the request's own `max_tokens` tokens."""

    def __init__(
        self,
        request: RequestId,
        feed: Callable[[Event], None],
        look_up: Callable[[RequestId], RequestSummary | None],
    ) -> None:
        self._request = request
        self._feed = feed
        self._look_up = look_up
        self._waiting: deque[Delivery | None] = deque()  # None: nothing follows
        self._reader: asyncio.Future[None] | None = None  # who iterates and waits
        self._take: Take | None = None
        self._is_handing_over = False
        self._summary: RequestSummary | None = None
        self.context = current_request()  # of the HTTP request that it is for, if any
        self.failure: BatonError | None = None  # set with the delivery of it

    # ---- the gateway's side

    def __aiter__(self) -> LiveStream:
        return self

    async def __anext__(self) -> Delivery:
        if not self._waiting:
            if self._summary is not None:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        delivery = self._waiting.popleft()
        if delivery is None:
            raise StopAsyncIteration
        return delivery

    def push_to(self, take: Take | None) -> None:
        self._take = take
        self.hand_over()

    def finish(self) -> None:
        if self._summary is None:
            self._feed(ClientFinished(self._request))

    def abort(self, reason: str) -> None:
        if self._summary is None:
            self._feed(ClientLeft(self._request, reason))

    def summary(self) -> RequestSummary:
        summary = self._summary or self._look_up(self._request)
        assert summary is not None  # a request is live until it has a last summary
        return summary

    # ---- the driver's side

    def put(self, delivery: Delivery) -> None:
        if isinstance(delivery, Failed):
            self.failure = delivery.error
        self._waiting.append(delivery)

    def end(self, summary: RequestSummary) -> None:
        """The request is over; what was put can still be taken."""
        self._summary = summary
        self._waiting.append(None)

    @property
    def has_ended(self) -> bool:
        return self._summary is not None

    def hand_over(self) -> None:
        """What was put goes to the gateway, in order. What taking one brings comes after it."""
        if self._take is None:
            if self._reader is not None and self._waiting and not self._reader.done():
                self._reader.set_result(None)
            return
        if self._is_handing_over:
            return
        self._is_handing_over = True
        try:
            while self._waiting and self._take is not None:
                self._take(self._waiting.popleft())
        finally:
            self._is_handing_over = False
