"""The streams of workers: who is let in, what comes in, who is still alive.

Life of a link:

1. A worker dials; the stream is authenticated before it gets here. Its first message must be `Register`, in
   time.
2. It is refused with a reason (`router.registration`), or welcomed and fed to the conductor as
   `WorkerJoined`. A newer process of the same name takes the place of the older.
3. Every message goes to the conductor, in order, and is a sign of life. None for `missed_heartbeats`
   intervals: the process hangs and is dead for the conductor. Its stream is *fenced*: should it go on, what
   it had still to say is dropped and counted, and its first heartbeat ends the stream, so that it frees
   everything and dials anew.
4. The end of the stream, whatever its cause, is `WorkerGone`, exactly once. So is the end of its *lifeline*,
   a second stream that names the link. When the process is killed, one of the two ends at once, the other
   when its memory was taken apart, up to a second later. If it is the lifeline, what the process still said
   has a moment to be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cluster.errors import ProtocolError, WireError
from cluster.ids import Epoch, RouterId, WorkerId
from cluster.wire.kv_events import DiallerSays, RouterSays
from cluster.wire.messages import Heartbeat, Lifeline, Refused, Register, Welcome
from cluster.wire.stream import Stream
from router.believable import unbelievable
from router.conductor_io import Event, FromWorker, WorkerGone, WorkerJoined
from router.registration import refusal
from router.silence import judge

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 5.0
LAST_WORDS_S = 0.02  # between the end of a lifeline and that of its link
FENCE_S = 60.0  # how long a hung process may take to end or go on before its stream is cut


@dataclass(slots=True)
class _Link:
    stream: Stream[DiallerSays]
    number: int
    register: Register
    last_sign_at: float
    lifeline: Stream[DiallerSays] | None = None
    watch: asyncio.TimerHandle | None = None
    suspected: bool = False  # silent at the last look; what it sent meanwhile may still be unread
    is_fenced: bool = False  # hung: dead for the conductor
    is_doubted: bool = False  # it reported what cannot be, and the log says so
    end: str = "it closed its stream"  # why, if nothing else ends it


class WorkerLinks:
    """Owns the streams; belongs to one event loop. `feed` takes events for the conductor."""

    def __init__(
        self,
        router: RouterId,
        feed: Callable[[Event], None],
        *,
        block_size: int,
        heartbeat_interval_s: float,
        missed_heartbeats: int = 5,
    ) -> None:
        self._router = router
        self._feed = feed
        self._block_size = block_size
        self._heartbeat_interval_s = heartbeat_interval_s
        self._silence_limit_s = missed_heartbeats * heartbeat_interval_s
        self._links: dict[WorkerId, _Link] = {}
        self._numbered: dict[int, _Link] = {}  # all whose stream is open, also the fenced
        self._num_links = 0
        self._time = asyncio.get_running_loop().time
        self._epochs: dict[WorkerId, Epoch] = {}  # the latest seen of each name

    def __len__(self) -> int:
        return len(self._links)

    def silence_s(self, worker: WorkerId) -> float:
        """Seconds since the last sign of life of a worker that is here."""
        return self._time() - self._links[worker].last_sign_at

    def post(self, worker: WorkerId, message: RouterSays) -> None:
        """Send without waiting; dropped if the worker is gone, whose `WorkerGone` is then on its way.

        Raises:
            ProtocolError: the message is too long for the wire.
        """
        link = self._links.get(worker)
        if link is not None:
            link.stream.post(message)

    async def on_stream(self, stream: Stream[DiallerSays]) -> None:
        """Serve one stream to its end; the listener closes it then."""
        first = await self._first_message(stream)
        if isinstance(first, Register):
            await self._serve(stream, first)
        elif first is not None:
            await self._follow(stream, first)

    async def _serve(self, stream: Stream[DiallerSays], register: Register) -> None:
        present = [link.register for link in self._links.values()]
        reason = refusal(register, present, self._epochs.get(register.worker), self._block_size)
        if reason is not None:
            logger.warning("refused %s epoch %d: %s", register.worker, register.epoch, reason)
            stream.post(Refused(reason=reason))
            return
        link = self._take_in(stream, register)
        try:
            await stream.pump(partial(self._take, link))
        except WireError as error:
            link.end = str(error)
            raise
        finally:
            del self._numbered[link.number]
            self._let_out(link, link.end)
            if link.lifeline is not None:  # a host that is lost never ends it
                link.lifeline.abort()

    def _take(self, link: _Link, message: DiallerSays) -> bool:
        """A message on a link; False: the stream ends here."""
        register = link.register
        if link.is_fenced:
            return self._drop(link, message)
        if self._links.get(register.worker) is not link:
            return False  # replaced
        link.last_sign_at = self._time()
        if isinstance(message, (Register, Lifeline)):
            raise ProtocolError(f"{register.worker} registered twice on one stream")
        if isinstance(message, Refused):
            link.end = f"it refused: {message.reason}"
            return False
        if isinstance(message, Heartbeat):
            _doubt(link, message)
        self._feed(FromWorker(register.worker, register.epoch, message))
        return True

    async def _follow(self, stream: Stream[DiallerSays], lifeline: Lifeline) -> None:
        link = self._numbered.get(lifeline.link)
        if link is None:
            return  # that link ended before
        link.lifeline = stream
        async for message in stream:
            raise ProtocolError(f"a lifeline carries no {type(message).__name__}")
        await asyncio.sleep(LAST_WORDS_S)
        if self._links.get(link.register.worker) is link:
            self._let_out(link, "its process ended")
            link.stream.abort()

    def close(self) -> None:
        """Cut all streams; every worker is gone for the conductor."""
        for link in list(self._links.values()):
            link.stream.abort()
            self._let_out(link, "the router stops")

    async def _first_message(self, stream: Stream[DiallerSays]) -> Register | Lifeline | None:
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                first = await anext(stream, None)
        except TimeoutError:
            logger.warning("stream from %s closed: no Register in %g s", stream.peer, REGISTER_TIMEOUT_S)
            return None
        if first is not None and not isinstance(first, Register | Lifeline):
            raise ProtocolError(f"the first message must be Register, not {type(first).__name__}")
        return first

    def _take_in(self, stream: Stream[DiallerSays], register: Register) -> _Link:
        self._num_links += 1
        link = _Link(stream, self._num_links, register, self._time())
        self._numbered[link.number] = link
        old = self._links.get(register.worker)
        self._links[register.worker] = link
        self._epochs[register.worker] = register.epoch
        if old is not None:
            if old.watch is not None:
                old.watch.cancel()
            old.stream.abort()
        interval_s = self._heartbeat_interval_s
        stream.post(Welcome(router=self._router, heartbeat_interval_s=interval_s, link=link.number))
        logger.info("%s epoch %d joined, pid %d", register.worker, register.epoch, register.pid)
        self._feed(WorkerJoined(register))
        self._watch(link, self._silence_limit_s)
        return link

    def _let_out(self, link: _Link, reason: str) -> None:
        if link.watch is not None:
            link.watch.cancel()
        register = link.register
        if self._links.get(register.worker) is link:
            del self._links[register.worker]
            logger.warning("%s epoch %d is gone: %s", register.worker, register.epoch, reason)
            self._feed(WorkerGone(register.worker, register.epoch, reason))

    # ---- hung workers

    def _watch(self, link: _Link, in_s: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + in_s
        link.watch = loop.call_at(due, self._check, link, due)

    def _check(self, link: _Link, due: float) -> None:
        now = self._time()
        silent_s = now - link.last_sign_at
        verdict = judge(silent_s, now - due, self._silence_limit_s, link.suspected)
        link.suspected = verdict.is_suspected
        if verdict.look_in_s is not None:
            self._watch(link, verdict.look_in_s)
        else:
            self._let_out(link, f"no sign of life for {silent_s:.1f} s")
            link.is_fenced = True
            link.watch = asyncio.get_running_loop().call_later(FENCE_S, link.stream.abort)

    def _drop(self, link: _Link, message: DiallerSays) -> bool:
        """A message of a process that was given up: the conductor counts it. False: it goes on, or its next
        stream is here."""
        register = link.register
        present = self._links.get(register.worker)
        if present is not None and present.register.epoch == register.epoch:
            return False
        if not isinstance(message, Lifeline):
            self._feed(FromWorker(register.worker, register.epoch, message))
        return not isinstance(message, Heartbeat)


def _doubt(link: _Link, beat: Heartbeat) -> None:
    """Tell once what a worker reports that cannot be."""
    names = [] if link.is_doubted else unbelievable(beat.load)
    if names:
        link.is_doubted = True
        who = link.register
        text = "%s epoch %d reports what cannot be (%s): what it said before stands"
        logger.warning(text, who.worker, who.epoch, ", ".join(names))
