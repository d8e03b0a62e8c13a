"""The mock's script is checked as a pure list of timed pieces; the server, through plain sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from bench.load.client.http_stream import ResponseStream
from bench.load.mock.answer import Act, answer_steps, end_s
from bench.load.mock.process import main
from bench.load.mock.script import Call, Script, count_tokens, read_call, read_script
from bench.load.mock.server import MockServer, MockSettings
from bench.load.records import Status
from cluster.errors import ConfigError, InvalidRequest
from tests.support.sse import check_stream

DEADLINE_S = 20.0


def call(is_chat: bool = False, max_tokens: int = 3, wants_usage: bool = True, **script: Any) -> Call:
    body = {
        "prompt": [1, 2],
        "messages": [{"role": "user", "content": "one two"}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": wants_usage},
        "mock": script,
    }
    return read_call(body, is_chat, Script())


def events(made: Call) -> bytes:
    return b"".join(step.data for step in answer_steps(made, "cmpl-1", "m"))


def test_content_is_due_by_the_script() -> None:
    made = call(max_tokens=5, ttft_s=0.5, itl_s=[0.1, 0.2])
    steps = [step for step in answer_steps(made, "cmpl-1", "m") if step.num_tokens]
    assert [step.due_s for step in steps] == pytest.approx([0.5, 0.6, 0.8, 0.9, 1.1])
    assert end_s(made) == pytest.approx(1.1)


def test_several_tokens_per_chunk_and_a_rest() -> None:
    steps = [
        step
        for step in answer_steps(call(max_tokens=7, tokens_per_chunk=3), "cmpl-1", "m")
        if step.num_tokens
    ]
    assert [step.num_tokens for step in steps] == [3, 3, 1]
    assert b'"text":" mock mock mock"' in steps[0].data


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_a_stream_is_what_a_server_sends(is_chat: bool, num_tokens: int) -> None:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    streamed = events(call(is_chat, num_tokens=num_tokens))
    if not is_chat and num_tokens == 0:
        assert b'"text":"","logprobs":null,"finish_reason":"length"' in streamed
    request_id = b"chatcmpl-1" if is_chat else b"cmpl-1"
    result = check_stream(streamed.replace(b"cmpl-1", request_id), kind=kind, include_usage=True)
    assert result.text == " mock" * num_tokens
    assert result.usage == {
        "prompt_tokens": 2,
        "completion_tokens": num_tokens,
        "total_tokens": 2 + num_tokens,
    }


def test_usage_only_when_asked_and_wrong_when_told() -> None:
    assert b"usage" not in events(call(wants_usage=False))
    assert b"usage" not in events(call(usage=False))
    assert b'"completion_tokens":5' in events(call(usage_error=2))


@pytest.mark.parametrize(
    ("fault", "act"),
    [("cut_after", Act.CUT), ("reset_after", Act.RESET), ("end_after", Act.END), ("stall_after", Act.STALL)],
)
@pytest.mark.parametrize("after", [0, 2, 3])
def test_a_fault_comes_after_so_many_tokens(fault: str, act: Act, after: int) -> None:
    steps = answer_steps(call(**{fault: after}), "cmpl-1", "m")
    assert sum(step.num_tokens for step in steps) == after
    assert steps[-1].act is act
    assert b"[DONE]" not in b"".join(step.data for step in steps)


def test_an_error_event_after_so_many_tokens() -> None:
    steps = answer_steps(call(error_after=1, message="boom"), "cmpl-1", "m")
    assert [step.num_tokens for step in steps] == [1, 0, 0, 0]
    assert b'"error":{"message":"boom"' in steps[1].data
    assert steps[2].data == b"data: [DONE]\n\n"


def test_heartbeats_until_the_first_token() -> None:
    steps = answer_steps(call(ttft_s=1.0, heartbeat_s=0.4), "cmpl-1", "m")
    assert [(step.due_s, step.data) for step in steps[:2]] == [(0.4, b": ping\n\n"), (0.8, b": ping\n\n")]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("one two\nthree", 3),
        ("", 0),
        ([5, 6, 7], 3),
        (["a b", "c"], 3),
        ([{"role": "user", "content": "a b"}, {"role": "assistant", "content": None}], 2),
    ],
)
def test_how_the_mock_counts(prompt: object, count: int) -> None:
    assert count_tokens(prompt) == count


def test_scripts_that_cannot_be_read_are_named() -> None:
    with pytest.raises(InvalidRequest, match="unknown field `tfft_s`"):
        call(tfft_s=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_script('{"ttft_s": "soon"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_script("{")
    with pytest.raises(InvalidRequest, match="no prompt"):
        read_call({"max_tokens": 1}, False, Script())


async def ask(server: MockServer, method: str, path: str, body: bytes = b"") -> ResponseStream:
    """One request on its own connection, read to its end."""
    stream = ResponseStream(keep_text=True)
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(
            b"%b %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b"
            % (method.encode(), path.encode(), len(body), body)
        )
        while not stream.is_message_over and stream.verdict is None:
            data = await reader.read(65536)
            if not data:
                stream.eof(1, None)
                break
            stream.feed(data, 1)
        writer.close()
        await writer.wait_closed()
    return stream


async def raw(server: MockServer, path: str, body: bytes = b"") -> Any:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(
        b"POST %b HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        % (path.encode(), len(body), body)
    )
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    reply = await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()
    return orjson.loads(reply)


async def test_the_questions_around_a_run() -> None:
    async with MockServer(MockSettings(model="m", max_model_len=99)) as server:
        [card] = (await raw(server, "/v1/models"))["data"]
        assert (card["id"], card["max_model_len"]) == ("m", 99)
        assert await raw(server, "/version") == {"version": "mock-1"}
        assert await raw(server, "/health") == {}
        tokens = await raw(server, "/tokenize", b'{"prompt":"one two one"}')
        assert tokens["count"] == 3
        assert tokens["tokens"][0] == tokens["tokens"][2] != tokens["tokens"][1]
        assert "no such path" in (await raw(server, "/v1/nothing"))["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"{}", b'{"prompt":"a","mock":{"x":1}}'])
async def test_a_bad_request_is_refused(body: bytes) -> None:
    async with MockServer() as server:
        stream = await ask(server, "POST", "/v1/completions", body)
    assert stream.http_status == 400
    assert server.truths == []


async def test_the_truth_of_a_stream() -> None:
    async with MockServer(MockSettings(script=Script(ttft_s=0.02, itl_s=0.01))) as server:
        body = {"prompt": "a b", "max_tokens": 3, "stream": True, "mock": {"label": "x", "split_bytes": 7}}
        stream = await ask(server, "POST", "/v1/completions", orjson.dumps(body))
        assert stream.verdict is not None
        assert stream.verdict.status is Status.OK
        [truth] = await raw(server, "/mock/truth")
    assert truth["label"] == "x"
    assert truth["ending"] == "end"
    assert truth["chunk_tokens"] == [1, 1, 1]
    moments = [truth["received_ns"], truth["admitted_ns"], *truth["chunk_ns"], truth["end_ns"]]
    assert moments == sorted(moments)
    assert truth["chunk_ns"][0] - truth["admitted_ns"] >= 20_000_000  # never before it is due
    assert truth["chunk_ns"][2] - truth["admitted_ns"] >= 40_000_000


async def test_an_answer_that_is_not_streamed() -> None:
    async with MockServer() as server:
        reply = await raw(server, "/v1/completions", b'{"prompt":"a b","max_tokens":2}')
    assert reply["choices"][0]["text"] == " mock mock"
    assert reply["usage"]["completion_tokens"] == 2


async def test_capacity_serves_so_many_at_once_and_the_rest_in_order() -> None:
    async with MockServer(MockSettings(script=Script(ttft_s=0.02), capacity=2)) as server:
        bodies = [orjson.dumps({"prompt": "a", "max_tokens": 2, "stream": True}) for _ in range(6)]
        await asyncio.gather(*(ask(server, "POST", "/v1/completions", body) for body in bodies))
        truths = list(server.truths)
    assert len(truths) == 6
    for truth in truths[2:]:
        before = [
            other
            for other in truths
            if other is not truth and (other.admitted_ns or 0) < (truth.admitted_ns or 0)
        ]
        still_served = [other for other in before if (other.end_ns or 0) > (truth.admitted_ns or 0)]
        assert len(still_served) < 2
    admitted = [truth.admitted_ns or 0 for truth in truths]
    assert admitted == sorted(admitted)


async def test_a_client_that_leaves_frees_its_place() -> None:
    async with MockServer(MockSettings(capacity=1)) as server:
        body = orjson.dumps(
            {"prompt": "a", "max_tokens": 2, "stream": True, "mock": {"stall_after": 0, "ttft_s": 60.0}}
        )
        _, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        waiting = asyncio.create_task(ask(server, "POST", "/v1/completions", b'{"prompt":"a","stream":true}'))
        await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()
        stream = await waiting
    assert stream.verdict is not None
    assert stream.verdict.status is Status.OK


def test_unknown_fields_of_scripts_and_settings_name_those_that_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--script", '{"ttft": 1}']) == 2
    assert "the fields are ttft_s, itl_s" in capsys.readouterr().err
    assert main(["--settings", '{"capcity": 1}']) == 2
    assert "no `capcity`; the fields are script, model, capacity" in capsys.readouterr().err


def test_help_tells_every_field_of_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"], "baton bench mock")
    told = capsys.readouterr().out
    assert told.startswith("usage: baton bench mock ")
    assert all(f"\n  {name} " in told for name in Script.__struct_fields__)
    assert "--extra-body" in told
