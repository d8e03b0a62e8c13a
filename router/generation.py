"""One answer in flight, from acceptance to accounting, and the set of all of them.

1. `Generation` wraps the conductor's stream: deliveries in, text pieces out.
2. It ends exactly once, in one of four ways: a finish reason from the worker, a stop string (told to the
   conductor with `finish`), a failure, or `end` from outside (the client left, the server stops).
3. `close` makes sure that nothing runs on unwatched and writes the request's one metrics record.

`InFlight` knows every open reply, so that a stopping server can wait for them, or end them with a reason.
What may be in a reply is an `Answering`: a `Generation`, or a beam search (`router.beam_run`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from cluster.clock import Clock
from cluster.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotReady,
    Overloaded,
    RateLimited,
    RequestError,
    WorkerLost,
)
from cluster.metrics import Metrics, Outcome, RequestRecord
from cluster.readable import plural
from cluster.sampling import FinishReason, PromptScore
from router.asgi import ClientLeft
from router.delivery import Delivery, Failed, NewTokens, RequestStream, RequestSummary, Take
from router.forks import SharedPrompt
from router.output import ChoiceOutput, Piece, TokenEntry
from router.reply import Choice, ChoicePlan, Usage

_OUTCOMES: tuple[tuple[type[BaseException], Outcome], ...] = (
    (ClientLeft, Outcome.CLIENT_LEFT),
    (RateLimited, Outcome.RATE_LIMITED),
    (RequestError, Outcome.INVALID),
    (Overloaded, Outcome.OVERLOADED),
    (NotReady, Outcome.NOT_READY),
    (DeadlineExceeded, Outcome.DEADLINE),
    (WorkerLost, Outcome.WORKER_LOST),
)


BY_CLIENTS = (Outcome.STOP, Outcome.LENGTH, Outcome.CLIENT_LEFT, Outcome.INVALID)


def outcome_of(error: BaseException) -> Outcome:
    return next((outcome for kind, outcome in _OUTCOMES if isinstance(error, kind)), Outcome.ERROR)


class Answering(Protocol):
    """What is under way for one reply. Ended by any, read by one task."""

    @property
    def is_clients(self) -> bool:
        """Over, and by what the client wanted or did: not failed by us."""
        ...

    @property
    def last_progress_s(self) -> float:
        """When it last brought tokens (or came), on the app's clock."""
        ...

    @property
    def num_computed(self) -> int:
        """Tokens that were generated for it so far, whether they are in an answer or not."""
        ...

    async def collect(self) -> list[Choice]:
        """Its choices, whole. Raises what it failed of, or was ended with."""
        ...

    def end(self, reason: Exception) -> None:
        """End it from outside: the reader gets `reason`. Does nothing when it is over."""
        ...

    def close(self) -> None:
        """Let go of it; aborts it if it is not over. Idempotent."""
        ...

    def summary(self) -> RequestSummary:
        """Where the time went, of what the client waited for first."""
        ...

    def usage(self) -> Usage:
        """So far. A prompt counts with its first answer."""
        ...


class Generation:
    """One choice being generated; read by one task, ended by any."""

    def __init__(
        self,
        stream: RequestStream,
        output: ChoiceOutput,
        plan: ChoicePlan,
        prompt: SharedPrompt,
        *,
        leads: bool,
        arrived_s: float,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """`leads`: it is the first answer to its prompt."""
        self.plan = plan
        self._stream = stream
        self._deliveries = stream.__aiter__()
        self._output = output
        self._prompt = prompt
        self._leads = leads
        self._arrived_s = arrived_s
        self._clock = clock
        self._metrics = metrics
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._ended_by: Exception | None = None
        self._outcome: Outcome | None = None
        self._closed = False

    @property
    def is_clients(self) -> bool:
        return self._outcome in BY_CLIENTS

    @property
    def num_computed(self) -> int:
        return self._output.num_tokens

    @property
    def last_progress_s(self) -> float:
        return self._arrived_s if self._last_s is None else self._last_s

    @property
    def prompt_scores(self) -> tuple[PromptScore, ...]:
        """Of the prompt's tokens, if they were asked for and its first piece is here."""
        return self._prompt.scores

    async def next_piece(self) -> Piece:
        """The next text; the last piece carries the finish reason.

        Raises:
            BatonError: the request failed.
            ClientLeft: or whatever else `end` was called with.
        """
        return self.take(await anext(self._deliveries, None))

    def push_to(self, take: Take | None) -> None:
        """See `RequestStream.push_to`; each delivery then goes through `take`."""
        self._stream.push_to(take)

    def take(self, delivery: Delivery | None) -> Piece:
        """What a delivery adds. Raises as `next_piece`."""
        if self._ended_by is not None:
            raise self._failed(self._ended_by)
        if delivery is None:
            raise self._failed(InternalError("the token stream ended without a finish reason"))
        if isinstance(delivery, Failed):
            raise self._failed(delivery.error)
        if delivery.finish_reason is FinishReason.FAILED:
            raise self._failed(_grammar_gave_up(self._output.num_tokens))
        self._observe_delivery(delivery)
        piece = self._output.push(delivery.outputs, delivery.finish_reason)
        if piece.finish_reason is not None:
            if delivery.finish_reason is None:
                self._stream.finish()
            self._outcome = Outcome.STOP if piece.finish_reason is FinishReason.STOP else Outcome.LENGTH
        return piece

    async def collect(self) -> list[Choice]:
        """All pieces put together. Raises as `next_piece`."""
        texts: list[str] = []
        entries: list[TokenEntry] = []
        while True:
            piece = await self.next_piece()
            texts.append(piece.text)
            entries.extend(piece.entries)
            if piece.finish_reason is not None:
                whole = Piece("".join(texts), tuple(entries), piece.finish_reason)
                return [Choice(self.plan, whole, self.prompt_scores)]

    def end(self, reason: Exception) -> None:
        if self._outcome is None and self._ended_by is None:
            self._ended_by = reason
            self._stream.abort("client left" if isinstance(reason, ClientLeft) else str(reason))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._leads:
            self._prompt.computed()
        if self._outcome is None:
            if self._ended_by is None:
                self._stream.abort("the reply was given up")
            self._outcome = outcome_of(self._ended_by) if self._ended_by else Outcome.ERROR
        self._metrics.observe_request(self._record(self._outcome))

    def summary(self) -> RequestSummary:
        return self._stream.summary()

    def usage(self) -> Usage:
        if not self._leads:
            return Usage(0, self._output.num_tokens, 0)
        cached_tokens = self._stream.summary().cached_tokens
        return Usage(len(self.plan.prompt_ids), self._output.num_tokens, cached_tokens)

    def _failed(self, error: Exception) -> Exception:
        self._outcome = outcome_of(error)
        return error

    def _observe_delivery(self, delivery: NewTokens) -> None:
        now = self._clock.now()
        if self._last_s is None:
            self._first_s = now
            if self._leads:
                self._prompt.computed(delivery.outputs[0].prompt_scores if delivery.outputs else ())
        else:
            self._metrics.observe_token_gap(now - self._last_s)
        self._last_s = now

    def _record(self, outcome: Outcome) -> RequestRecord:
        summary = self._stream.summary()
        answered = self._first_s is not None
        local = summary.prefill_worker == summary.decode_worker
        tpot_s = None
        if self._first_s is not None and self._last_s is not None and self._output.num_tokens > 1:
            tpot_s = (self._last_s - self._first_s) / (self._output.num_tokens - 1)
        return RequestRecord(
            outcome=outcome,
            num_prompt_tokens=len(self.plan.prompt_ids),
            num_cached_tokens=summary.cached_tokens,
            num_generated_tokens=self._output.num_tokens,
            num_attempts=summary.attempts,
            e2e_s=self._clock.now() - self._arrived_s,
            ttft_s=summary.ttft_s if answered else None,
            tpot_s=tpot_s,
            queue_s=summary.queue_s if answered else None,
            prefill_s=summary.prefill_s if answered else None,
            kv_transfer_s=summary.kv_transfer_s if answered and not local else None,
            decode_s=summary.decode_s if answered else None,
            local_prefill=local,
        )


def _grammar_gave_up(num_tokens: int) -> InvalidRequest:
    return InvalidRequest(
        f"The format that was asked for became too complex to follow after {plural(num_tokens, 'token')}.",
        code="format_too_complex",
    )


def total_usage(generations: Sequence[Answering]) -> Usage:
    """Of all choices of one reply."""
    usages = [generation.usage() for generation in generations]
    return Usage(
        sum(usage.num_prompt_tokens for usage in usages),
        sum(usage.num_generated_tokens for usage in usages),
        sum(usage.num_cached_tokens for usage in usages),
    )


def charge_of(generations: Sequence[Answering]) -> int | None:
    """Tokens that a reply which is over has cost its client; None if we failed it before its first token."""
    usage = total_usage(generations)
    if usage.num_generated_tokens == 0 and not any(item.is_clients for item in generations):
        return None
    return usage.num_prompt_tokens + sum(item.num_computed for item in generations)


class InFlight:
    """Every reply that is being written. One per app, on its event loop."""

    def __init__(self) -> None:
        self._generations: set[Answering] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._generations)

    @contextmanager
    def hold(self, generations: Sequence[Answering]) -> Iterator[None]:
        """Count these while the reply is written; closes them at the end, whatever happened."""
        self._generations.update(generations)
        self._idle.clear()
        try:
            yield
        finally:
            for generation in generations:
                generation.close()
            self._generations.difference_update(generations)
            if not self._generations:
                self._idle.set()

    async def drain(self, grace_s: float, end_within_s: float) -> bool:
        """Refuse new requests, let the open ones finish within `grace_s`, then end them with an error and
        give them `end_within_s` to say so. Whether all finished by themselves."""
        self.draining = True
        if await self._becomes_idle(grace_s):
            return True
        for generation in list(self._generations):
            generation.end(NotReady("The server stopped before the request was complete."))
        await self._becomes_idle(end_within_s)
        return False

    async def _becomes_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
