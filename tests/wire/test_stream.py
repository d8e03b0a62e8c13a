"""Streams over real sockets: order, bounds, faults of the peer, hostile bytes (B150)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import AuthenticationError, ConfigError, ProtocolError, WireError
from cluster.ids import Attempt, LeaseId, RequestId
from cluster.wire.address import parse_address
from cluster.wire.codec import MAX_FRAME_BYTES, encode
from cluster.wire.handshake import FRAME_BYTES, DiallerHandshake
from cluster.wire.messages import Abort, Drain, Drained, Refused, RenewLeases, RouterToWorker, WorkerToRouter
from cluster.wire.stream import MAX_PENDING_HANDSHAKES, Listener, Stream, connect, listen

TOKEN = b"k" * 32
LIMIT_S = 20.0  # for what has to come at all, however busy the machine
Serve = Callable[..., Awaitable[Listener]]


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s" if request.param == "unix" else "tcp:127.0.0.1:0"


@pytest.fixture
async def serve(address: str) -> AsyncIterator[Serve]:
    listeners: list[Listener] = []

    async def start(on_stream: Callable[[Stream[Any]], Awaitable[None]], **options: Any) -> Listener:
        listener = await listen(address, TOKEN, WorkerToRouter, on_stream, **options)
        listeners.append(listener)
        return listener

    yield start
    for listener in listeners:
        await listener.close()


async def echo_count(stream: Stream[Any]) -> None:
    """Answers every message with the number received so far."""
    num = 0
    async for _ in stream:
        num += 1
        stream.post(RenewLeases(leases=[LeaseId(num)]))


async def dial_raw(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    _, host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


async def dial_raw_authenticated(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await dial_raw(address)
    handshake = DiallerHandshake(TOKEN)
    writer.write(handshake.start())
    while not handshake.is_done:
        writer.write(handshake.receive(await reader.readexactly(FRAME_BYTES)))
    return reader, writer


async def assert_alive(address: str) -> None:
    stream = await connect(address, TOKEN, RouterToWorker)
    stream.post(Drained())
    async with asyncio.timeout(LIMIT_S):
        assert await anext(stream) == RenewLeases(leases=[LeaseId(1)])
    await stream.close()


async def test_messages_pass_both_ways_in_order(serve: Serve) -> None:
    listener = await serve(echo_count)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    for _ in range(500):
        stream.post(Drained())
    await stream.send(Drained())
    async with asyncio.timeout(LIMIT_S):
        received = [(await anext(stream)).leases[0] for _ in range(501)]
    assert received == list(range(1, 502))
    await stream.close()
    await stream.close()
    with pytest.raises(WireError, match="closed"):
        await stream.send(Drained())


async def test_iteration_ends_when_the_peer_closes_after_all_it_sent(serve: Serve) -> None:
    async def say_bye(stream: Stream[Any]) -> None:
        stream.post(Drain(grace_s=1.0))
        stream.post(Refused(reason="bye"))

    listener = await serve(say_bye)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    async with asyncio.timeout(LIMIT_S):
        assert [message async for message in stream] == [Drain(grace_s=1.0), Refused(reason="bye")]
    assert stream.is_closed
    stream.post(Drained())  # dropped


async def wait_for_one(stream: Stream[Any]) -> None:
    await anext(stream)


async def pump_all(stream: Stream[Any]) -> None:
    await stream.pump(lambda message: True)


@pytest.mark.parametrize("wait", [wait_for_one, pump_all])
async def test_a_cancelled_wait_loses_no_message(
    serve: Serve, wait: Callable[[Stream[Any]], Awaitable[None]]
) -> None:
    gate = asyncio.Event()

    async def late(stream: Stream[Any]) -> None:
        await gate.wait()
        stream.post(Drain(grace_s=1.0))
        await anext(stream, None)

    listener = await serve(late)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await wait(stream)
    gate.set()
    async with asyncio.timeout(LIMIT_S):
        assert await anext(stream) == Drain(grace_s=1.0)
    await stream.close()


async def test_what_comes_before_a_cancelled_pump_wakes_up_is_for_who_reads_on(serve: Serve) -> None:
    listener = await serve(echo_count)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    pump = asyncio.create_task(pump_all(stream))
    await asyncio.sleep(0)
    pump.cancel()
    stream._line.data_received(encode(Drain(grace_s=1.0)))  # within the same turn
    with pytest.raises(asyncio.CancelledError):
        await pump
    async with asyncio.timeout(LIMIT_S):
        assert await anext(stream) == Drain(grace_s=1.0)
    await stream.close()


async def test_a_post_leaves_at_once(serve: Serve) -> None:
    """Not with the next turn of the loop: whoever posts may be busy for a while."""
    listener = await serve(echo_count)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    stream.post(Drained())
    assert stream.num_pending_bytes == 0
    await stream.close()


async def test_pumped_messages_come_in_order_and_end_with_the_stream(serve: Serve) -> None:
    async def say(stream: Stream[Any]) -> None:
        for number in range(100):
            stream.post(RenewLeases(leases=[LeaseId(number)]))

    listener = await serve(say)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    numbers: list[int] = []

    def take(message: Any) -> bool:
        numbers.append(message.leases[0])
        return True

    async with asyncio.timeout(LIMIT_S):
        assert (await anext(stream)).leases == [LeaseId(0)]  # one reads it alone, the rest is pumped
        await stream.pump(take)
    assert numbers == list(range(1, 100))
    assert stream.is_closed


async def test_a_pump_stops_when_it_is_told_and_loses_nothing(serve: Serve) -> None:
    async def say(stream: Stream[Any]) -> None:
        for number in range(4):
            stream.post(RenewLeases(leases=[LeaseId(number)]))
        await anext(stream, None)

    listener = await serve(say)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    async with asyncio.timeout(LIMIT_S):
        await stream.pump(lambda message: message.leases != [LeaseId(1)])
        assert (await anext(stream)).leases == [LeaseId(2)]
        assert (await anext(stream)).leases == [LeaseId(3)]
    await stream.close()


@pytest.mark.parametrize(
    ("payload", "error", "text"),
    [
        (encode(Drained()) + b"\xff\xff\xff\xff", ProtocolError, "over the limit"),
        (encode(Drained()) + b"\x00\x00", ProtocolError, "inside a frame"),
        (encode(Drained()) + encode(Refused(reason="a")), ValueError, "not this one"),
        (encode(Drained()), None, ""),
    ],
)
async def test_what_ends_a_pump_is_raised_where_it_is_awaited(
    serve: Serve, payload: bytes, error: type[Exception] | None, text: str
) -> None:
    taken: list[Any] = []
    ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def take(message: Any) -> bool:
        taken.append(message)
        if isinstance(message, Refused):
            raise ValueError("not this one")
        return True

    async def pump(stream: Stream[Any]) -> None:
        try:
            await stream.pump(take)
        except Exception as cause:
            ended.set_result(cause)
        else:
            ended.set_result(None)

    listener = await serve(pump)
    _reader, writer = await dial_raw_authenticated(listener.address)
    writer.write(payload)
    writer.close()
    async with asyncio.timeout(LIMIT_S):
        cause = await ended
    assert taken[0] == Drained()
    assert (cause is None) if error is None else (isinstance(cause, error) and text in str(cause))


async def test_who_reads_slowly_holds_the_other_end_back(serve: Serve) -> None:
    """And gets everything once it reads."""
    num_messages = 100
    message = Refused(reason="x" * 100_000)

    async def say(stream: Stream[Any]) -> None:
        for _ in range(num_messages):
            await stream.send(message)

    listener = await serve(say)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    async with asyncio.timeout(LIMIT_S):
        assert await anext(stream) == message
        while not stream._line._is_held_back:
            await asyncio.sleep(0)
        assert len(stream._line._unread) < 2 << 20
        assert [one async for one in stream] == [message] * (num_messages - 1)


async def test_a_peer_that_does_not_read_loses_the_stream(serve: Serve) -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def flood(stream: Stream[Any]) -> None:
        try:
            while not stream.is_closed:
                stream.post(Refused(reason="x" * 10_000))
                await asyncio.sleep(0)
            await anext(stream)
        except WireError as error:
            ended.set_result(str(error))

    listener = await serve(flood, max_pending_bytes=1 << 20)
    _reader, writer = await dial_raw_authenticated(listener.address)
    async with asyncio.timeout(LIMIT_S):
        assert "does not read" in await ended
    writer.close()


async def test_send_to_a_peer_that_does_not_read_ends_at_its_deadline(serve: Serve) -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def flood(stream: Stream[Any]) -> None:
        try:
            while True:
                await stream.send(Refused(reason="x" * 100_000), timeout_s=0.2)
        except WireError as error:
            ended.set_result(str(error))

    listener = await serve(flood)
    _reader, writer = await dial_raw_authenticated(listener.address)
    async with asyncio.timeout(LIMIT_S):
        assert "did not read for 0.2 s" in await ended
    writer.close()


async def test_a_message_over_the_frame_limit_is_the_senders_error(serve: Serve) -> None:
    listener = await serve(echo_count)
    stream = await connect(listener.address, TOKEN, RouterToWorker, max_frame_bytes=100)
    with pytest.raises(ProtocolError, match=r"Refused of \d+ bytes is over the frame limit of 100"):
        stream.post(Refused(reason="x" * 200))
    stream.post(Drained())
    async with asyncio.timeout(LIMIT_S):
        await anext(stream)
    await stream.close()


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("kind", ["pickle", "zeros", "oversized", "http", "random"])
async def test_b150_hostile_bytes_close_the_connection_and_nothing_else(
    serve: Serve, tmp_path: Path, where: str, kind: str
) -> None:
    marker = tmp_path / "marker"

    class Exploit:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, (f"touch {marker}",))

    body = pickle.dumps(Exploit())
    payload = {
        "pickle": len(body).to_bytes(4, "big") + body + bytes(100),
        "zeros": bytes(200),
        "oversized": b"\xff\xff\xff\xff" + bytes(200),
        "http": b"GET / HTTP/1.1\r\nHost: a\r\nUser-Agent: some browser with a long enough name\r\n\r\n" * 2,
        "random": bytes((i * 73 + 41) % 256 for i in range(300)),
    }[kind]
    listener = await serve(echo_count)
    bystander = await connect(listener.address, TOKEN, RouterToWorker)
    dial = dial_raw if where == "before" else dial_raw_authenticated
    reader, writer = await dial(listener.address)
    writer.write(payload)
    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
    writer.close()
    bystander.post(Drained())
    async with asyncio.timeout(LIMIT_S):
        assert await anext(bystander) == RenewLeases(leases=[LeaseId(1)])
    await bystander.close()
    await assert_alive(listener.address)
    assert not marker.exists()


async def test_frame_cut_short_by_a_dying_peer_raises(serve: Serve) -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read(stream: Stream[Any]) -> None:
        try:
            async for _ in stream:
                pass
        except WireError as error:
            ended.set_result(str(error))

    listener = await serve(read)
    _reader, writer = await dial_raw_authenticated(listener.address)
    writer.write(encode(Refused(reason="x" * 100))[:50])
    writer.close()
    async with asyncio.timeout(LIMIT_S):
        assert "inside a frame" in await ended


async def test_b150_slow_handshake_is_cut_at_its_deadline(serve: Serve) -> None:
    listener = await serve(echo_count, handshake_timeout_s=0.2)
    reader, writer = await dial_raw(listener.address)
    writer.write(DiallerHandshake(TOKEN).start()[:10])
    async with asyncio.timeout(LIMIT_S):
        assert await reader.read() == b""
    writer.close()
    listener._handshake_timeout_s = LIMIT_S  # who comes next may be held up
    await assert_alive(listener.address)


async def test_connections_held_open_without_a_handshake_keep_nobody_out(serve: Serve) -> None:
    listener = await serve(echo_count)
    held = [await dial_raw(listener.address) for _ in range(MAX_PENDING_HANDSHAKES)]
    for _, writer in held:
        writer.write(DiallerHandshake(TOKEN).start()[:10])
    await assert_alive(listener.address)
    async with asyncio.timeout(LIMIT_S):
        assert await held[0][0].read() == b""  # it made room
    async with asyncio.timeout(LIMIT_S):
        held[-1][1].write(DiallerHandshake(TOKEN).start()[10:])
        assert len(await held[-1][0].readexactly(FRAME_BYTES)) == FRAME_BYTES  # the others go on
    for _, writer in held:
        writer.close()


async def test_wrong_token_is_refused(serve: Serve) -> None:
    listener = await serve(echo_count)
    with pytest.raises(AuthenticationError, match="does not know the cluster token"):
        await connect(listener.address, b"z" * 32, RouterToWorker)
    await assert_alive(listener.address)


async def test_connect_to_a_silent_listener_ends_at_its_deadline(tmp_path: Path) -> None:
    hung_up = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        hung_up.set()

    server = await asyncio.start_unix_server(silent, f"{tmp_path}/s")
    with pytest.raises(WireError, match=r"no answer from unix:.* within 0.2 s"):
        await connect(f"unix:{tmp_path}/s", TOKEN, RouterToWorker, timeout_s=0.2)
    async with asyncio.timeout(LIMIT_S):
        await hung_up.wait()
    server.close()


async def test_connect_where_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(WireError, match=r"cannot connect to unix:.*No such file"):
        await connect(f"unix:{tmp_path}/none", TOKEN, RouterToWorker)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(WireError, match="cannot connect to tcp"):
        await connect(f"tcp:127.0.0.1:{port}", TOKEN, RouterToWorker)


async def test_address_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp:127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WireError, match=f"cannot listen on {address}"):
            await listen(address, TOKEN, WorkerToRouter, echo_count)


async def test_unix_socket_names_the_peers_process_is_private_and_is_removed(tmp_path: Path) -> None:
    pids: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    async def on_stream(stream: Stream[Any]) -> None:
        pids.set_result(stream.peer_pid)

    path = tmp_path / "s"
    listener = await listen(f"unix:{path}", TOKEN, WorkerToRouter, on_stream)
    assert path.stat().st_mode & 0o777 == 0o600
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    async with asyncio.timeout(LIMIT_S):
        assert await pids == os.getpid()
    assert stream.peer_pid == os.getpid()
    await stream.close()
    await listener.close()
    assert not path.exists()


async def test_tcp_has_no_pid_and_no_delay() -> None:
    listener = await listen("tcp:127.0.0.1:0", TOKEN, WorkerToRouter, echo_count)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    assert stream.peer_pid is None
    sock = stream._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await stream.close()
    await listener.close()


async def test_reset_by_the_peer_ends_the_iteration(serve: Serve) -> None:
    ended = asyncio.Event()

    async def read(stream: Stream[Any]) -> None:
        async for _ in stream:
            pass
        ended.set()

    listener = await serve(read)
    _reader, writer = await dial_raw_authenticated(listener.address)
    if listener.address.startswith("tcp"):
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    writer.transport.abort()
    async with asyncio.timeout(LIMIT_S):
        await ended.wait()


async def test_close_of_the_listener_ends_open_streams(serve: Serve) -> None:
    listener = await serve(echo_count)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    await listener.close()
    async with asyncio.timeout(LIMIT_S):
        assert [message async for message in stream] == []


@pytest.mark.parametrize(
    "text", ["", "unix:", "unix:rel", "tcp:host", "tcp::1", "tcp:h:70000", "tcp:h:x", "udp:h:1"]
)
def test_bad_addresses_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        parse_address(text)


def test_good_addresses_survive_the_round_trip() -> None:
    for text in ("unix:/a/b", "tcp:127.0.0.1:80", "tcp:[::1]:0"):
        assert str(parse_address(text)) == text
    with pytest.raises(ConfigError, match="longer than 107"):
        parse_address("unix:/" + "x" * 120)


async def test_a_connection_that_was_handed_over_goes_on_without_the_stream(serve: Serve) -> None:
    received: asyncio.Queue[object] = asyncio.Queue()

    async def note(stream: Stream[Any]) -> None:
        async for message in stream:
            received.put_nowait(message)
        received.put_nowait("ended")

    listener = await serve(note)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    kept = await stream.hand_over(Drained(), lambda descriptor: socket.socket(fileno=descriptor))
    assert kept is not None
    assert stream.is_closed
    async with asyncio.timeout(LIMIT_S):
        assert await received.get() == Drained()
    kept.sendall(encode(Drained()))
    async with asyncio.timeout(LIMIT_S):
        assert await received.get() == Drained()
    kept.close()
    async with asyncio.timeout(LIMIT_S):
        assert await received.get() == "ended"


async def test_a_connection_that_nobody_takes_over_ends_with_nothing_said(serve: Serve) -> None:
    ended = asyncio.Event()

    async def wait(stream: Stream[Any]) -> None:
        async for _ in stream:
            raise AssertionError
        ended.set()

    listener = await serve(wait)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    assert await stream.hand_over(Drained(), lambda descriptor: None) is None
    await asyncio.wait_for(ended.wait(), LIMIT_S)
    with pytest.raises(WireError, match="is closed"):
        await stream.hand_over(Drained(), lambda descriptor: None)


async def test_what_was_kept_is_closed_if_the_last_word_cannot_be_said(serve: Serve) -> None:
    async def wait(stream: Stream[Any]) -> None:
        async for _ in stream:
            raise AssertionError

    listener = await serve(wait)
    stream = await connect(listener.address, TOKEN, RouterToWorker)
    kept: list[socket.socket] = []

    def keep(descriptor: int) -> socket.socket:
        kept.append(socket.socket(fileno=descriptor))
        return kept[0]

    too_long = Abort(request=RequestId("r"), attempt=Attempt(1), reason="x" * MAX_FRAME_BYTES)
    with pytest.raises(ProtocolError, match="over the frame limit"):
        await stream.hand_over(too_long, keep)
    assert kept[0].fileno() == -1
    assert stream.is_closed


async def test_a_loss_that_is_on_its_way_is_told_to_who_sends(serve: Serve) -> None:
    """A write that fails says so to the connection in the loop's next turn, as an abort does."""
    listener = await serve(echo_count)
    for say in (
        lambda stream: stream.send(Drained()),
        lambda stream: stream.hand_over(Drained(), lambda descriptor: socket.socket(fileno=descriptor)),
    ):
        stream = await connect(listener.address, TOKEN, RouterToWorker)
        post = stream.post

        def post_in_vain(message: Any, stream: Stream[Any] = stream, post: Any = post) -> None:
            post(message)
            stream._transport.abort()

        stream.post = post_in_vain  # type: ignore[method-assign]
        with pytest.raises(WireError, match="broke: the connection is lost"):
            await say(stream)


async def test_a_peer_that_leaves_within_the_handshake_is_told_of_in_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await listen(f"unix:{tmp_path}/s", TOKEN, WorkerToRouter, echo_count)
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(f"{tmp_path}/s")
    raw.sendall(DiallerHandshake(TOKEN).start())
    async with asyncio.timeout(LIMIT_S):
        while not listener._handshakes:  # its first bytes are unread: closing resets the connection
            await asyncio.sleep(0)
    raw.close()
    async with asyncio.timeout(LIMIT_S):
        while listener._tasks:
            await asyncio.sleep(0)
    await listener.close()
    (record,) = [record for record in caplog.records if record.name == "cluster.wire.stream"]
    assert re.search(rf"^connection from pid {os.getpid()} closed: ", record.getMessage())
    assert not [record for record in caplog.records if record.name == "asyncio"]
