"""The load client and the mock in one loop: every way a request can end, and what its record says."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bench.load.client import load_client
from bench.load.client.connection import Connection, Connections, Dialled
from bench.load.client.flight import Flight, reason
from bench.load.client.jobs import split_plan
from bench.load.client.target import Target, parse_target
from bench.load.client.tls import tls_context
from bench.load.mock.server import MockServer, MockSettings
from bench.load.records import RequestRecord, Status
from tests.support.load_client import Run, make_setup, offer, plan, request, turn


@pytest.fixture
async def server() -> AsyncIterator[MockServer]:
    async with MockServer() as running:
        yield running


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[Target]:
    """A server of raw bytes; each connection is closed when its handler returns."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handle(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 12) as listener:
        yield Target(host="127.0.0.1", port=listener.sockets[0].getsockname()[1])
        async with asyncio.timeout(20.0):
            await asyncio.gather(*tasks)


async def one(server: MockServer, *, limits: dict[str, Any] | None = None, **script: Any) -> RequestRecord:
    records, _ = await offer(parse_target(server.url), plan([request(0, **script)]), **(limits or {}))
    [record] = records
    return record


async def test_a_record_holds_every_moment_in_order(server: MockServer) -> None:
    record = await one(
        server, max_tokens=3, ttft_s=0.01, itl_s=0.01, cached_tokens=2, timings={"queue_ms": 1.5, "at": "d0"}
    )
    assert record.status is Status.OK
    assert record.error is None
    moments = [
        *(record.scheduled_s, record.started_s, record.connected_s, record.sent_s, record.headers_s),
        *record.chunk_times_s,
        record.end_s,
    ]
    assert moments == sorted(moments)
    assert len(record.chunk_times_s) == 3
    assert (record.input_tokens, record.cached_tokens, record.output_tokens) == (3, 2, 3)
    assert (record.planned_input_tokens, record.planned_output_tokens) == (3, 3)
    assert (record.finish_reason, record.http_status) == ("length", 200)
    assert record.text == " mock mock mock"
    assert record.timings == {"queue_ms": 1.5, "at": "d0"}


@pytest.mark.parametrize(
    "script",
    [
        {"split_bytes": 1},
        {"split_bytes": 13, "line_end": "\r\n", "space_after_colon": False},
        {"framing": "close"},
        {"keep_alive": False},
        {"heartbeat_s": 0.002, "ttft_s": 0.02},
        {"done_mark": False},
        {"finish_reason": None},
        {"usage": False},
    ],
)
async def test_ways_to_say_the_same(server: MockServer, script: dict[str, Any]) -> None:
    record = await one(server, **script)
    assert record.status is Status.OK
    assert len(record.chunk_times_s) == 4
    assert record.output_tokens == (None if script.get("usage") is False else 4)


@pytest.mark.parametrize(
    ("script", "tokens"),
    [
        ({"tokens_per_chunk": 3}, []),
        ({"tokens_per_chunk": 3, "continuous_usage": True}, [3, 1]),
        ({"tokens_per_chunk": 3, "token_ids": True}, [3, 1]),
        ({"num_tokens": 1}, []),
    ],
)
async def test_tokens_of_chunks(server: MockServer, script: dict[str, Any], tokens: list[int]) -> None:
    record = await one(server, **script)
    assert record.chunk_tokens == tokens
    assert len(record.chunk_times_s) == (2 if "tokens_per_chunk" in script else 1)


async def test_an_empty_answer_is_ok_without_a_chunk(server: MockServer) -> None:
    record = await one(server, num_tokens=0)
    assert record.status is Status.OK
    assert record.chunk_times_s == []
    assert record.output_tokens == 0


async def test_a_wrong_usage_is_reported_as_it_came(server: MockServer) -> None:
    assert (await one(server, usage_error=5)).output_tokens == 9


FAULTS: list[tuple[dict[str, Any], Status, str, int]] = [
    ({"error_after": 2, "message": "worker lost"}, Status.ERROR, "worker lost", 2),
    ({"cut_after": 2}, Status.CONNECTION, "closed the connection inside the answer, after 2 chunks", 2),
    ({"cut_after": 0}, Status.CONNECTION, "inside the answer, after 0 chunks", 0),
    ({"reset_after": 1}, Status.CONNECTION, "Connection reset by peer", 1),
    ({"end_after": 2}, Status.INCOMPLETE, "without finish_reason or [DONE], after 2 chunks", 2),
    ({"cut_after": 1, "framing": "close"}, Status.INCOMPLETE, "after 1 chunk with content", 1),
    ({"http_status": 503, "message": "no room"}, Status.REFUSED, "HTTP 503: no room", 0),
    ({"http_status": 400, "error_shape": "flat", "message": "bad"}, Status.REFUSED, "HTTP 400: bad", 0),
    (
        {"http_status": 502, "error_shape": "text", "message": "gate way"},
        Status.REFUSED,
        "HTTP 502: gate way",
        0,
    ),
    ({"http_status": 500, "error_shape": "empty"}, Status.REFUSED, "HTTP 500: no reason given", 0),
]


@pytest.mark.parametrize(("script", "status", "error", "num_chunks"), FAULTS)
async def test_every_fault_has_its_status_and_one_sentence(
    server: MockServer, script: dict[str, Any], status: Status, error: str, num_chunks: int
) -> None:
    record = await one(server, **script)
    assert record.status is status
    assert error in (record.error or "")
    assert "\n" not in (record.error or "")
    assert len(record.chunk_times_s) == num_chunks
    assert record.end_s is not None


@pytest.mark.parametrize(
    ("script", "limits", "error"),
    [
        ({"stall_after": 2}, {"stall_s": 0.15}, "no byte within the stall limit of 0.15 s, after 2 chunks"),
        ({"ttft_s": 30.0}, {"timeout_s": 0.15}, "no end within the time limit of 0.15 s, after 0 chunks"),
        (
            {"ttft_s": 30.0, "heartbeat_s": 0.03},
            {"timeout_s": 1.0, "stall_s": 0.9},
            "no end within the time limit of 1 s",
        ),
        ({"ttft_s": 30.0, "http_status": 500}, {"timeout_s": 0.15}, "waiting for the headers"),
    ],
)
async def test_time_limits_say_which(
    server: MockServer, script: dict[str, Any], limits: dict[str, float], error: str
) -> None:
    record = await one(server, limits=limits, **script)
    assert record.status is Status.TIMEOUT
    assert error in (record.error or "")
    assert record.end_s is not None
    assert record.end_s >= min(limits.values())


async def test_bytes_that_wait_to_be_read_are_no_stall(server: MockServer) -> None:
    """This process stands still for longer than the limit while the answer is on its way."""
    offered = plan([request(0, max_tokens=2, ttft_s=0.02, itl_s=0.02)])
    [jobs] = split_plan(offered, 1)
    run = Run(make_setup(parse_target(server.url), offered, stall_s=0.3), jobs)
    await run.start()
    asyncio.get_running_loop().call_later(0.005, time.sleep, 0.5)
    [record] = await run.records()
    assert record.status is Status.OK


async def test_a_timed_out_request_frees_the_server(server: MockServer) -> None:
    async with MockServer(MockSettings(capacity=1)) as small:
        requests = [request(0, stall_after=1), request(1)]
        records, _ = await offer(parse_target(small.url), plan(requests), timeout_s=5.0, stall_s=0.2)
        stalled, other = records
        assert (stalled.status, other.status) == (Status.TIMEOUT, Status.OK)
        assert small.truths[0].ending == "client left" or small.truths[0].ending == "stall"


async def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    records, _ = await offer(Target(host="127.0.0.1", port=port), plan([request(i) for i in range(3)]))
    assert {record.status for record in records} == {Status.CONNECTION}
    assert {record.error for record in records} == {
        f"cannot connect to `127.0.0.1:{port}`: Connection refused"
    }
    assert {record.sent_s for record in records} == {None}
    assert all(record.is_unreachable for record in records)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.EMFILE, Status.CLIENT),
        (errno.ENFILE, Status.CLIENT),
        (errno.EADDRNOTAVAIL, Status.CLIENT),
        (errno.ENOBUFS, Status.CLIENT),
        (errno.ENOMEM, Status.CLIENT),
        (errno.ECONNREFUSED, Status.CONNECTION),
        (errno.EHOSTUNREACH, Status.CONNECTION),
        (errno.ETIMEDOUT, Status.CONNECTION),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value.value,
)
async def test_what_the_client_lacks_is_not_the_servers_failure(
    monkeypatch: pytest.MonkeyPatch, number: int, status: Status
) -> None:
    def dial(_: Connections) -> Dialled:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Connections, "dial", dial)
    records, _ = await offer(Target(host="127.0.0.1", port=9), plan([request(i) for i in range(3)]))
    assert {record.status for record in records} == {status}
    assert {record.is_unreachable for record in records} == {status is Status.CONNECTION}
    assert all(os.strerror(number) in (record.error or "") for record in records)
    assert ("client" in (records[0].error or "")) is (status is Status.CLIENT)


async def test_closed_loop_through_refused_connections_comes_to_its_end() -> None:
    """Each failure makes the next request due at once: however many, the stack does not grow."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    requests = [request(index) for index in range(1500)]
    records, _ = await offer(Target(host="127.0.0.1", port=port), plan(requests, closed_loop=1))
    assert len(records) == 1500
    assert {record.status for record in records} == {Status.CONNECTION}


async def test_an_idle_connection_is_used_again(server: MockServer) -> None:
    records, _ = await offer(parse_target(server.url), plan([request(i) for i in range(5)], closed_loop=1))
    assert {record.status for record in records} == {Status.OK}
    assert len({truth.connection for truth in server.truths}) < 5


BODY = b'{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}'
REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


async def answer_one_and_drop_the_next(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that closes after each answer without saying so: the next request meets a dead connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
    writer.write(REPLY)
    await reader.read(1)  # the next request arrives; it gets no answer


async def test_a_stale_connection_is_replaced_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_client, "STALE_S", 10.0)  # however busy the machine is
    first_sends_s: list[float] = []
    begin_again = Flight.begin_again

    def note_first_send(self: Flight) -> None:
        assert self.sent_ns is not None
        first_sends_s.append(self.sent_ns / 1e9)
        begin_again(self)

    monkeypatch.setattr(Flight, "begin_again", note_first_send)
    async with serving(answer_one_and_drop_the_next) as target:
        records, start_ns = await offer(target, plan([request(i) for i in range(3)], closed_loop=1))
    assert [record.status for record in records] == [Status.OK] * 3
    assert [record.num_retries for record in records] == [0, 1, 1]
    sent_s = [record.sent_s for record in records[1:]]
    assert sent_s == pytest.approx([moment_s - start_ns / 1e9 for moment_s in first_sends_s], abs=1e-6)
    for record in records:
        moments = [record.scheduled_s, record.started_s, record.connected_s, record.sent_s, record.headers_s]
        assert moments == sorted(moments)


async def test_a_request_that_the_server_had_time_to_read_is_not_sent_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_client, "STALE_S", 0.0)  # every break comes later than that
    async with serving(answer_one_and_drop_the_next) as target:
        records, _ = await offer(target, plan([request(i) for i in range(3)], closed_loop=1))
    assert [record.status for record in records] == [Status.OK, Status.CONNECTION, Status.OK]
    assert [record.num_retries for record in records] == [0, 0, 0]
    assert "before it answered" in (records[1].error or "")


ODD = {
    "usage": b'{"choices":[],"usage":"lots"}',
    "timings": b'{"choices":[],"timings":[1]}',
    "index": b'{"choices":[{"index":null,"text":"a"}]}',
    "finish_reason": b'{"choices":[{"text":"a","finish_reason":{"type":"length"}}]}',
    "content": b'{"choices":[{"delta":{"content":[{"type":"text","text":"a"}]}}]}',
    "prompt_tokens": b'{"choices":[],"usage":{"prompt_tokens":true}}',
}


@pytest.mark.parametrize("name", ODD)
async def test_one_odd_field_costs_one_request(name: str) -> None:
    num_served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_served
        num_served += 1
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        kind = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        writer.write(REPLY if num_served != 2 else kind + b"data: " + ODD[name] + b"\n\n")

    turns = [turn(2 * chat + number, chat, number, "a") for chat in range(3) for number in range(2)]
    async with serving(serve) as target:
        records, _ = await offer(target, plan(turns, is_chat=True, closed_loop=1))
    assert len(records) == 6
    [bad] = [record for record in records if record.status is not Status.OK]
    assert bad.status is Status.ERROR
    assert f"`{name}` is " in (bad.error or "")


async def test_an_answer_that_is_there_before_its_connection_is_known(
    server: MockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop may read a fresh connection before the task that opened it goes on."""
    attach = Connections.attach

    async def attach_late(self: Connections, connection: Connection, sock: socket.socket) -> None:
        await attach(self, connection, sock)
        while not any(truth.end_ns for truth in server.truths):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # whatever was written has been read by now

    monkeypatch.setattr(Connections, "attach", attach_late)
    record = await one(server)
    assert record.status is Status.OK
    assert len(record.chunk_times_s) == 4


async def test_an_answer_to_half_a_request_ends_the_connection_not_the_next_request() -> None:
    num_connections = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await reader.readexactly(1 << 10)
        while await reader.read(1 << 16):
            pass

    big = [request(index) for index in range(2)]
    for planned in big:
        planned.body["prompt"] = "x" * (32 << 20)
    async with serving(refuse) as target:
        records, _ = await offer(target, plan(big, closed_loop=1))
    assert [record.error for record in records] == ["HTTP 413: no reason given"] * 2
    assert num_connections == 2


async def test_a_fresh_connection_that_fails_is_not_tried_again() -> None:
    num_connections = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")

    async with serving(hang_up) as target:
        [record], _ = await offer(target, plan([request(0)]))
    assert record.status is Status.CONNECTION
    assert "before it answered" in (record.error or "")
    assert num_connections == 1


async def test_open_loop_keeps_its_schedule_when_the_server_is_slow() -> None:
    """Coordinated omission: waiting shows in the latency from the scheduled time, not in a later schedule."""
    async with MockServer(MockSettings(capacity=1)) as server:
        requests = [request(index, index * 0.01, ttft_s=0.05, max_tokens=1) for index in range(8)]
        records, _ = await offer(parse_target(server.url), plan(requests))
    assert [record.scheduled_s for record in records] == [planned.scheduled_s for planned in requests]
    first_chunks_s = sorted(record.chunk_times_s[0] for record in records)
    for position, first_chunk_s in enumerate(first_chunks_s):
        assert first_chunk_s >= 0.05 * (position + 1)  # the server was busy that long
    ttfts_s = [record.chunk_times_s[0] - record.scheduled_s for record in records]
    assert sum(ttfts_s) >= sum(0.05 * (position + 1) - 0.01 * position for position in range(8))


async def test_closed_loop_times_count_from_the_moment_the_slot_was_free(server: MockServer) -> None:
    requests = [request(index, ttft_s=0.01) for index in range(6)]
    records, _ = await offer(parse_target(server.url), plan(requests, closed_loop=2))
    ends = [record.end_s for record in records]
    assert ends[0] is not None
    assert 0.0 <= records[0].scheduled_s <= records[1].scheduled_s < ends[0]  # as the slots are opened
    for record in records[2:]:
        assert record.scheduled_s in ends
    for record in records:
        at_once = [
            r for r in records if r.scheduled_s < (record.end_s or 0) and (r.end_s or 0) > record.scheduled_s
        ]
        assert len(at_once) <= 4  # two slots: itself, its neighbour, and whoever meets them at an edge


async def test_first_answers_are_read_before_the_last_of_many_requests_is_sent(server: MockServer) -> None:
    """One process that sends a whole wave first would date its own work to the server."""
    num = 20 * load_client.MAX_SENDS_PER_TURN
    requests = [request(index, ttft_s=0.0, max_tokens=1) for index in range(num)]
    records, _ = await offer(parse_target(server.url), plan(requests))
    assert {record.status for record in records} == {Status.OK}
    first_read_s = min(record.headers_s for record in records if record.headers_s is not None)
    assert first_read_s < max(record.sent_s for record in records if record.sent_s is not None)


async def test_a_chat_sends_what_was_said_and_waits_to_think(server: MockServer) -> None:
    requests = [turn(0, 1, 0, "a b c"), turn(1, 1, 1, "d", think_s=0.05), turn(2, 1, 2, "e f")]
    records, _ = await offer(parse_target(server.url), plan(requests, is_chat=True))
    assert [record.status for record in records] == [Status.OK] * 3
    # Words: 3; then 3 + answer of 2 + 1; then 6 + 2 + 2.
    assert [record.input_tokens for record in records] == [3, 6, 10]
    assert records[1].scheduled_s == pytest.approx((records[0].end_s or 0) + 0.05, abs=1e-6)
    assert records[2].scheduled_s == records[1].end_s
    assert [record.turn for record in records] == [0, 1, 2]


async def test_a_failed_turn_skips_the_rest_of_its_chat_only(server: MockServer) -> None:
    requests = [
        turn(0, 1, 0, "a", error_after=0),
        turn(1, 1, 1, "b"),
        turn(2, 2, 0, "c"),
        turn(3, 2, 1, "d"),
        turn(4, 1, 2, "e"),
    ]
    records, _ = await offer(parse_target(server.url), plan(requests, is_chat=True))
    statuses = [record.status for record in records]
    assert statuses == [Status.ERROR, Status.SKIPPED, Status.OK, Status.OK, Status.SKIPPED]
    assert records[1].error == "turn 0 of its chat failed"
    assert records[1].sent_s is None
    assert records[1].scheduled_s == records[0].end_s


async def test_a_stop_cancels_what_flies_and_skips_the_rest(server: MockServer) -> None:
    requests = [
        request(0),
        request(1, stall_after=2),
        request(2, 60.0),
        turn(3, 1, 0, "x", scheduled_s=70.0),
        turn(4, 1, 1, "y"),
    ]
    offered = plan(requests)
    [jobs] = split_plan(offered, 1)
    run = Run(make_setup(parse_target(server.url), offered), jobs)
    await run.start()
    async with asyncio.timeout(20.0):
        while len(server.truths) < 2 or len(server.truths[1].chunk_ns) < 2 or server.truths[0].end_ns is None:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
    run.client.stop()
    run.client.stop()
    records = await run.records()
    assert [record.status for record in records] == [
        *(Status.OK, Status.CANCELLED, Status.SKIPPED, Status.SKIPPED, Status.SKIPPED)
    ]
    assert records[1].error == "the run was interrupted after 2 chunks with content"
    assert records[2].error == "the run was interrupted before it was sent"
    assert records[2].scheduled_s == 60.0


async def test_a_stop_before_the_start_skips_everything(server: MockServer) -> None:
    offered = plan([request(0), request(1)])
    [jobs] = split_plan(offered, 1)
    run = Run(make_setup(parse_target(server.url), offered), jobs)
    run.client.stop()
    records = await run.records()
    assert [record.status for record in records] == [Status.SKIPPED] * 2
    assert server.truths == []


async def test_a_large_request_is_stamped_when_its_last_byte_left() -> None:
    """The server reads nothing at first: the kernel takes some, `sent_s` waits for the rest."""
    reading_ns: list[int] = []

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        reading_ns.append(time.perf_counter_ns())
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        body = b'{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}'
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        await writer.drain()

    big = request(0)
    big.body["prompt"] = "x" * (32 << 20)  # more than any socket buffer
    async with serving(slow) as target:
        [record], start_ns = await offer(target, plan([big]))
    assert record.status is Status.OK
    assert record.connected_s is not None
    assert record.sent_s is not None
    reading_s = (reading_ns[0] - start_ns) / 1e9
    assert record.connected_s < reading_s < record.sent_s <= (record.headers_s or 0.0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"), "Connection refused"),
        (ConnectionAbortedError(), "ConnectionAbortedError"),
        (OSError("no route"), "no route"),
        (ssl.SSLError(1, "wrong version number"), "wrong version number"),
    ],
)
def test_event_loops_word_errors_differently(error: OSError, words: str) -> None:
    assert words in reason(error)
    assert "127" not in reason(error)


CERTIFICATE = Path(__file__).resolve().parents[1] / "data" / "localhost_self_signed.pem"


@pytest.fixture
async def tls_server() -> AsyncIterator[MockServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    async with MockServer(context=context) as running:
        yield running


async def test_https_with_a_certificate_that_need_not_be_known(tls_server: MockServer) -> None:
    target = parse_target(tls_server.url, verify_tls=False)
    records, _ = await offer(target, plan([request(i, itl_s=0.005) for i in range(3)], closed_loop=1))
    for record in records:
        assert record.status is Status.OK
        moments = [record.started_s, record.connected_s, record.sent_s, *record.chunk_times_s, record.end_s]
        assert moments == sorted(moments)


async def test_https_with_an_unknown_certificate_is_refused_in_one_line(tls_server: MockServer) -> None:
    [record], _ = await offer(parse_target(tls_server.url), plan([request(0)]))
    assert record.status is Status.CONNECTION
    assert "certificate verify failed" in (record.error or "")
    assert "SSL_CERT_FILE" in (record.error or "")
    assert "\n" not in (record.error or "")
    assert tls_server.truths == []


def test_an_authority_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the refusal says."""
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    monkeypatch.setenv("SSL_CERT_DIR", str(CERTIFICATE.parent / "none"))
    context = tls_context(verify=True)
    assert context.cert_store_stats()["x509"] == 1
    assert context.verify_mode is ssl.CERT_REQUIRED


async def test_https_spoken_to_a_plain_server_is_one_line(server: MockServer) -> None:
    target = parse_target(server.url.replace("http:", "https:"))
    [record], _ = await offer(target, plan([request(0)]))
    assert record.status is Status.CONNECTION
    assert "cannot connect to" in (record.error or "")
    assert "write http:// instead of https://" in (record.error or "")
