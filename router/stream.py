"""A reply as server-sent events: ready bytes, one write per delivery of tokens.

1. Nothing is sent until the first token: a request that fails before it gets a real HTTP status.
2. First token: status, headers, the opening (chat's role chunk) and the first delta, in one go.
3. Then one chunk per delivery, however many tokens it has. It is written the moment it is delivered, within
   the event that brought it (`BodyWriter`); only what the client does not take at once waits for the task of
   its choice. The last one of a choice goes out together with its finish chunk, and the last of all with the
   usage chunk if asked for, and `[DONE]`.
4. A companion task waits for the client to leave (the generations end at once, their blocks are freed), and
   sends `: ping` after every 15 seconds of silence, which starts the response if no token did. It also gives
   up on a cluster that stays silent and on a client that does not read.
5. A failure after the start is an error event, then `[DONE]`; the response always closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from cluster.errors import DeadlineExceeded
from cluster.sampling import FinishReason
from router.asgi import BodyWriter, ClientLeft, HeaderList, Receive, Send, until_disconnect
from router.aside import Aside
from router.delivery import Delivery
from router.generation import Generation, total_usage
from router.openai_errors import error_body, public_error
from router.output import Piece
from router.reply import (
    DONE,
    LARGE_NUM_SCORES,
    ReplyFormat,
    ReplyOptions,
    Usage,
    num_prompt_scores,
    timings_field,
)

SSE_HEADERS: HeaderList = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a reply waits, in seconds. `silence_s` is the backstop behind the conductor's own deadlines;
    `stalled_client_s` is how long a client may leave its socket unread."""

    heartbeat_s: float = 15.0
    silence_s: float = 600.0
    stalled_client_s: float = 120.0


class _Part(msgspec.Struct, frozen=True, gc=False):
    """Of the reply: what a delivery adds."""

    data: bytes
    ends_choice: bool = False
    ends_reply: bool = False


class StreamReply:
    """One streamed reply; `run` once."""

    def __init__(
        self,
        generations: Sequence[Generation],
        wire: ReplyFormat,
        options: ReplyOptions,
        *,
        request_id: str,
        patience: Patience,
        send: Send,
        body: BodyWriter | None,
        headers: Callable[[], HeaderList],
        aside: Aside,
    ) -> None:
        """`body`: where the server offers one. `headers`: further ones, asked for when the reply starts."""
        self._generations = generations
        self._num_open = len(generations)
        self._wire = wire
        self._options = options
        self._request_id = request_id
        self._patience = patience
        self._asgi_send = send
        self._body = body
        self._headers = headers
        self._aside = aside
        self._lock = asyncio.Lock()  # two tasks send
        self._num_unsent = 0  # parts that are rendered: they leave in this order
        self._started = False
        self._gave_up = False
        self._now = asyncio.get_running_loop().time
        self._last_token_s = self._last_sent_s = self._now()
        self._sending_since_s: float | None = None

    async def run(self, receive: Receive) -> None:
        """Write the reply until it is complete or the client has left.

        Raises:
            BatonError: it failed before anything was sent; the caller answers.
        """
        task = asyncio.current_task()
        assert task is not None
        companion = asyncio.create_task(self._accompany(receive, task))
        try:
            await self._write()
        except ClientLeft:
            return
        except asyncio.CancelledError:
            if not self._gave_up:
                raise
            task.uncancel()
        except Exception as error:
            self._end_all(error)
            if not self._started:
                raise
            event = b"data: " + error_body(public_error(error, self._request_id)) + b"\n\n"
            await self._send(event + DONE, more=False)
        finally:
            companion.cancel()
            await asyncio.gather(companion, return_exceptions=True)

    async def _write(self) -> None:
        if len(self._generations) == 1:
            await self._write_choice(self._generations[0])
            return
        tasks = [asyncio.create_task(self._write_choice(generation)) for generation in self._generations]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write_choice(self, generation: Generation) -> None:
        opened = False
        while True:
            if opened and self._body is not None:
                part = await self._write_on(generation, self._body)
            else:
                piece = await generation.next_piece()
                opening = b"" if opened else await self._open(generation)
                part = self._render(generation, piece, opening)
                opened = True
            if part.data:
                await self._send(part.data, more=not part.ends_reply)
            self._num_unsent -= 1
            if part.ends_choice:
                return

    async def _open(self, generation: Generation) -> bytes:
        """What comes before the first delta; with the log-probabilities of a prompt it may be much."""
        index, scores = generation.plan.index, generation.prompt_scores
        if num_prompt_scores(scores) > LARGE_NUM_SCORES:
            return await self._aside.run(self._wire.opening, index, scores)
        return self._wire.opening(index, scores)

    async def _write_on(self, generation: Generation, body: BodyWriter) -> _Part:
        """Write what comes the moment it comes; returns with what has to be sent: the client does not take it
        at once, another choice's part waits before it, or it is the choice's last."""
        rest: asyncio.Future[_Part] = asyncio.get_running_loop().create_future()

        def take(delivery: Delivery | None) -> None:
            if rest.cancelled():  # the reply was given up; its task has not run yet
                return
            try:
                part = self._render(generation, generation.take(delivery))
                is_next = self._num_unsent == 1 and not part.ends_choice
                if is_next and (not part.data or body.write(part.data)):
                    self._num_unsent = 0
                    self._last_sent_s = self._last_token_s
                    return
            except Exception as error:  # it is the reply's, not of who delivers
                generation.push_to(None)
                rest.set_exception(error)
                return
            generation.push_to(None)
            rest.set_result(part)

        generation.push_to(take)
        try:
            return await rest
        finally:
            generation.push_to(None)
            if rest.done() and not rest.cancelled():
                rest.exception()  # seen, even if this task is cancelled at the same moment

    def _render(self, generation: Generation, piece: Piece, data: bytes = b"") -> _Part:
        """After `data`, what the piece adds."""
        wire, index = self._wire, generation.plan.index
        self._num_unsent += 1
        self._last_token_s = self._now()
        if piece.text or piece.entries:
            data += wire.delta(index, piece, self._usage_so_far())
        if piece.finish_reason is None:
            return _Part(data)
        data += self._closing(generation, piece.finish_reason)
        return _Part(data, ends_choice=True, ends_reply=self._num_open == 0)

    def _closing(self, generation: Generation, reason: FinishReason) -> bytes:
        """What ends a choice, and with the last one the reply. Timings ride in the last chunk they fit in."""
        self._num_open -= 1
        timings = timings_field(self._options, generation.summary())
        in_usage = self._options.include_usage and len(self._generations) == 1
        closing = self._wire.finish(
            generation.plan.index, reason, self._usage_so_far(), b"" if in_usage else timings
        )
        if self._num_open == 0:
            closing += self._wire.ending(total_usage(self._generations), timings if in_usage else b"")
        return closing

    def _usage_so_far(self) -> Usage | None:
        return total_usage(self._generations) if self._options.continuous_usage else None

    def _end_all(self, reason: Exception) -> None:
        for generation in self._generations:
            generation.end(reason)

    async def _send(self, data: bytes, *, more: bool = True) -> None:
        async with self._lock:
            self._sending_since_s = self._now()
            if not self._started:
                self._started = True
                headers = [*SSE_HEADERS, *self._headers()]
                await self._asgi_send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._asgi_send({"type": "http.response.body", "body": data, "more_body": more})
            self._sending_since_s = None
            self._last_sent_s = self._now()

    async def _accompany(self, receive: Receive, writer: asyncio.Task[None]) -> None:
        """See 4. in the module's docstring; `writer` is the task in `_write`."""
        patience = self._patience
        while True:
            try:
                async with asyncio.timeout_at(self._last_sent_s + patience.heartbeat_s):
                    await until_disconnect(receive)
                self._end_all(ClientLeft())
                return
            except TimeoutError:
                now = self._now()
            if self._sending_since_s is not None:
                if now - self._sending_since_s > patience.stalled_client_s:
                    self._end_all(ClientLeft())
                    self._gave_up = True
                    writer.cancel()
                    return
                self._last_sent_s = now  # look again after the next interval
            elif now - self._last_token_s > patience.silence_s:
                self._end_all(DeadlineExceeded("The cluster made no progress with the request."))
                return
            elif now - self._last_sent_s >= patience.heartbeat_s:
                await self._send(PING)
