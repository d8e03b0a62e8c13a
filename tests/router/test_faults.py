"""What goes wrong while a request runs: failures, clients that leave, silence, slow readers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import (
    BatonError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EdgeError,
    NotReady,
    Overloaded,
    WorkerLost,
)
from router.limits import GatewayLimits
from router.stream import Patience
from tests.support.gateway import LIMIT_S, RunningGateway, check_error, model_info, running_gateway
from tests.support.scripted_cluster import Script
from tests.support.sse import CHAT, TEXT, check_error_stream, check_stream, parse_events

SECRET = "/srv/secret/path.py pid 4711004711 <object at 0x7f00> s3cr3t"
FAILURES: list[tuple[Exception, int, str]] = [
    (Overloaded("No worker can take the request.", retry_after_s=2.5), 503, "overloaded"),
    (NotReady("The cluster is loading the model.", retry_after_s=1.0), 503, "not_ready"),
    (DeadlineExceeded("The deadline of the request passed."), 504, "deadline_exceeded"),
    (WorkerLost(SECRET), 502, "worker_lost"),
    (ContextLengthExceeded("The prompt has 400 tokens, the pool holds 300."), 400, "context_length_exceeded"),
    (EdgeError(SECRET), 500, "internal_error"),
    (BatonError(SECRET), 500, "internal_error"),
    (RuntimeError(SECRET), 500, "internal_error"),
]
IDS = [type(error).__name__ for error, _, _ in FAILURES]


def check_public(error: dict[str, Any], raw: bytes) -> None:
    assert error["message"]
    for part in ("/srv", "secret", "4711004711", "0x7f00", "s3cr3t", "Traceback", "RuntimeError"):
        assert part.encode() not in raw


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), FAILURES, ids=IDS)
def test_b165_refused_at_submission(
    gateway: RunningGateway, error: Exception, status: int, code: str, stream: bool
) -> None:
    gateway.cluster.refuse = error
    for response in (gateway.chat(stream=stream), gateway.complete(stream=stream)):
        check_error(response, status, code=code)
        check_public(response.json()["error"], response.content)
        if status >= 500 and code in ("worker_lost", "internal_error"):
            assert response.headers["x-request-id"] in response.json()["error"]["message"]
    if isinstance(error, Overloaded):
        assert response.headers["retry-after"] == "3"
        assert response.headers["retry-after-ms"] == "2500"
    gateway.cluster.refuse = None
    gateway.check_alive()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), FAILURES, ids=IDS)
def test_b165_failed_before_the_first_token(
    gateway: RunningGateway, error: Exception, status: int, code: str, stream: bool
) -> None:
    gateway.cluster.script = Script(fail_after=0, error=error)
    response = gateway.chat(stream=stream)
    check_error(response, status, code=code)
    check_public(response.json()["error"], response.content)


@pytest.mark.parametrize(("error", "status", "code"), FAILURES, ids=IDS)
def test_b032_failed_in_mid_stream(gateway: RunningGateway, error: Exception, status: int, code: str) -> None:
    gateway.cluster.script = Script(fail_after=5, error=error)
    started = time.monotonic()
    for response in (gateway.chat(stream=True), gateway.complete(stream=True)):
        assert response.status_code == 200
        before, public = check_error_stream(response.content)
        assert public["code"] == code
        check_public(public, response.content)
        assert len(before) >= 5
    whole = gateway.chat()
    check_error(whole, status, code=code)
    assert time.monotonic() - started < 2
    gateway.cluster.script = Script()
    gateway.check_alive()


def test_b032_one_of_several_prompts_fails(gateway: RunningGateway) -> None:
    gateway.cluster.script = lambda spec: (
        Script(fail_after=2, error=WorkerLost("gone")) if spec.token_ids == (98,) else Script(hang_after=3)
    )
    check_error(gateway.complete(prompt=["a", "b", "c"]), 502, code="worker_lost")
    for stream in gateway.cluster.streams:
        assert stream.ended.wait(LIMIT_S)


def test_one_of_several_prompts_is_refused(gateway: RunningGateway) -> None:
    class Refusing:
        num_taken = 0

        def __call__(self, spec: Any) -> Script:
            self.num_taken += 1
            if self.num_taken == 3:
                raise Overloaded("No worker can take the request.", retry_after_s=1)
            return Script(hang_after=1)

    gateway.cluster.script = Refusing()
    check_error(gateway.complete(prompt=["a", "b", "c"]), 503, code="overloaded")
    assert len(gateway.cluster.streams) == 2
    assert all(stream.ended.wait(LIMIT_S) and stream.aborted for stream in gateway.cluster.streams)


def test_a_stream_that_just_ends_is_an_error(gateway: RunningGateway) -> None:
    """The conductor's iteration ends without finish reason or failure: a bug, told as one."""
    gateway.cluster.script = Script(hang_after=3)
    with gateway.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        chunks = response.iter_raw()
        raw = next(chunks)
        gateway.loop.call_soon_threadsafe(gateway.cluster.streams[0].finish)
        raw += b"".join(chunks)
    assert check_error_stream(raw)[1]["code"] == "internal_error"


# ---- clients that leave --------------------------------------------------------------------------


def raw_request(
    gateway: RunningGateway, path: str, *, receive_buffer: int | None = None, **fields: Any
) -> socket.socket:
    body = json.dumps(fields).encode()
    connection = socket.socket()
    connection.settimeout(LIMIT_S)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", gateway.port))
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return connection


def wait_for_streams(gateway: RunningGateway, number: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while len(gateway.cluster.streams) < number:
        assert time.monotonic() < deadline, "the request did not reach the cluster"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_ends_its_request(
    gateway: RunningGateway, stream: bool, num_tokens: int, reset: bool
) -> None:
    gateway.cluster.script = Script(hang_after=num_tokens)
    connection = raw_request(gateway, "/v1/completions", prompt="a", stream=stream)
    wait_for_streams(gateway, 1)
    if stream and num_tokens:
        connection.recv(10_000)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
    [request] = gateway.cluster.streams
    assert request.ended.wait(1), "still running a second after the client left"
    assert request.aborted == "client left"
    gateway.cluster.script = Script()
    gateway.check_alive()


def test_a_client_that_leaves_while_sending(gateway: RunningGateway) -> None:
    connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT_S)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b'content-length: 1000\r\n\r\n{"prompt": "a'
    )
    connection.close()
    gateway.check_alive()
    assert len(gateway.cluster.streams) == 1  # the living one


def test_many_clients_that_leave(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(token_ids=tuple(b"abcdef") * 20, delay_s=0.002)
    for index in range(60):
        connection = raw_request(
            gateway, "/v1/completions", prompt="a", stream=index % 2 == 0, max_tokens=100
        )
        if index % 3:
            wait_for_streams(gateway, index // 3)
        connection.close()
    gateway.cluster.script = Script()
    gateway.check_alive()
    deadline = time.monotonic() + LIMIT_S
    while not all(stream.ended.is_set() for stream in gateway.cluster.streams):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gateway.until_idle()


# ---- silence and slow readers --------------------------------------------------------------------


@contextlib.contextmanager
def with_patience(tokenizer_dir: Path, patience: Patience) -> Iterator[RunningGateway]:
    model = dataclasses.replace(model_info(), max_model_len=100_000)
    with running_gateway(tokenizer_dir, limits=GatewayLimits(patience=patience), model=model) as running:
        yield running


@pytest.fixture(scope="module")
def pinging(tokenizer_dir: Path) -> Iterator[RunningGateway]:
    """A gateway that pings every 50 ms."""
    with with_patience(tokenizer_dir, Patience(heartbeat_s=0.05)) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(tokenizer_dir: Path) -> Iterator[RunningGateway]:
    """One that pings as often and gives up after 1.2 s."""
    patience = Patience(heartbeat_s=0.05, silence_s=1.2, stalled_client_s=0.5)
    with with_patience(tokenizer_dir, patience) as running:
        yield running


@pytest.fixture
def hasty_gateway(hasty: RunningGateway) -> RunningGateway:
    hasty.cluster.streams.clear()
    return hasty


PING = b": ping\n\n"
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    TEXT: ("/v1/completions", {"prompt": "Hi"}),
    CHAT: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
}


def read_by_pings(gateway: RunningGateway, path: str, body: dict[str, Any], script: Script) -> bytes:
    """A streamed reply. The cluster is silent until its client has seen a ping, before each delivery."""
    go_on = threading.Semaphore(0)
    gateway.cluster.script = dataclasses.replace(script, go_on=go_on)
    raw, num_said = b"", -1
    with gateway.client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        for part in response.iter_raw():
            raw += part
            if raw.endswith(PING) and len(raw.replace(PING, b"")) > num_said:
                num_said = len(raw.replace(PING, b""))
                go_on.release()
    return raw


@pytest.mark.parametrize("kind", [TEXT, CHAT])
def test_pings_while_it_is_silent(pinging: RunningGateway, kind: str) -> None:
    path, body = ASKED[kind]
    raw = read_by_pings(pinging, path, body, Script(tuple(b"abc")))
    stream = check_stream(raw, kind=kind)
    assert stream.text == "abc"
    assert stream.num_pings >= 4  # before each token, and before the end
    assert raw.startswith(PING)


@pytest.mark.parametrize("kind", [TEXT, CHAT])
def test_failure_after_a_ping_is_an_event(pinging: RunningGateway, kind: str) -> None:
    path, body = ASKED[kind]
    raw = read_by_pings(pinging, path, body, Script(fail_after=0, error=Overloaded("No.")))
    before, error = check_error_stream(raw)
    assert before == []
    assert error["code"] == "overloaded"


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_silence_has_an_end(hasty_gateway: RunningGateway, num_tokens: int) -> None:
    hasty_gateway.cluster.script = Script(hang_after=num_tokens)
    started = time.monotonic()
    _, error = check_error_stream(hasty_gateway.chat(stream=True).content)
    assert error["code"] == "deadline_exceeded"
    check_error(hasty_gateway.chat(), 504, code="deadline_exceeded")
    assert time.monotonic() - started < 4.2  # 1.8 s more than both silences
    assert all(stream.aborted for stream in hasty_gateway.cluster.streams)


def test_a_long_whole_reply_is_not_silence(hasty_gateway: RunningGateway) -> None:
    hasty_gateway.cluster.script = Script(tuple(b"abcdefghij"), delay_s=0.2)
    response = hasty_gateway.chat()
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "abcdefghij"


def test_a_client_that_never_reads_is_given_up(hasty_gateway: RunningGateway) -> None:
    """The reply (about 15 MB) does not fit the buffers of both kernels; writing it stalls."""
    hasty_gateway.cluster.script = Script(tuple(b"x"), per_delivery=200, hang_after=9_800)
    fields = {"prompt": "a", "stream": True, "ignore_eos": True, "logprobs": 20, "max_tokens": 10_000}
    with raw_request(hasty_gateway, "/v1/completions", receive_buffer=4096, **fields):
        wait_for_streams(hasty_gateway, 1)
        [request] = hasty_gateway.cluster.streams
        assert request.ended.wait(60)
        assert request.aborted == "client left"
        hasty_gateway.cluster.script = Script()
        hasty_gateway.check_alive()
        hasty_gateway.until_idle()


def test_b019_a_slow_reader_loses_nothing(gateway: RunningGateway) -> None:
    text = "Grüße, 漢字! " * 10
    gateway.cluster.script = Script(tuple(text.encode()), per_delivery=8)
    body = {"prompt": "a", "stream": True, "max_tokens": 400}
    raw = b""
    with gateway.client.stream("POST", "/v1/completions", json=body) as response:
        for part in response.iter_raw(chunk_size=64):
            raw += part
            time.sleep(0.0005)
    assert check_stream(raw, kind=TEXT).text == text


def test_events_are_whole_in_every_write(gateway: RunningGateway) -> None:
    """No proxy or client sees half an event at a flush."""
    gateway.cluster.script = Script(tuple("漢字かな".encode()), delay_s=0.003)
    with gateway.client.stream(
        "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"]
        parts = list(response.iter_raw())
    assert len(parts) > 3
    assert all(part.endswith(b"\n\n") for part in parts)
    parse_events(b"".join(parts))


def test_transcript(gateway: RunningGateway) -> None:
    """The reference transcript, byte for byte but for id and time."""
    gateway.cluster.script = Script(tuple(b"Hi!"), per_delivery=2)
    raw = gateway.chat(stream=True, stream_options={"include_usage": True}).content
    first = parse_events(raw)[0][0]
    head = (
        f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},'
        '"model":"byte-model","choices":['
    )
    num_prompt = parse_events(raw)[0][-1]["usage"]["prompt_tokens"]
    expected = [
        '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        '{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}]}',
        '{"index":0,"delta":{"content":"!"},"logprobs":null,"finish_reason":null}]}',
        '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}',
        f'],"usage":{{"prompt_tokens":{num_prompt},"completion_tokens":4,"total_tokens":{num_prompt + 4},'
        '"prompt_tokens_details":{"cached_tokens":2}}}',
    ]
    assert raw.decode() == "".join(f"{head}{line}\n\n" for line in expected) + "data: [DONE]\n\n"
