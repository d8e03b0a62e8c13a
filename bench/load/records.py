"""What became of one offered request: moments as its client read them, and nothing computed.

Times are seconds since the run's start on one monotonic clock (all client processes share it). A request that
never left, or never came back, has a record too: nothing offered is lost.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Status(Enum):
    """How an offered request ended. Only OK can be good; all count as offered."""

    OK = "ok"
    REFUSED = "refused"  # an HTTP status other than 200
    ERROR = "error"  # an error event after 200, or an answer that is not what the protocol says
    CONNECTION = "connection"  # could not connect, or the server went away
    TIMEOUT = "timeout"
    CLIENT = "client"  # the client itself could not send it: out of file descriptors, ports or memory
    INCOMPLETE = "incomplete"  # the stream ended without finish_reason or [DONE]
    CANCELLED = "cancelled"  # the run was interrupted while it was in flight
    SKIPPED = "skipped"  # never sent: an earlier turn failed, or the run was interrupted before


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    # When it should have been sent; latencies count from here. Closed loop: when its slot became free; for
    # the first request of a slot, when the client opened it.
    scheduled_s: float
    status: Status
    started_s: float | None = None  # when the client acted on it: took a connection or began to open one
    connected_s: float | None = None  # when it had its connection; opening one takes network and server time
    sent_s: float | None = None  # when its last byte was first handed to the kernel; None: never sent
    is_unreachable: bool = False  # no connection could be opened, the last time it was tried
    num_retries: int = 0  # sent again on a fresh connection, since the server had closed the kept-alive one
    headers_s: float | None = None  # status line and headers read
    chunk_times_s: list[
        float
    ] = []  # moments of the chunks with content, at the socket read that brought them
    chunk_tokens: list[
        int
    ] = []  # tokens in each chunk, if the server says (continuous usage, token_ids); else empty
    end_s: float | None = None  # the read that brought [DONE], else the last byte, or the moment it failed
    input_tokens: int | None = None  # usage.prompt_tokens
    cached_tokens: int | None = None  # usage.prompt_tokens_details.cached_tokens
    output_tokens: int | None = None  # usage.completion_tokens
    finish_reason: str | None = None
    planned_input_tokens: int | None = None
    planned_output_tokens: int | None = None
    http_status: int | None = None
    error: str | None = None  # one sentence; for statuses other than OK
    text: str = ""  # what was generated; kept only if asked
    timings: dict[
        str, float | int | str
    ] = {}  # the server's own account ("timings" of the last chunk), if it sent one
    session: int | None = None
    turn: int = 0
    prefix_group: int | None = None
    process: int = 0  # client process


class ClientReport(msgspec.Struct, kw_only=True):
    """One client process about itself."""

    process: int
    cpu_s: float  # user + system, from run start to end
    wall_s: float
    max_loop_lag_s: float = 0.0  # the longest stall, also of those too short for `stalls_s`
    # (start, end) of the times in which it neither read nor sent, in order; the longest ones, if many. A
    # start is late by up to the 10 ms between two looks.
    stalls_s: list[tuple[float, float]] = []


class RunRecord(msgspec.Struct, kw_only=True):
    """All of a run, as offered: one record per planned request, in plan order."""

    records: list[RequestRecord]
    clients: list[ClientReport]
    start_unix_s: float  # wall clock at the run's start
    start_ns: int = 0  # the same moment on the machine's `perf_counter_ns` clock
    wall_s: float  # until the last record
    is_complete: bool  # False: interrupted, or a client process died
    notes: list[str] = []  # why it is not complete, one sentence each
    # Why the server no longer answered when all was over; None: it did, or nothing gave cause to ask it.
    server_gone: str | None = None
