"""Several answers to one prompt: it is computed once, and the others start from what is cached.

1. The first answer is submitted at once. With its first token the prompt's KV is in the prefix caches of the
   workers that have it.
2. The others (`FollowingStream`) are submitted then. They are placed where the prefix is, share its blocks,
   and compute no more than its last, partial block.
3. The prompt's own log-probabilities come with the first answer and belong to all of them.

A follower whose leader failed or was given up is let go by whoever reads the reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from cluster.errors import BatonError
from cluster.request import RequestSpec
from cluster.sampling import PromptScore
from router.delivery import Delivery, Failed, RequestIntake, RequestStream, RequestSummary, Take

_NOT_SUBMITTED = RequestSummary.unknown(attempts=0)


class SharedPrompt:
    """What the answers to one prompt have in common. `scores`: of its tokens, once it is computed."""

    def __init__(self) -> None:
        self.scores: tuple[PromptScore, ...] = ()
        self._is_computed = False
        self._waiting: list[Callable[[], None]] = []

    def when_computed(self, call: Callable[[], None]) -> None:
        """At once, if it is."""
        if self._is_computed:
            call()
        else:
            self._waiting.append(call)

    def computed(self, scores: tuple[PromptScore, ...] = ()) -> None:
        """The first answer has its first token, or will never have one. Counts once."""
        if self._is_computed:
            return
        self._is_computed, self.scores = True, scores
        for call in self._waiting:
            call()
        self._waiting.clear()


class FollowingStream:
    """Implements `router.delivery.RequestStream` for an answer that waits for its prompt."""

    def __init__(self, intake: RequestIntake, spec: RequestSpec, prompt: SharedPrompt) -> None:
        self._intake = intake
        self._spec = spec
        self._inner: RequestStream | None = None
        self._is_over = False
        self._woken = asyncio.Event()
        prompt.when_computed(self._woken.set)

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self._deliveries()

    async def _deliveries(self) -> AsyncIterator[Delivery]:
        await self._woken.wait()
        if self._is_over:
            return
        try:
            self._inner = self._intake.submit(self._spec)
        except BatonError as error:
            yield Failed(error)
            return
        async for delivery in self._inner:
            yield delivery

    def push_to(self, take: Take | None) -> None:
        assert self._inner is not None  # its first delivery was read
        self._inner.push_to(take)

    def finish(self) -> None:
        if self._inner is not None:
            self._inner.finish()
        self._end()

    def abort(self, reason: str) -> None:
        if self._inner is not None:
            self._inner.abort(reason)
        self._end()

    def summary(self) -> RequestSummary:
        return _NOT_SUBMITTED if self._inner is None else self._inner.summary()

    def _end(self) -> None:
        self._is_over = True
        self._woken.set()
