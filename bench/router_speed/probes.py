"""What else a router owes while it streams: quick refusals, an event loop that no tokenizing holds up."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from bench.load.client.target import Target
from bench.router_speed.site import MODEL
from bench.router_speed.streams import percentiles

TIMEOUT_S = 30.0
PROBE_S = 0.02  # between two refused requests
HEALTH_S = 0.002  # between two looks at /health
NUM_LARGE = 32
LARGE_BYTES = 100_000
SENTENCE = "Some 100 kB of ordinary words, with numbers such as 12345 in between, for the tokenizer to cut. "

REFUSED: dict[str, tuple[int, dict[str, Any]]] = {  # name |-> status, fields
    "bad_field": (400, {"model": MODEL, "prompt": "Hi", "temperature": "warm"}),
    "unknown_model": (404, {"model": "nobody", "prompt": "Hi"}),
    "too_long": (400, {"model": MODEL, "prompt": "Hi", "max_tokens": 10_000_000}),
}


class Refusals:
    """Sends requests that are to be refused, from `after_s` until `stop`; one connection, one at a time."""

    def __init__(self, target: Target, after_s: float = 0.0) -> None:
        self._target = target
        self._after_s = after_s
        self._over = threading.Event()
        self._first_byte_ms: dict[str, list[float]] = {name: [] for name in REFUSED}
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._fault: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> dict[str, dict[str, float]]:
        """Time to the first byte of the answer, by kind."""
        self._over.set()
        self._thread.join()
        if self._fault is not None:
            raise self._fault
        return {name: percentiles(values) for name, values in self._first_byte_ms.items()}

    def _send_all(self) -> None:
        try:
            if self._over.wait(self._after_s):
                return
            with _connect(self._target) as connection:
                while True:
                    for name, (status, fields) in REFUSED.items():
                        if self._over.wait(PROBE_S):
                            return
                        self._first_byte_ms[name].append(
                            _refused_ms(connection, self._target, status, fields)
                        )
        except Exception as error:
            self._fault = error


def _refused_ms(connection: socket.socket, target: Target, status: int, fields: dict[str, Any]) -> float:
    body = json.dumps(fields).encode()
    payload = b"%b%d\r\n\r\n%b" % (target.head("/v1/completions"), len(body), body)
    start = time.perf_counter()
    connection.sendall(payload)
    first = connection.recv(1)
    spent_ms = (time.perf_counter() - start) * 1e3
    answer = first + _rest_of_answer(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    return spent_ms


def health_while_tokenizing(target: Target) -> dict[str, Any]:
    """/health every few milliseconds while large prompts are tokenized, all at once."""
    text = (SENTENCE * (LARGE_BYTES // len(SENTENCE) + 1))[:LARGE_BYTES]
    quiet = _look(target, time.perf_counter() + 1.0, ())
    prompts = [
        json.dumps({"model": MODEL, "prompt": f"{i} {text}", "max_tokens": 1}) for i in range(NUM_LARGE)
    ]
    connections = [_connect(target) for _ in prompts]
    start = time.perf_counter()
    answers = [
        threading.Thread(target=_answer_large, args=(target, connection, prompt.encode()), daemon=True)
        for connection, prompt in zip(connections, prompts, strict=True)
    ]
    for answer in answers:
        answer.start()
    busy = _look(target, start + TIMEOUT_S, answers)
    spent_s = time.perf_counter() - start
    return {
        "num_prompts": NUM_LARGE,
        "prompt_bytes": LARGE_BYTES,
        "all_answered_s": round(spent_s, 3),
        "health_ms": percentiles(busy),
        "health_ms_before": percentiles(quiet),
    }


def _answer_large(target: Target, connection: socket.socket, body: bytes) -> None:
    with connection:
        connection.sendall(b"%b%d\r\n\r\n%b" % (target.head("/v1/completions"), len(body), body))
        first = connection.recv(1)
        answer = first + _rest_of_answer(connection)
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:500]


def _look(target: Target, until: float, answers: Sequence[threading.Thread]) -> list[float]:
    """Round trips of /health in milliseconds, until the time is over or the last of `answers` is there."""
    spent_ms: list[float] = []
    request = f"GET /health HTTP/1.1\r\nhost: {target.host}\r\n\r\n".encode()
    with _connect(target) as connection:
        while time.perf_counter() < until and (not answers or any(one.is_alive() for one in answers)):
            start = time.perf_counter()
            connection.sendall(request)
            first = connection.recv(1)
            spent_ms.append((time.perf_counter() - start) * 1e3)
            answer = first + _rest_of_answer(connection)
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            time.sleep(HEALTH_S)  # the interval itself
    return spent_ms


def _connect(target: Target) -> socket.socket:
    connection = socket.create_connection((target.host, target.port), TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _rest_of_answer(connection: socket.socket) -> bytes:
    """All after the first byte, of an answer with a content-length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    num_bytes = int(lengths[0].partition(b":")[2])
    while len(body) < num_bytes:
        body += _some(connection)
    return b"%b\r\n\r\n%b" % (head, body)


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(65_536)
    assert data, "the router closed the connection"
    return data
