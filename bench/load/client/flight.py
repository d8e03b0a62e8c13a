"""One request on its way: its moments, and the record they become."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from dataclasses import dataclass
from typing import Any

from bench.load.client.connection import Connection
from bench.load.client.http_stream import ResponseStream, count
from bench.load.client.offering import Due
from bench.load.client.tls import PLAIN_HINT, tls_reason
from bench.load.records import RequestRecord, Status

NS = 1_000_000_000
# What this process or machine lacks when it cannot open a connection: no word about the server.
OWN_LIMITS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))


@dataclass(slots=True, eq=False)
class Flight:
    """Mutable until it ends; owned by the load client."""

    due: Due
    payload: bytes
    stream: ResponseStream
    started_ns: int
    last_ns: int  # when anything last happened: start, connection, send, read
    connected_ns: int | None = None
    sent_ns: int | None = None
    first_connected_ns: int | None = None  # of the first attempt: a second one is the server's time
    first_sent_ns: int | None = None
    num_retries: int = 0
    is_reused: bool = False  # on a connection that carried another request before
    is_ended: bool = False
    is_unreachable: bool = False  # opening a connection failed, and the client is not to blame
    connection: Connection | None = None
    opening: asyncio.Task[None] | None = None

    def note_connected(self, moment_ns: int) -> None:
        self.connected_ns = self.last_ns = moment_ns
        if self.first_connected_ns is None:
            self.first_connected_ns = moment_ns

    def note_sent(self, moment_ns: int) -> None:
        self.sent_ns = self.last_ns = moment_ns
        if self.first_sent_ns is None:
            self.first_sent_ns = moment_ns

    def begin_again(self) -> None:
        """On a fresh connection, since a reused one was stale."""
        self.num_retries += 1
        self.is_reused = False
        self.connection = self.connected_ns = self.sent_ns = None

    @property
    def phase(self) -> str:
        """Where it is, as the end of a sentence."""
        if self.connected_ns is None:
            return "while connecting"
        if self.sent_ns is None:
            return "while sending"
        if self.stream.headers_ns is None:
            return "waiting for the headers"
        return f"after {count(len(self.stream.answer.moments_ns), 'chunk')} with content"

    def record(
        self, status: Status, error: str | None, end_ns: int, *, start_ns: int, process: int, keep_text: bool
    ) -> RequestRecord:
        def seconds(moment_ns: int) -> float:
            return (moment_ns - start_ns) / NS

        def optional(moment_ns: int | None) -> float | None:
            return None if moment_ns is None else seconds(moment_ns)

        answer = self.stream.answer
        record = blank_record(self.due, status, error, process)
        record.started_s = seconds(self.started_ns)
        record.connected_s = optional(self.first_connected_ns)
        record.sent_s = optional(self.first_sent_ns)
        record.num_retries = self.num_retries
        record.is_unreachable = self.is_unreachable
        record.headers_s = optional(self.stream.headers_ns)
        record.chunk_times_s = [(moment_ns - start_ns) / NS for moment_ns in answer.moments_ns]
        record.chunk_tokens = answer.chunk_tokens
        record.end_s = seconds(end_ns)
        record.finish_reason = answer.finish_reason
        record.http_status = self.stream.http_status
        record.text = "".join(answer.text_parts) if keep_text else ""
        record.timings = scalars(answer.timings)
        record.input_tokens = answer.input_tokens
        record.output_tokens = answer.output_tokens
        record.cached_tokens = answer.cached_tokens
        return record


def blank_record(due: Due, status: Status, error: str | None, process: int) -> RequestRecord:
    """The record of a request of which nothing but its end is known."""
    job = due.job
    return RequestRecord(
        index=job.index,
        scheduled_s=due.scheduled_s,
        status=status,
        error=error,
        planned_input_tokens=job.input_tokens,
        planned_output_tokens=job.output_tokens,
        session=job.session,
        turn=job.turn,
        prefix_group=job.prefix_group,
        process=process,
    )


def scalars(timings: dict[str, Any]) -> dict[str, float | int | str]:
    """The fields that are numbers or strings; true and false are neither."""
    return {name: value for name, value in timings.items() if type(value) in (float, int, str)}


def reason(error: OSError, is_tls: bool = False) -> str:
    """Why there is no connection, without the address: event loops word it differently."""
    if isinstance(error, ssl.SSLError):
        return tls_reason(error)
    words = os.strerror(error.errno) if error.errno is not None else str(error) or type(error).__name__
    # A server that speaks no TLS may hang up on what looks to it like noise.
    return words + PLAIN_HINT if is_tls and isinstance(error, ConnectionResetError) else words
