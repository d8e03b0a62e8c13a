"""HTTP's own corners: old clients, heads alone, packed bodies, surprises in a route."""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import socket
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cluster.ids import WorkerId
from cluster.metrics import Metrics
from cluster.tokenizer import Tokenizer
from cluster.wire.messages import Role
from router.chat import ChatFormat
from router.completions import CompletionFormat
from router.limits import GatewayLimits
from tests.support.gateway import LIMIT_S, RunningGateway, check_error, running_gateway
from tests.support.plain_http import plain_client
from tests.support.scripted_cluster import Script, worker
from tests.support.sse import check_stream, strict_json

JSON_TYPE = {"content-type": "application/json"}
STATUS_PATHS = ("/v1/models", "/v1/models/byte-model", "/health", "/ping", "/version", "/ready", "/cluster")


JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def raw_exchange(gateway: RunningGateway, request: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT_S) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def exchange(gateway: RunningGateway, request: bytes) -> tuple[bytes, bytes]:
    """Its head, in lower case, and its body."""
    head, _, body = raw_exchange(gateway, request).partition(b"\r\n\r\n")
    return head.lower(), body


def old_request(path: str, body: dict[str, Any] | None = None, *lines: bytes) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    method = b"GET" if body is None else b"POST"
    head = [
        b"%b %b HTTP/1.0" % (method, path.encode()),
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(content),
        *lines,
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + content


@pytest.mark.parametrize("lines", [(), (b"Connection: keep-alive",)])
@pytest.mark.parametrize("per_delivery", [1, 100])
def test_a_stream_for_http_1_0_has_no_chunks(
    gateway: RunningGateway, per_delivery: int, lines: tuple[bytes, ...]
) -> None:
    gateway.cluster.script = Script(tuple(b"abcdef"), per_delivery=per_delivery)
    fields = {"prompt": "Hi", "stream": True}
    head, body = exchange(gateway, old_request("/v1/completions", fields, *lines))
    assert b" 200 " in head.partition(b"\r\n")[0]
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert check_stream(body, kind="text_completion").text == "abcdef"


def test_a_stream_for_http_1_0_comes_as_it_is_made(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(tuple(b"abc"), hang_after=2)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT_S) as connection:
        connection.sendall(old_request("/v1/completions", {"prompt": "Hi", "stream": True}))
        seen = b""
        while b'"text":"b"' not in seen:
            part = connection.recv(65536)
            assert part, seen
            seen += part
    deadline = time.monotonic() + LIMIT_S
    while gateway.cluster.streams[0].aborted is None:  # leaving is seen as ever
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_other_answers_for_http_1_0_are_whole(gateway: RunningGateway) -> None:
    for request, status in (
        (old_request("/v1/completions", {"prompt": "Hi"}), b"200"),
        (old_request("/v1/completions", {"prompt": "Hi", "stream": True, "temperature": 9}), b"400"),
        (old_request("/v1/models"), b"200"),
        (old_request("/nowhere"), b"404"),
        (old_request("/"), b"200"),
    ):
        head, body = exchange(gateway, request)
        assert status in head.partition(b"\r\n")[0]
        assert b"content-length: %d" % len(body) in head
        assert body


@pytest.mark.parametrize("path", [*STATUS_PATHS, "/metrics", "/", "/page/picture", "/page/app.js"])
def test_heads_alone(gateway: RunningGateway, path: str) -> None:
    """Who watches a server asks for those."""
    head, whole = gateway.client.head(path), gateway.client.get(path)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]
    gateway.check_alive()  # on the same connection


def test_the_head_of_an_endless_stream_ends(gateway: RunningGateway) -> None:
    for _ in range(40):  # more than there may be viewers
        assert gateway.client.head("/page/events").headers["content-type"].startswith("text/event-stream")
    gateway.check_alive()


def test_heads_of_what_has_none(gateway: RunningGateway) -> None:
    for path, status in (("/v1/completions", 405), ("/nowhere", 404)):
        assert gateway.client.head(path).status_code == status
    gateway.check_alive()


BODIES = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_json_and_not_packed(gateway: RunningGateway, path: str) -> None:
    content = json.dumps(BODIES[path]).encode()
    packed = gzip.compress(content)
    for encoding, body in (("gzip", packed), ("GZIP", packed), ("br", content), ("gzip, identity", packed)):
        headers = {**JSON_TYPE, "content-encoding": encoding}
        response = gateway.client.post(path, content=body, headers=headers)
        message = check_error(response, 415, code="unsupported_media_type")
        assert "Content-Encoding" in message
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"):
        response = gateway.client.post(path, content=content, headers={"content-type": media_type})
        assert "application/json" in check_error(response, 415, code="unsupported_media_type")
    for media_type in ("application/json", "Application/JSON; charset=utf-8", "application/problem+json"):
        headers = {"content-type": media_type, "content-encoding": "identity"}
        assert gateway.client.post(path, content=content, headers=headers).status_code == 200


def test_what_a_route_did_not_expect_has_its_id_and_is_counted(tokenizer_dir: Path) -> None:
    with running_gateway(tokenizer_dir) as gateway:
        gateway.cluster.workers = None  # type: ignore[assignment]
        response = gateway.client.get("/cluster", headers={"x-request-id": "mine"})
        assert "mine" in check_error(response, 500, code="internal_error")
        assert response.headers["x-request-id"] == "mine"
        gateway.cluster.workers = ()
        counted = 'baton_http_responses_total{route="/cluster",status="500"} 1.0'
        assert counted in gateway.client.get("/metrics").text


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_headers_say_what_belongs_together_where_the_body_does_not(
    gateway: RunningGateway, route: str
) -> None:
    for headers, fields, expected in (
        ({}, {}, ""),
        ({"x-session-id": "a"}, {}, "a"),
        ({"x-session-token": "b"}, {}, "b"),
        ({"x-session-id": "a", "x-session-token": "b"}, {}, "a"),
        ({"x-session-id": "a"}, {"session_id": "c"}, "c"),
        ({"x-session-token": "b"}, {"user": "d"}, "d"),
        ({"x-session-id": "x" * 5000}, {}, "x" * 512),
    ):
        response = gateway.client.post(route, json={**BODIES[route], **fields}, headers=headers)
        assert response.status_code == 200
        assert gateway.cluster.streams[-1].spec.affinity == expected


@pytest.mark.parametrize(
    "line",
    [
        b"OPTIONS * HTTP/1.1", b"CONNECT example.com:443 HTTP/1.1", b"GET http://x/v1/nowhere HTTP/1.1",
        b"GET /v1/\xff\xfe HTTP/1.1", b"GET /v1/%ff%fe HTTP/1.1", b"GET //evil/.. HTTP/1.1",
        b"GET /v1/models/%00 HTTP/1.1", b"GET /?%zz=1 HTTP/9.9", b"GET nowhere HTTP/1.1", b"GET  / HTTP/1.1",
        b"PRI * HTTP/2.0", b"get /nowhere HTTP/1.1", b"TRACE / HTTP/1.1", b"PROPFIND / HTTP/1.1",
        b"GET http://[::1 HTTP/1.1", b"GET /#x HTTP/1.1\r\nHost: y",
    ],
)  # fmt: skip
def test_odd_request_lines_get_an_error_of_our_shape(gateway: RunningGateway, line: bytes) -> None:
    head, body = exchange(gateway, line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
    status = int(head.split(b" ")[1])
    if status != 200:
        assert 400 <= status < 500, head
        assert set(strict_json(body)["error"]) == {"message", "type", "param", "code"}
        assert b"x-request-id: " in head
    gateway.check_alive()


BROKEN = {
    "no HTTP": b"\x00 garbage\r\n\r\n",
    "no method": b"FOO / HTTP/1.1\r\n\r\n",
    "a large head": b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000,
    "a head that stops": b"GET / HTTP/1.1\r\nHost:",
}


def start_stream(gateway: RunningGateway) -> tuple[socket.socket, bytes]:
    """A connection on which two tokens have come, and what came so far. A busy machine may miss the time in
    which a request has to arrive: it tries again."""
    body = json.dumps({"prompt": "Hi", "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for _ in range(20):
        connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT_S)
        seen = part = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            while b'"text":"b"' not in seen and (part := connection.recv(65536)):
                seen += part
        if b'"text":"b"' in seen:
            return connection, seen
        connection.close()
    raise AssertionError(f"no stream came about: {seen!r}")


def start_request(gateway: RunningGateway) -> socket.socket:
    """A connection whose request has reached the cluster; as `start_stream`."""
    body = json.dumps({"prompt": "Hi"}).encode()
    for _ in range(20):
        connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT_S)
        with contextlib.suppress(ConnectionError):
            connection.sendall(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            while not select.select([connection], [], [], 0.01)[0]:  # it has not been answered: 408
                if gateway.cluster.streams:
                    return connection
        connection.close()
    raise AssertionError("no request came about")


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_behind_a_stream_is_not_answered_within_it(tokenizer_dir: Path, name: str) -> None:
    """The connection ends; the stream is cut, which its reader sees, and nothing foreign is in it."""
    arrival_s = 0.5 if name == "a head that stops" else 60.0
    with running_gateway(tokenizer_dir, arrival_s=arrival_s) as gateway:
        gateway.cluster.script = Script(tuple(b"abc"), hang_after=2)
        connection, seen = start_stream(gateway)
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(BROKEN[name])
            seen += b"".join(iter(lambda: connection.recv(65536), b""))
        assert seen.count(b"HTTP/1.1 ") == 1
        assert b"error" not in seen


@pytest.mark.parametrize("stream", [False, True])
def test_who_closes_its_half_has_left(gateway: RunningGateway, stream: bool) -> None:
    """It looks like one that closed the connection, and that must cost nobody a block."""
    gateway.cluster.script = Script(tuple(b"abc"), hang_after=2)
    body = json.dumps({"prompt": "Hi", "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT_S) as connection:
        connection.sendall(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not gateway.cluster.streams:
            assert gateway.client.get("/health").status_code == 200
        connection.shutdown(socket.SHUT_WR)
        assert b"[DONE]" not in b"".join(iter(lambda: connection.recv(65536), b""))
    deadline = time.monotonic() + LIMIT_S
    while gateway.cluster.streams[0].aborted is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_behind_a_request_is_not_taken_for_its_answer(tokenizer_dir: Path, name: str) -> None:
    """The request is whole and has no answer yet; an error now would be read as that."""
    arrival_s = 0.3 if name == "a head that stops" else 60.0
    with running_gateway(tokenizer_dir, arrival_s=arrival_s) as gateway:
        gateway.cluster.script = Script(tuple(b"abc"), hang_after=0)
        with start_request(gateway) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(BROKEN[name])
            assert b"".join(iter(lambda: connection.recv(65536), b"")) == b""
        gateway.cluster.script = Script()
        gateway.check_alive()


def test_a_body_that_breaks_is_answered_for_itself(gateway: RunningGateway) -> None:
    head, body = exchange(gateway, JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n")
    assert head.startswith(b"http/1.1 400 ")
    assert strict_json(body)["error"]["type"] == "invalid_request_error"


def chunked(body: bytes, *, size: int = 7, ends: bytes = b"\r\n") -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;x=y\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n" + ends


def test_what_trails_a_body_is_no_header(gateway: RunningGateway) -> None:
    """A proxy that takes headers out, or sets them, does not look there."""
    body = json.dumps({"prompt": "Hi"}).encode()
    trailers = b"X-Session-Id: b\r\nX-Slo-Class: nonsense\r\nHost: evil\r\n\r\n"
    lines = b"X-Session-Id: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    head, _ = exchange(gateway, JSON_HEAD + lines + chunked(body, ends=trailers))
    assert head.startswith(b"http/1.1 200 ")
    assert gateway.cluster.streams[-1].spec.affinity == "a"


def test_no_key_trails_a_body(tokenizer_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{sha256(b'a-key').hexdigest()}\n")
    limits = GatewayLimits(api_keys_file=str(keys))
    trailer = b"Authorization: Bearer a-key\r\n\r\n"
    lines = b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with running_gateway(tokenizer_dir, limits=limits) as gateway:
        head, _ = exchange(gateway, JSON_HEAD + lines + chunked(b'{"prompt": "Hi"}', ends=trailer))
        assert head.startswith(b"http/1.1 401 ")


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked"])
def test_bodies_are_not_packed_on_the_way_either(gateway: RunningGateway, coding: bytes) -> None:
    lines = b"Connection: close\r\nTransfer-Encoding: " + coding + b"\r\n\r\n"
    head, body = exchange(gateway, JSON_HEAD + lines + chunked(b'{"prompt": "Hi"}'))
    assert head.startswith(b"http/1.1 415 "), head
    assert strict_json(body)["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 2\r\nContent-Length: 2", b"Content-Length: 2\r\nContent-Length: 3",
        b"Content-Length: 2, 2", b"Content-Length: +2", b"Content-Length: -2", b"Content-Length: ",
        b"Content-Length: 99999999999999999999", b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2", b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: identity", b"Content-Length : 2", b"X: a\r\n b\r\nContent-Length: 2",
    ],
)  # fmt: skip
def test_a_body_whose_end_is_in_doubt_is_refused(gateway: RunningGateway, framing: bytes) -> None:
    """What one server takes for a body another may take for the next request."""
    head, body = exchange(gateway, JSON_HEAD + framing + b"\r\n\r\n{}")
    assert head.startswith(b"http/1.1 400 "), head
    assert b"connection: close" in head
    assert set(strict_json(body)["error"]) == {"message", "type", "param", "code"}


def test_requests_behind_one_another_are_answered_in_order(gateway: RunningGateway) -> None:
    def request(content: bytes) -> bytes:
        return JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content

    gateway.cluster.script = Script(tuple(b"abc"))
    stream = request(b'{"prompt": "Hi", "stream": true}')
    last = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answers = raw_exchange(gateway, stream + request(b"[") + stream + request(b'{"prompt": "Hi"}') * 9 + last)
    statuses = [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"400", b"200", *[b"200"] * 9, b"200"]
    assert answers.count(b"data: [DONE]") == 2
    assert answers.endswith(b"{}")


# ---- large answers are not written on the event loop ----------------------------------------------


def test_many_log_probabilities_are_written_beside_the_loop(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer of a megabyte would hold up every stream; each of these is the same as written at once."""
    written_by: list[str] = []

    def watched(cls: type, name: str) -> None:
        write = getattr(cls, name)

        def watch(self: Any, *args: Any) -> Any:
            written_by.append(threading.current_thread().name)
            return write(self, *args)

        monkeypatch.setattr(cls, name, watch)

    for cls in (ChatFormat, CompletionFormat):
        watched(cls, "body")
        watched(cls, "opening")
    large: dict[str, Any] = {"prompt": "word " * 80, "echo": True, "logprobs": 5, "max_tokens": 2}
    whole = strict_json(gateway.complete(**large).content)
    stream = check_stream(gateway.complete(**large, stream=True).content, kind="text_completion")
    [choice] = whole["choices"]
    assert stream.text == choice["text"]
    assert stream.logprobs == choice["logprobs"]
    scored = gateway.chat(
        messages=[{"role": "user", "content": "word " * 80}], prompt_logprobs=5, max_tokens=1
    ).json()
    assert len(scored["prompt_logprobs"]) > 400
    gateway.cluster.script = Script(tuple(b"ab" * 100))
    [long] = gateway.chat(logprobs=True, top_logprobs=10, max_tokens=200).json()["choices"]
    assert len(long["logprobs"]["content"]) == 200
    assert [name.startswith("aside") for name in written_by] == [True] * 4
    written_by.clear()
    gateway.complete(prompt="Hi", echo=True, logprobs=5)
    gateway.complete(prompt="Hi", echo=True, logprobs=5, stream=True)
    gateway.chat(max_tokens=200)
    assert not any(name.startswith("aside") for name in written_by)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_prompts_are_cut_up_beside_the_loop_unless_they_are_short(
    gateway: RunningGateway, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page takes milliseconds, a book seconds; the book's reader has a thread of its own."""
    read_by: list[str] = []
    encode = Tokenizer.encode

    def watch(self: Tokenizer, *args: Any, **kwargs: Any) -> list[int]:
        read_by.append(threading.current_thread().name)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", watch)
    for size, thread in ((200, "Thread"), (3000, "aside_"), (300_000, "aside-long_")):
        text = "x" * size
        fields: dict[str, Any] = {"truncate_prompt_tokens": 5} if path != "/tokenize" else {}
        fields |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        read_by.clear()
        assert gateway.post(path, **fields).status_code == 200
        assert read_by
        assert all(name.startswith(thread) for name in read_by), (size, read_by)


def test_metrics_are_rendered_beside_the_loop_one_scrape_at_a_time(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes milliseconds, with many workers tens of them; workers come and go only between two."""
    order: list[str] = []
    has_gone = threading.Event()
    render, forget = Metrics.render, Metrics.forget_worker

    def slow_render(self: Metrics) -> bytes:
        order.append(f"begin {threading.current_thread().name.partition('_')[0]}")
        assert len(order) == 1 or has_gone.wait(LIMIT_S)
        time.sleep(0.05)
        page = render(self)
        order.append("end")
        return page

    def watched_forget(self: Metrics, worker: WorkerId) -> None:
        order.append("forget")
        forget(self, worker)

    monkeypatch.setattr(Metrics, "render", slow_render)
    monkeypatch.setattr(Metrics, "forget_worker", watched_forget)
    with running_gateway(tokenizer_dir) as gateway:
        gateway.cluster.workers = (worker("decode-0", Role.DECODE),)
        gateway.client.get("/metrics")

        def scrape() -> None:
            with plain_client(base_url=gateway.url) as client:
                client.get("/metrics")

        threads = [threading.Thread(target=scrape) for _ in range(3)]
        for thread in threads:
            thread.start()
        gateway.cluster.workers = ()
        has_gone.set()
        for thread in threads:
            thread.join()
    assert [step for step in order if step != "forget"] == ["begin aside", "end"] * 4
    assert order.count("forget") == 1
    at = order.index("forget")
    assert order[at - 1] == "end"
