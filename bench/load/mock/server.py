"""An OpenAI-compatible server without a model, whose timing is scripted and whose true moments can be read.

1. A request is read; its script is the `mock` field of its body over the server's default.
2. With `capacity` C, at most C requests are served at once and the others wait in order: a slow server.
3. Its pieces are written when they are due. The moment right before each write is kept on the clock the load
   client uses: what the client reports can be held against what happened, not against what was meant to
   happen.
4. `GET /mock/truth` tells those moments; in the same process they are `MockServer.truths`.

Also answers `/v1/models`, `/tokenize` (tokens are words), `/version` and `/health`.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from bench.load.mock.answer import Act, Step, answer_steps, end_s, error_body, whole_answer
from bench.load.mock.connection import MockConnection
from bench.load.mock.script import Call, Script, Size, count_tokens, read_call
from cluster.errors import InvalidRequest

NS = 1_000_000_000
VOCABULARY = 32_000
VERSION = "mock-1"
BACKLOG = 4096
COMPLETIONS = {"/v1/completions": False, "/v1/chat/completions": True}  # path |-> is it a chat


class MockSettings(msgspec.Struct, frozen=True, kw_only=True):
    script: Script = Script()
    model: str = "mock-8b-instruct"
    capacity: Size | None = None  # requests served at once; None: all
    max_model_len: Size = 32_768
    keeps_truth: bool = True


class Truth(msgspec.Struct, kw_only=True):
    """What truly happened to one request, on the `perf_counter_ns` clock."""

    label: str
    connection: int  # number of the connection that brought it, from 1
    received_ns: int  # the whole request was read
    admitted_ns: int | None = None
    chunk_ns: list[int] = []  # right before each chunk with content was written
    chunk_tokens: list[int] = []
    end_ns: int | None = None  # right before the last write, or when the client left
    ending: str = ""  # "end", "cut", "reset", "stall", "refused", "client left"


class _Serving:
    """One request being answered."""

    def __init__(self, server: MockServer, connection: MockConnection, call: Call, request_id: str) -> None:
        self.truth = Truth(
            label=call.script.label, connection=connection.number, received_ns=time.perf_counter_ns()
        )
        self._server = server
        self._connection = connection
        self._call = call
        self._request_id = request_id
        self._steps: list[Step] = []
        self._position = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False

    def admit(self) -> None:
        call, script = self._call, self._call.script
        self.truth.admitted_ns = time.perf_counter_ns()
        if script.http_status != 200:
            self._steps = [Step(script.ttft_s, Act.END)]
        elif call.is_stream:
            self._steps = answer_steps(call, self._request_id, self._server.settings.model)
            self._connection.begin_stream(script)
        else:
            self._steps = [Step(end_s(call), Act.END)]
        self._advance()

    def client_left(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._finish("client left")

    def _advance(self) -> None:
        """Write what is due; come back for the rest."""
        admitted_ns = self.truth.admitted_ns
        assert admitted_ns is not None
        while not self.is_over:
            step = self._steps[self._position]
            wait_s = step.due_s - (time.perf_counter_ns() - admitted_ns) / NS
            if wait_s > 0:
                self._timer = self._server.loop.call_later(wait_s, self._advance)
                return
            self._position += 1
            self._do(step)

    def _do(self, step: Step) -> None:
        connection, call, script = self._connection, self._call, self._call.script
        if step.act is Act.WRITE:
            if step.num_tokens:
                self.truth.chunk_ns.append(time.perf_counter_ns())
                self.truth.chunk_tokens.append(step.num_tokens)
            connection.write_piece(step.data)
            return
        ending = "refused" if script.http_status != 200 else step.act.value
        self._finish(ending)
        if script.http_status != 200:
            kind, body = error_body(script)
            connection.reply(script.http_status, body, kind, script.keep_alive)
        elif not call.is_stream:
            body = whole_answer(call, self._request_id, self._server.settings.model)
            connection.reply(200, body, b"application/json", script.keep_alive)
        elif step.act is Act.END:
            connection.end_stream()
        elif step.act is not Act.STALL:
            connection.break_off(is_reset=step.act is Act.RESET)

    def _finish(self, ending: str) -> None:
        if not self.is_over:
            self.is_over = True
            self.truth.end_ns = time.perf_counter_ns()
            self.truth.ending = ending
            self._server.served(self)


class MockServer:
    """`async with MockServer(settings) as server:` serves on `server.url` until the block ends."""

    def __init__(
        self,
        settings: MockSettings | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.settings = settings or MockSettings()
        self.truths: list[Truth] = []
        self.connections: set[MockConnection] = set()
        self.host, self.port = host, port
        self._context = context  # None: plain HTTP
        self._num_connections = 0
        self._num_served = 0
        self._num_requests = 0
        self._queue: deque[_Serving] = deque()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._context is None else 'https'}://{host}:{self.port}"

    async def __aenter__(self) -> MockServer:
        self.loop = asyncio.get_running_loop()
        self._server = await self.loop.create_server(
            lambda: MockConnection(self), self.host, self.port, backlog=BACKLOG, ssl=self._context
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        await self._server.wait_closed()

    def handle(self, connection: MockConnection, path: str, body: bytes) -> _Serving | None:
        """Answer at once, or return what will."""
        if path in COMPLETIONS:
            return self._complete(connection, body, COMPLETIONS[path])
        plain: dict[str, Callable[[bytes], Any]] = {
            "/v1/models": self._models,
            "/version": lambda _: {"version": VERSION},
            "/health": lambda _: {},
            "/tokenize": self._tokenize,
            "/mock/truth": lambda _: self.truths,
        }
        if path not in plain:
            connection.reply(
                404, orjson.dumps({"error": {"message": f"no such path: {path}", "code": "not_found"}})
            )
            return None
        connection.reply(200, msgspec.json.encode(plain[path](body)))
        return None

    def connected(self, connection: MockConnection) -> int:
        """Its number."""
        self.connections.add(connection)
        self._num_connections += 1
        return self._num_connections

    def disconnected(self, connection: MockConnection) -> None:
        self.connections.discard(connection)

    def served(self, serving: _Serving) -> None:
        """A request left the server: the next one may enter."""
        if serving in self._queue:
            self._queue.remove(serving)
            return
        self._num_served -= 1
        if self._queue:
            self._admit(self._queue.popleft())

    def _complete(self, connection: MockConnection, body: bytes, is_chat: bool) -> _Serving | None:
        try:
            call = read_call(orjson.loads(body), is_chat, self.settings.script)
        except (orjson.JSONDecodeError, InvalidRequest) as error:
            connection.reply(
                400, orjson.dumps({"error": {"message": str(error), "type": "invalid_request_error"}})
            )
            return None
        self._num_requests += 1
        prefix = "chatcmpl" if is_chat else "cmpl"
        serving = _Serving(self, connection, call, f"{prefix}-{self._num_requests:032x}")
        if self.settings.keeps_truth:
            self.truths.append(serving.truth)
        if self.settings.capacity is None or self._num_served < self.settings.capacity:
            # Not from within the parser's callback: the connection must know what it serves first.
            self._num_served += 1
            self.loop.call_soon(serving.admit)
        else:
            self._queue.append(serving)
        return serving

    def _admit(self, serving: _Serving) -> None:
        self._num_served += 1
        serving.admit()

    def _models(self, _: bytes) -> dict[str, Any]:
        card = {
            "id": self.settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "mock",
            "max_model_len": self.settings.max_model_len,
        }
        return {"object": "list", "data": [card]}

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        request = orjson.loads(body)
        prompt = request.get("messages") or request.get("prompt") or ""
        tokens = (
            [zlib.crc32(word.encode()) % VOCABULARY for word in prompt.split()]
            if isinstance(prompt, str)
            else []
        )
        return {"count": count_tokens(prompt), "max_model_len": self.settings.max_model_len, "tokens": tokens}
