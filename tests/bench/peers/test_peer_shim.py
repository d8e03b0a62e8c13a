"""The small server around an engine: its HTTP, its event stream, its errors."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from scripted_engine import FAIL, HANG, ScriptedEngine

from bench.peers.openai_shim import ShimServer

HOST = "127.0.0.1"
WAIT_S = 10


@contextlib.asynccontextmanager
async def served(engine: ScriptedEngine) -> AsyncIterator[int]:
    server = await ShimServer(engine).listen(HOST, 0)
    try:
        async with server:
            yield server.sockets[0].getsockname()[1]
    finally:
        engine.close()


class Client:
    """One kept connection; reads whole answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, port: int) -> AsyncIterator["Client"]:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    def send(self, method: str, path: str, body: bytes = b"") -> None:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)

    async def answer(self) -> tuple[int, str, bytes]:
        """(status, content type, body), chunks put together."""
        async with asyncio.timeout(WAIT_S):
            status = int((await self._reader.readline()).split()[1])
            headers = {}
            while (line := await self._reader.readline()) != b"\r\n":
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            if headers.get("transfer-encoding") != "chunked":
                body = await self._reader.readexactly(int(headers["content-length"]))
                return status, headers["content-type"], body
            body = b""
            while (size := int(await self._reader.readline(), 16)) > 0:
                body += await self._reader.readexactly(size)
                assert await self._reader.readexactly(2) == b"\r\n"
            assert await self._reader.readexactly(2) == b"\r\n"
            return status, headers["content-type"], body

    async def post(self, path: str, body: Any) -> tuple[int, str, bytes]:
        self.send("POST", path, json.dumps(body).encode())
        return await self.answer()


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": [10, 11], "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields


def events(body: bytes) -> list[Any]:
    """The stream's objects; every event is one `data:` line and a blank one, the last is [DONE]."""
    *parts, rest = body.split(b"\n\n")
    assert rest == b""
    assert parts.pop() == b"data: [DONE]"
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


async def test_stream_has_one_chunk_per_token_then_reason_then_usage() -> None:
    async with served(ScriptedEngine()) as port, Client.open(port) as client:
        body = completion(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
        status, kind, answer = await client.post("/v1/completions", body)
    *chunks, last, usage = events(answer)
    assert (status, kind) == (200, "text/event-stream")
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["<10>", "<11>", "<12>", "<13>"]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[10], [11], [12], [13]]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "length")
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert {chunk["id"] for chunk in [*chunks, last, usage]} == {chunks[0]["id"]}


async def test_usage_only_when_asked_and_in_every_chunk_when_asked() -> None:
    async with served(ScriptedEngine()) as port, Client.open(port) as client:
        _, _, plain = await client.post("/v1/completions", completion(stream=True))
        options = {"continuous_usage_stats": True}
        _, _, continuous = await client.post(
            "/v1/completions", completion(stream=True, stream_options=options)
        )
    assert all("usage" not in event for event in events(plain))
    counts = [event["usage"]["completion_tokens"] for event in events(continuous) if "usage" in event]
    assert counts == [1, 2, 3, 4]


async def test_end_of_sequence_counts_unless_ignored() -> None:
    async with served(ScriptedEngine()) as port, Client.open(port) as client:
        _, _, body = await client.post("/v1/completions", completion(ignore_eos=False, max_tokens=9))
    answer = json.loads(body)
    assert answer["choices"][0] == {"index": 0, "text": "<10><11><12>", "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == 3


async def test_text_prompt_and_tokenize_agree() -> None:
    async with served(ScriptedEngine()) as port, Client.open(port) as client:
        _, _, counted = await client.post("/tokenize", {"prompt": "Abc"})
        _, _, body = await client.post("/v1/completions", completion(prompt="Abc", max_tokens=1))
    assert json.loads(counted) == {"count": 3, "tokens": [65, 98, 99], "max_model_len": 512}
    assert json.loads(body)["usage"]["prompt_tokens"] == 3


async def test_models_and_health() -> None:
    async with served(ScriptedEngine()) as port, Client.open(port) as client:
        client.send("GET", "/v1/models")
        _, _, models = await client.answer()
        client.send("GET", "/health")
        status, _, _ = await client.answer()
    card = json.loads(models)["data"][0]
    assert (card["id"], card["max_model_len"], status) == ("scripted", 512, 200)


@pytest.mark.parametrize(
    ("fields", "status", "part"),
    [
        ({"prompt": []}, 400, "`prompt`"),
        ({"prompt": [1, "2"]}, 400, "`prompt`"),
        ({"prompt": [True]}, 400, "`prompt`"),
        ({"prompt": [-1]}, 400, "`prompt`"),
        ({"prompt": None}, 400, "`prompt`"),
        ({"max_tokens": 0}, 400, "`max_tokens`"),
        ({"max_tokens": 2.5}, 400, "`max_tokens`"),
        ({"max_tokens": 511}, 400, "context of 512"),
        ({"temperature": 0.7}, 400, "`temperature` 0"),
        ({"temperature": None}, 400, "`temperature` 0"),
        ({"model": "other"}, 404, "`scripted`"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(
    fields: dict[str, Any], status: int, part: str
) -> None:
    async with served(ScriptedEngine()) as port, Client.open(port) as client:
        got, _, body = await client.post("/v1/completions", completion(**fields))
        after, _, _ = await client.post("/v1/completions", completion())
    error = json.loads(body)["error"]
    assert (got, after) == (status, 200)
    assert part in error["message"]
    assert error["code"] == status


async def test_what_is_no_json_and_what_is_nowhere() -> None:
    async with served(ScriptedEngine()) as port, Client.open(port) as client:
        client.send("POST", "/v1/completions", b"{")
        broken, _, _ = await client.answer()
        client.send("POST", "/v1/completions", b"[]")
        listed, _, _ = await client.answer()
        client.send("GET", "/v1/chat/completions")
        missing, _, _ = await client.answer()
    assert (broken, listed, missing) == (400, 400, 404)


async def test_requests_sent_ahead_are_answered_in_order() -> None:
    async with served(ScriptedEngine()) as port, Client.open(port) as client:
        for first in (10, 20, 30):
            client.send("POST", "/v1/completions", json.dumps(completion(prompt=[first])).encode())
        texts = [json.loads((await client.answer())[2])["choices"][0]["text"] for _ in range(3)]
    assert [text[:4] for text in texts] == ["<10>", "<20>", "<30>"]


async def test_many_streams_at_once_keep_their_own_tokens() -> None:
    async with served(ScriptedEngine()) as port:

        async def one(first: int) -> str:
            async with Client.open(port) as client:
                _, _, body = await client.post("/v1/completions", completion(prompt=[first], stream=True))
            return "".join(event["choices"][0]["text"] for event in events(body))

        texts = await asyncio.gather(*(one(100 * i) for i in range(20)))
    assert texts == ["".join(f"<{100 * i + k}>" for k in range(4)) for i in range(20)]


async def test_a_client_that_leaves_cancels_its_request() -> None:
    engine = ScriptedEngine()
    async with served(engine) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        body = json.dumps(completion(prompt=[HANG], stream=True)).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(WAIT_S):
            await reader.readuntil(b"<777>")
            writer.close()
            assert await asyncio.to_thread(engine.cancelled.get, True, WAIT_S) == 0


async def test_an_engine_that_fails_ends_streams_and_refuses_what_comes_later() -> None:
    async with served(ScriptedEngine()) as port, Client.open(port) as hanging, Client.open(port) as client:
        hanging.send("POST", "/v1/completions", json.dumps(completion(prompt=[HANG], stream=True)).encode())
        failed, _, body = await client.post("/v1/completions", completion(prompt=[FAIL]))
        _, _, stream = await hanging.answer()
        later, _, _ = await client.post("/v1/completions", completion())
        client.send("GET", "/health")
        health, _, _ = await client.answer()
    assert (failed, later, health) == (500, 500, 503)
    assert json.loads(body)["error"]["message"] == "the engine broke"
    assert events(stream)[-1]["error"]["message"] == "the engine broke"
