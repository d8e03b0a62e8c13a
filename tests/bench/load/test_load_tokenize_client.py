import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.load.tokenize_client import HttpTokenizeClient, TokenizeError


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.status = 200
        self.answer: bytes | None = None
        self.closes_after_each = False
        self.num_connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, body, self.headers["authorization"]))
        words = body.get("prompt", "").split()
        answer = self.server.answer
        if answer is None:
            answer = json.dumps(
                {"count": len(words), "max_model_len": 99, "tokens": [1] * len(words)}
            ).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        if self.server.closes_after_each:
            self.close_connection = True  # without having said so in a header

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


def test_counts_texts_and_messages_on_one_connection(server: Server) -> None:
    with HttpTokenizeClient(server.url + "/v1/", "m", api_key="secret") as client:
        assert client.count_text("one two three") == 3
        assert client.count_messages([{"role": "user", "content": "hi"}]) == 0
    assert server.requests == [
        ("/tokenize", {"model": "m", "prompt": "one two three"}, "Bearer secret"),
        ("/tokenize", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, "Bearer secret"),
    ]
    assert server.num_connections == 1


def test_a_base_path_is_kept(server: Server) -> None:
    with HttpTokenizeClient(server.url + "/llm/v1", "m") as client:
        client.count_text("one")
    assert server.requests == [("/llm/tokenize", {"model": "m", "prompt": "one"}, None)]


def test_a_connection_that_the_server_closed_is_opened_again(server: Server) -> None:
    server.closes_after_each = True
    with HttpTokenizeClient(server.url, "m") as client:
        assert [client.count_text("one two") for _ in range(3)] == [2, 2, 2]
    assert server.num_connections == 3


@pytest.mark.parametrize(
    ("status", "answer", "named"),
    [
        (404, b"{}", "answered 404: this server counts no tokens for a model `m`"),
        (500, b'{"error": "boom"}', "answered 500: .*boom"),
        (200, b"<html>", "without a `count` of tokens: <html>"),
        (200, b'{"tokens": [1]}', "without a `count`"),
        (200, b'{"count": "3"}', "without a `count`"),
    ],
)
def test_answers_that_cannot_be_used(server: Server, status: int, answer: bytes, named: str) -> None:
    server.status, server.answer = status, answer
    with HttpTokenizeClient(server.url, "m") as client, pytest.raises(TokenizeError, match=named):
        client.count_text("one")


def test_nobody_there(server: Server) -> None:
    unused = Server()
    url = unused.url
    unused.server_close()
    with (
        HttpTokenizeClient(url, "m") as client,
        pytest.raises(TokenizeError, match="refused; is the server running"),
    ):
        client.count_text("one")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "", "http://host:port", "http://[::1"]
)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(TokenizeError, match="not the URL of a server"):
        HttpTokenizeClient(url, "m")
