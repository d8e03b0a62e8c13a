"""Sends what is due and follows every request to its end: one per client process, in one event loop.

1. The alarm rings at the moment the next request is due; it is sent on an idle connection or a fresh one, a
   bounded number of requests at a time.
2. Reads come stamped out of the inbox into the request's `ResponseStream`.
3. With the verdict the request's record is made; what its end makes due (a slot, a next turn) is sent at
   once.
4. A reused connection that broke at once, before any byte came back, was stale: the request goes out once
   more on a fresh one, and its record counts that. One that broke later was read by the server, so asking
   again would hide a failure.
5. A request without an end within `timeout_s`, or without a byte for `stall_s`, ends as `timeout`.
6. `stop` cancels what is in flight and gives up what is not; then, or when all has ended, `is_over`.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import time
from collections.abc import Callable, Iterable

from bench.load.client.alarm import make_alarm
from bench.load.client.chats import Chats
from bench.load.client.connection import Connection, Connections, Dialled, Inbox
from bench.load.client.flight import NS, OWN_LIMITS, Flight, blank_record, reason
from bench.load.client.frames import Job, Setup, Tick
from bench.load.client.http_stream import ResponseStream
from bench.load.client.limits import Limits
from bench.load.client.offering import Due, Offering
from bench.load.records import RequestRecord, Status

MAX_SENDS_PER_TURN = 16  # some milliseconds: the answers to the first of many are read between
STALE_S = 0.05  # a server that closed an idle connection says so within a round trip
MAX_DRAIN_S = 1.0  # between `[DONE]` and the end of the HTTP message; then the connection is not used again


class LoadClient:
    """Owner of all requests of one process. `on_over` is called when every job has its record."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        setup: Setup,
        jobs: Iterable[Job],
        context: ssl.SSLContext | None,
        on_over: Callable[[], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self.connections = Connections(loop, setup.host, setup.port, context)
        self._loop = loop
        self._setup = setup
        self._offering = Offering(jobs, setup.num_slots)
        self._chats = Chats()
        self._inbox = Inbox(loop, self._on_read)
        self._alarm = make_alarm(loop, self._send_due)
        self._on_over = on_over
        self._on_fault = on_fault
        self._start_ns = 0
        self._is_started = False
        self._is_sending = False
        self._num_left = setup.num_jobs
        self._flights: dict[Flight, None] = {}  # in order of their start
        self._by_connection: dict[Connection, Flight] = {}  # until the HTTP message is over
        self._limits = Limits(loop, setup.timeout_s, setup.stall_s, self._flights, self._too_late)
        self._ended: list[RequestRecord] = []
        self._started: list[tuple[int, float]] = []

    @property
    def is_over(self) -> bool:
        return self._num_left == 0

    def start(self, start_ns: int) -> None:
        """Time 0 of the plan is `start_ns`."""
        self._start_ns = start_ns
        self._is_started = True
        self._arm()
        if self.is_over:
            self._on_over()

    def stop(self) -> None:
        """End everything now; what was measured stays."""
        now_ns = time.perf_counter_ns()
        for due in self._offering.drop_all(self._seconds(now_ns) if self._is_started else 0.0):
            self._skip(due, "the run was interrupted before it was sent")
        for flight in list(self._flights):
            self._cut(flight, Status.CANCELLED, f"the run was interrupted {flight.phase}", now_ns)
        if self.is_over:
            self._on_over()

    def tick(self) -> Tick:
        """What happened since the last one."""
        num_chunks = sum(len(flight.stream.answer.moments_ns) for flight in self._flights)
        tick = Tick(self._started, len(self._flights), num_chunks, self._ended)
        self._started, self._ended = [], []
        return tick

    def close(self) -> None:
        self._alarm.close()
        self._limits.close()
        self.connections.close_idle()
        for connection in list(self._by_connection):
            connection.close()

    def _seconds(self, moment_ns: int) -> float:
        return (moment_ns - self._start_ns) / NS

    # Sending.

    def _arm(self) -> None:
        due_s = self._offering.next_due_s
        if due_s is not None:
            self._alarm.set(self._start_ns + round(due_s * NS))

    def _send_due(self) -> None:
        if not self._is_started or self._is_sending:
            return  # a request that ends at once makes the next one due; the loop below sends that, too
        self._is_sending = True
        for _ in range(MAX_SENDS_PER_TURN):
            due = self._offering.take_due(self._seconds(time.perf_counter_ns()))
            if due is None:
                break
            self._begin(due)
        self._is_sending = False
        self._arm()  # which rings at once if more is due

    def _begin(self, due: Due) -> None:
        job = due.job
        body = self._chats.body(job)
        now_ns = time.perf_counter_ns()
        payload = b"%b%d\r\n\r\n%b" % (self._setup.head, len(body), body)
        stream = ResponseStream(self._setup.keep_text or job.has_next_turn)
        flight = Flight(due, payload, stream, started_ns=now_ns, last_ns=now_ns)
        self._flights[flight] = None
        self._started.append((job.index, due.scheduled_s))
        connection = self.connections.take_idle(now_ns)
        if connection is None:
            self._open(flight)
        else:
            flight.is_reused = True
            self._send(flight, connection)
        self._limits.watch(flight)

    def _open(self, flight: Flight) -> None:
        """On a fresh connection. The request goes out before this returns, if the connection stands at
        once."""
        try:
            dialled = self.connections.dial()
        except OSError as error:
            self._cannot_connect(flight, error)
            return
        unsent: bytes | None = None
        if dialled.is_connected and self.connections.context is None:
            flight.note_connected(time.perf_counter_ns())
            unsent = self._send_now(flight, dialled.sock)
        flight.opening = self._loop.create_task(self._follow(flight, dialled, unsent))
        flight.opening.add_done_callback(functools.partial(self._opened, dialled))

    def _send_now(self, flight: Flight, sock: socket.socket) -> bytes:
        """What the kernel did not take."""
        try:
            num_sent = sock.send(flight.payload)
        except OSError:
            return flight.payload  # the kernel tells again, and the connection's end says what was wrong
        if num_sent == len(flight.payload):
            flight.note_sent(time.perf_counter_ns())
        return flight.payload[num_sent:]

    async def _follow(self, flight: Flight, dialled: Dialled, unsent: bytes | None) -> None:
        """Bring a fresh connection into the loop; `unsent` None: it does not stand yet."""
        connection = flight.connection = Connection(self._inbox)
        self._by_connection[connection] = flight  # before the loop knows it: the answer may be there already
        try:
            if unsent is None:
                await self.connections.open(connection, dialled)
            else:
                await self.connections.attach(connection, dialled.sock)
        except OSError as error:
            self._by_connection.pop(connection, None)
            dialled.sock.close()
            if not flight.is_ended:
                self._cannot_connect(flight, error)
            return
        flight.opening = None
        if flight.is_ended:
            return
        if unsent is None:
            self._send(flight, connection)
        elif unsent:
            connection.send(unsent, flight.note_sent)

    def _opened(self, dialled: Dialled, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            dialled.sock.close()
        elif (fault := task.exception()) is not None:
            self._on_fault(fault)

    def _cannot_connect(self, flight: Flight, error: OSError) -> None:
        where = f"`{self._setup.host}:{self._setup.port}`"
        why = reason(error, is_tls=self.connections.context is not None)
        now_ns = time.perf_counter_ns()
        if error.errno in OWN_LIMITS:
            self._end(flight, Status.CLIENT, f"the client could not open a connection: {why}", now_ns)
        else:
            flight.is_unreachable = True
            self._end(flight, Status.CONNECTION, f"cannot connect to {where}: {why}", now_ns)

    def _send(self, flight: Flight, connection: Connection) -> None:
        flight.connection = connection
        flight.note_connected(time.perf_counter_ns())
        self._by_connection[connection] = flight
        connection.send(flight.payload, flight.note_sent)

    # Reading.

    def _on_read(
        self, connection: Connection, data: bytes | None, moment_ns: int, error: Exception | None
    ) -> None:
        flight = self._by_connection.get(connection)
        if flight is None:
            if data is not None:
                connection.close()  # bytes that nobody asked for
            return
        stream = flight.stream
        if data is None:
            del self._by_connection[connection]
            if not flight.is_ended and is_stale(flight, moment_ns):
                flight.begin_again()
                self._open(flight)
                return
            stream.eof(moment_ns, error)
            stream.close()
        else:
            flight.last_ns = moment_ns
            stream.feed(data, moment_ns)
            if stream.is_message_over or stream.has_garbage:
                del self._by_connection[connection]
                if stream.can_reuse and flight.sent_ns is not None:
                    self.connections.give_back(connection, moment_ns)
                else:
                    connection.close()
                stream.close()
        verdict = stream.verdict
        if verdict is not None and not flight.is_ended:
            if connection in self._by_connection:
                self._loop.call_later(MAX_DRAIN_S, self._stop_draining, connection, flight)
            self._end(flight, verdict.status, verdict.error, verdict.moment_ns)

    def _stop_draining(self, connection: Connection, flight: Flight) -> None:
        if self._by_connection.get(connection) is flight:
            del self._by_connection[connection]
            connection.close()
            flight.stream.close()

    # Ending.

    def _end(self, flight: Flight, status: Status, error: str | None, end_ns: int) -> None:
        flight.is_ended = True
        del self._flights[flight]
        setup, job = self._setup, flight.due.job
        record = flight.record(
            status, error, end_ns, start_ns=self._start_ns, process=setup.process, keep_text=setup.keep_text
        )
        self._ended.append(record)
        self._num_left -= 1
        is_ok = status is Status.OK
        if is_ok:
            self._chats.answered(job, "".join(flight.stream.answer.content_parts))
        for due in self._offering.ended(job, self._seconds(end_ns), is_ok):
            self._skip(due, f"turn {job.turn} of its chat failed")
        self._send_due()
        if self.is_over:
            self._on_over()

    def _cut(self, flight: Flight, status: Status, error: str, now_ns: int) -> None:
        """End a request from our side."""
        if flight.opening is not None:
            flight.opening.cancel()
        if flight.connection is not None:
            self._by_connection.pop(flight.connection, None)
            flight.connection.close()
        flight.stream.close()
        self._end(flight, status, error, now_ns)

    def _too_late(self, flight: Flight, error: str, now_ns: int) -> None:
        self._cut(flight, Status.TIMEOUT, error, now_ns)

    def _skip(self, due: Due, error: str) -> None:
        self._ended.append(blank_record(due, Status.SKIPPED, error, self._setup.process))
        self._num_left -= 1


def is_stale(flight: Flight, broken_ns: int) -> bool:
    """Whether the flight's connection had been closed before the request went out on it."""
    if not flight.is_reused or flight.stream.has_bytes or flight.connected_ns is None:
        return False
    return broken_ns - flight.connected_ns < STALE_S * NS
