"""A small OpenAI-compatible server around an engine that has none: what a peer's own library is served by.

Standard library only, for it runs inside each peer's environment; thin, for it must not be what is
measured.

1. A connection's bytes become an `HttpRequest` (`http_parse`), a completion a `Generation` for the engine.
2. The engine works in its own thread and hands over all tokens of a step at once (`Emit`): one wake-up of the
   event loop per step, however many streams run.
3. Each token becomes one SSE chunk, written in the turn of the loop that received it.
4. A client that leaves cancels its request. An engine that fails ends every stream with an error event and
   every later request with status 500.

Only greedy completions are served. Text is decoded token by token, so a character that spans tokens shows as
U+FFFD: numbers of tokens and moments are what this server is for.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.peers.http_parse import BadRequest, HttpRequest
from bench.peers.shim_connection import Connection


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine is asked for: greedy decoding of `max_tokens` tokens at most."""

    request_id: int
    prompt_ids: list[int]
    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one request: new tokens, and at the end a reason (`stop`, `length`) or an error sentence."""

    request_id: int
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    error: str | None = None


Emit = Callable[[list[Delta]], None]
Failed = Callable[[str], None]  # the engine is done for: one sentence


class Engine(Protocol):
    """`submit` and `cancel` are called from the event loop and return at once; `emit` may be called from any
    thread. A cancelled request may still emit: nobody listens."""

    name: str
    max_model_len: int

    def start(self, emit: Emit, failed: Failed) -> None: ...
    def submit(self, generation: Generation) -> None: ...
    def cancel(self, request_id: int) -> None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode_token(self, token_id: int) -> str: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Stream:
    """One completion being answered on `connection`."""

    connection: Connection
    generation: Generation
    created: int
    is_stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    num_output: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class ShimServer:
    """Owns the open streams of one engine. Everything but `_emit` and `_failed` runs in the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, _Stream] = {}
        self._ids = itertools.count()
        self._texts: dict[int, str] = {}
        self._failure: str | None = None

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Start the engine and accept connections; `port` 0 takes any free one."""
        self._engine.start(self._emit, self._fail)
        return await self._loop.create_server(lambda: Connection(self), host, port, backlog=1024)

    def _emit(self, deltas: list[Delta]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, deltas)

    def _fail(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._end_all, reason)

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            if delta.token_ids:
                self._send_tokens(stream, delta.token_ids)
            if delta.finish_reason is not None or delta.error is not None:
                del self._streams[delta.request_id]
                self._end(stream, delta)

    def _end_all(self, reason: str) -> None:
        self._failure = reason
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            self._end(stream, Delta(request_id, error=reason))

    # -- answers

    def handle(self, connection: Connection, request: HttpRequest) -> None:
        route = (request.method, request.path.split("?")[0])
        try:
            if route == ("GET", "/health"):
                self._health(connection)
            elif route == ("GET", "/v1/models"):
                connection.send_json(200, self._models())
            elif route == ("POST", "/tokenize"):
                ids = self._prompt_ids(_json_object(request.body))
                answer = {"count": len(ids), "tokens": ids, "max_model_len": self._engine.max_model_len}
                connection.send_json(200, answer)
            elif route == ("POST", "/v1/completions"):
                self._complete(connection, _json_object(request.body))
            else:
                connection.send_error(404, f"no such route: {request.method} {request.path}")
        except BadRequest as error:
            connection.send_error(error.status, str(error))

    def _health(self, connection: Connection) -> None:
        if self._failure is None:
            connection.send_json(200, {"status": "ok"})
        else:
            connection.send_error(503, self._failure)

    def _models(self) -> dict[str, Any]:
        model = {"id": self._engine.name, "object": "model", "owned_by": "peer"}
        return {"object": "list", "data": [model | {"max_model_len": self._engine.max_model_len}]}

    def _prompt_ids(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            prompt = self._engine.encode(prompt)
        if not isinstance(prompt, list) or not prompt or not all(type(i) is int and i >= 0 for i in prompt):
            raise BadRequest("`prompt` must be a text or a list of token ids, and not empty")
        return prompt

    def _complete(self, connection: Connection, body: dict[str, Any]) -> None:
        model = body.get("model", self._engine.name)
        if model != self._engine.name:
            raise BadRequest(f"model `{model}` is not served here; `{self._engine.name}` is", status=404)
        if body.get("temperature") != 0:
            raise BadRequest("send `temperature` 0: this server decodes greedily")
        prompt_ids = self._prompt_ids(body)
        max_tokens = body.get("max_tokens", 16)
        if type(max_tokens) is not int or max_tokens < 1:
            raise BadRequest("`max_tokens` must be a whole number, 1 or more")
        if len(prompt_ids) + max_tokens > self._engine.max_model_len:
            raise BadRequest(
                f"{len(prompt_ids)} prompt tokens and {max_tokens} output tokens exceed the context of "
                f"{self._engine.max_model_len} tokens"
            )
        if self._failure is not None:
            raise BadRequest(self._failure, status=500)
        options = body.get("stream_options") or {}
        stream = _Stream(
            connection=connection,
            generation=Generation(
                next(self._ids), prompt_ids, max_tokens, bool(body.get("ignore_eos", False))
            ),
            created=int(time.time()),
            is_stream=bool(body.get("stream", False)),
            include_usage=bool(options.get("include_usage", False)),
            continuous_usage=bool(options.get("continuous_usage_stats", False)),
            return_token_ids=bool(body.get("return_token_ids", False)),
        )
        self._streams[stream.generation.request_id] = stream
        connection.request_id = stream.generation.request_id
        if stream.is_stream:
            connection.begin_events()
        self._engine.submit(stream.generation)

    def abandon(self, request_id: int) -> None:
        """The client of this request went away."""
        if self._streams.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    def _send_tokens(self, stream: _Stream, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            text = self._texts.get(token_id)
            if text is None:
                text = self._texts[token_id] = self._engine.decode_token(token_id)
            stream.num_output += 1
            if not stream.is_stream:
                stream.texts.append(text)
                stream.token_ids.append(token_id)
                continue
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
            if stream.return_token_ids:
                choice["token_ids"] = [token_id]
            usage = {"usage": _usage(stream)} if stream.continuous_usage else {}
            stream.connection.send_event(self._object(stream, [choice]) | usage)

    def _end(self, stream: _Stream, delta: Delta) -> None:
        connection = stream.connection
        connection.request_id = None
        if delta.error is not None:
            error = {"error": {"message": delta.error, "type": "internal_error", "code": 500}}
            if stream.is_stream:
                connection.send_event(error)
                connection.end_events()
            else:
                connection.send_json(500, error)
            return
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": delta.finish_reason}
        if not stream.is_stream:
            choice["text"] = "".join(stream.texts)
            if stream.return_token_ids:
                choice["token_ids"] = stream.token_ids
            connection.send_json(200, self._object(stream, [choice]) | {"usage": _usage(stream)})
            return
        connection.send_event(self._object(stream, [choice]))
        if stream.include_usage:
            connection.send_event(self._object(stream, []) | {"usage": _usage(stream)})
        connection.end_events()

    def _object(self, stream: _Stream, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{stream.generation.request_id}",
            "object": "text_completion",
            "created": stream.created,
            "model": self._engine.name,
            "choices": choices,
        }


def _usage(stream: _Stream) -> dict[str, int]:
    num_input = len(stream.generation.prompt_ids)
    return {
        "prompt_tokens": num_input,
        "completion_tokens": stream.num_output,
        "total_tokens": num_input + stream.num_output,
    }


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


def serve(engine: Engine, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        server = await ShimServer(engine).listen(host, port)
        print(f"serving {engine.name} on {host}:{port}", flush=True)
        async with server:
            await stop.wait()

    try:
        asyncio.run(main())
    finally:
        engine.close()
