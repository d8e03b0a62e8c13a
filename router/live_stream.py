"""A request's deliveries between the conductor's driver, which puts, and the gateway, which takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.errors import BatonError
from cluster.ids import RequestId
from cluster.request_context import current_request
from router.conductor_io import ClientFinished, ClientLeft, Event
from router.delivery import Delivery, Failed, RequestSummary


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
        self._deliveries: asyncio.Queue[Delivery | None] = asyncio.Queue()  # None: nothing follows
        self._summary: RequestSummary | None = None
        self.context = current_request()  # of the HTTP request that it is for, if any
        self.failure: BatonError | None = None  # set with the delivery of it

    # ---- the gateway's side

    def __aiter__(self) -> LiveStream:
        return self

    async def __anext__(self) -> Delivery:
        if self._summary is not None and self._deliveries.empty():
            raise StopAsyncIteration
        delivery = await self._deliveries.get()
        if delivery is None:
            raise StopAsyncIteration
        return delivery

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
        self._deliveries.put_nowait(delivery)

    def end(self, summary: RequestSummary) -> None:
        """The request is over; what was put can still be taken."""
        self._summary = summary
        self._deliveries.put_nowait(None)

    @property
    def has_ended(self) -> bool:
        return self._summary is not None
