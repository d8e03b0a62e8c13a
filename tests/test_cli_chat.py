"""`baton chat`: the conversation it keeps, the timings it shows, and what Ctrl-C ends."""

from __future__ import annotations

import _thread
import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster import cli, client
from cluster.chat_answer import Answer
from cluster.cli_chat import Conversation, TerminalChat
from tests.support.web_server import WebServer

CHAT = "/v1/chat/completions"
TIMINGS = {
    "queue_ms": 2.0, "prefill_ms": 80.0, "kv_transfer_ms": 3.0, "decode_ms": 150.0, "ttft_ms": 84.0,
    "attempts": 1, "prefill_worker": "prefill-0", "decode_worker": "decode-0",
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer() as server:
        server.answers["/v1/models"] = (200, b'{"data": [{"id": "m"}]}')
        yield server


def run(server: WebServer, *arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli.app, ["chat", "--url", server.url, *arguments], input=stdin)


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


DONE = b"data: [DONE]\n\n"
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    "timings": TIMINGS,
}


def said(server: WebServer, request: int) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in server.bodies[request]["messages"]]


def test_it_streams_keeps_the_conversation_and_shows_timings(server: WebServer) -> None:
    server.answers[CHAT] = (200, sse(delta("Hé"), delta("llo"), USAGE) + DONE)
    result = run(server, "--system", "Be brief.", "--max-tokens", "9", stdin="hi\n\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.output.count("Héllo") == 2
    assert said(server, 1) == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "Héllo"),
        ("user", "again"),
    ]
    assert {name: value for name, value in server.bodies[0].items() if name != "messages"} == {
        "model": "m",
        "max_tokens": 9,
        "stream": True,
        "timings": True,
        "stream_options": {"include_usage": True},
    }
    assert "2 tokens in" in result.output
    assert "prompt 9, 4 cached" in result.output
    assert (
        "queue 2.0 ms · prefill 80 ms on prefill-0 · transfer 3.0 ms · decode 150 ms on decode-0"
        in result.output
    )


def test_a_terminal_obeys_nothing_that_a_model_writes(server: WebServer) -> None:
    evil = "a\x1b[2Jb\x1b]52;c;eA==\x07c\x9b1md\x7f\r\x00\n\te é 漢 👩\u200d👧"
    server.answers[CHAT] = (200, sse(*(delta(char) for char in evil), USAGE) + DONE)
    result = run(server, stdin="hi\nagain\n")
    shown = result.output.partition("> ")[2]
    assert not [
        char for char in shown if (ord(char) < 0x20 and char not in "\n\t") or 0x7F <= ord(char) < 0xA0
    ]
    assert "a␛[2Jb␛]52;c;eA==␇c␡1md␡␍␀\n\te é 漢 👩\u200d👧" in shown
    assert said(server, 1)[1] == ("assistant", evil)  # the conversation keeps what was written
    server.answers[CHAT] = (400, json.dumps({"error": {"message": "no \x1b[31m such"}}).encode())
    assert "\x1b[31m such" not in run(server, stdin="hi\n").output


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "http://localhost:{port}"])
def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    port = server.url.rpartition(":")[2]
    assert client.get_json(url.format(port=port), "/v1/models") == {"data": [{"id": "m"}]}
    with pytest.raises(client.ClientError, match="no server at"):  # elsewhere it is
        client.get_json("http://baton.invalid:8000", "/v1/models")


def test_without_timings_it_asks_for_none(server: WebServer) -> None:
    server.answers[CHAT] = (200, sse(delta("Hi")) + DONE)
    result = run(server, "--no-timings", "--api-key", "k", stdin="hi\n")
    assert "first token" not in result.output
    assert set(server.bodies[0]) == {"model", "messages", "stream"}
    assert server.keys == ["Bearer k", "Bearer k"]


def test_commands(server: WebServer) -> None:
    server.answers[CHAT] = (200, sse(delta("ok")) + DONE)
    result = run(
        server,
        stdin="one\n/new\ntwo\n/system Speak Latin.\nthree\n/system\nfour\n/nope\n/help\n/exit\nfive\n",
    )
    assert [said(server, number)[-1][1] for number in range(len(server.bodies))] == [
        "one",
        "two",
        "three",
        "four",
    ]
    assert [len(said(server, number)) for number in range(4)] == [1, 1, 2, 1]
    assert said(server, 2)[0] == ("system", "Speak Latin.")
    assert "There is no command /nope" in result.output
    assert "forget the conversation" in result.output


def test_an_error_takes_the_message_back_and_the_chat_goes_on(server: WebServer) -> None:
    server.answers[CHAT] = (400, b'{"error": {"message": "too long"}}')
    result = run(server, stdin="first\nsecond\n")
    assert result.exit_code == 0
    assert result.output.count("error: too long") == 2
    assert said(server, 1) == [("user", "second")]


def test_an_answer_that_broke_off_stays(server: WebServer) -> None:
    server.answers[CHAT] = (200, sse(delta("half"), {"error": {"message": "worker lost"}}) + DONE)
    result = run(server, stdin="first\nsecond\n")
    assert "error: worker lost" in result.output
    assert said(server, 1) == [("user", "first"), ("assistant", "half"), ("user", "second")]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "too long"}}', "too long"),
        (502, b"<html>", "the server answered 502"),
        (200, sse(delta("a"), {"error": {"message": "worker lost"}}), "worker lost"),
        (200, sse(delta("a")), "the answer broke off"),
        (200, b"data: {\n\n", "not JSON"),
    ],
)
def test_errors_are_the_servers_own(server: WebServer, status: int, body: bytes, message: str) -> None:
    server.answers[CHAT] = (status, body)
    with pytest.raises(client.ClientError, match=message):
        list(client.stream_chat(server.url, {"messages": []}))


@pytest.fixture
def heeded_sigint() -> Iterator[None]:
    """Also where the suite runs in the background, whose processes are born ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_sigint")
def test_ctrl_c_stops_the_answer_and_not_the_program(
    server: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interrupt comes while the answer is read; the server sees its client leave, the chat goes on."""
    server.answers[CHAT] = (200, sse(delta("so far"), delta(" and on")))
    server.pause = threading.Event()
    lines = iter(["first", KeyboardInterrupt, "second", EOFError])
    conversation = Conversation({"model": "m"})

    def read(_: str) -> str:
        line = next(lines)
        if not isinstance(line, str):
            raise line
        if line == "second":
            assert server.client_left.wait(10)
            assert server.pause is not None
            server.pause.set()  # the next answer ends by itself
            server.answers[CHAT] = (200, sse(delta("whole")) + DONE)
        return line

    clock = InterruptingClock()
    TerminalChat(server.url, conversation, read=read, clock=clock).run()
    assert [message["content"] for message in conversation.messages] == ["first", "so far", "second", "whole"]
    output = capsys.readouterr().out
    assert "so far (stopped)" in output
    assert "(Ctrl-D ends the chat)" in output


class InterruptingClock:
    """Presses Ctrl-C once: when the second piece of the first answer has come, before it is shown."""

    def __init__(self) -> None:
        self._num_reads = 0

    def now(self) -> float:
        self._num_reads += 1
        if self._num_reads == 3:
            _thread.interrupt_main()
        return float(self._num_reads)


def test_an_answer_adds_up() -> None:
    answer = Answer(10.0)
    assert answer.timing_lines() == []
    answer.take({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 10.05)
    assert answer.take(delta("He"), 10.1) == "He"
    answer.take(delta("llo"), 10.3)
    assert answer.num_tokens == 2  # pieces, until the server counts
    assert "cut short" not in answer.timing_lines()[0]
    for reason, is_cut in (("stop", False), ("length", True)):
        answer.take({"choices": [{"delta": {}, "finish_reason": reason}]}, 10.3)
        assert ("cut short" in answer.timing_lines()[0]) is is_cut
    answer.take({"choices": [{"delta": {}, "finish_reason": "stop"}]}, 10.3)
    answer.take(USAGE | {"usage": USAGE["usage"] | {"completion_tokens": 5}}, 10.31)  # type: ignore[operator]
    assert answer.ttft_s == pytest.approx(0.1)
    assert answer.tpot_s == pytest.approx(0.05)
    assert (
        answer.timing_lines()[0]
        == "first token 100 ms · 50 ms per token (20/s) · 5 tokens in 300 ms · prompt 9, 4 cached"
    )


def test_a_local_prefill_has_no_transfer_and_attempts_are_told() -> None:
    answer = Answer(0.0)
    answer.take(delta("a"), 1.0)
    answer.take({"timings": TIMINGS | {"prefill_worker": "decode-0", "attempts": 2}}, 1.0)
    assert answer.timing_lines() == [
        "first token 1.00 s · 1 token in 1.00 s",
        "queue 2.0 ms · prefill 80 ms on decode-0 · decode 150 ms on decode-0 · 2 attempts",
    ]
