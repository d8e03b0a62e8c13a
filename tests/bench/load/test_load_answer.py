from typing import Any

import orjson
import pytest

from bench.load.client.answer import Answer, body_error


def take(*events: Any, keep_text: bool = True) -> Answer:
    """Event i at moment i; a dictionary is a chunk, bytes are as they are."""
    answer = Answer(keep_text)
    for moment, event in enumerate(events):
        answer.take_event(event if isinstance(event, bytes) else orjson.dumps(event), moment)
    return answer


def text(value: str, **extra: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": None, **extra}]}


def delta(finish_reason: str | None = None, index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish_reason}]}


def usage(number: int, **extra: Any) -> dict[str, Any]:
    return {"prompt_tokens": 5, "completion_tokens": number, **extra}


def test_a_role_alone_and_empty_texts_are_no_content() -> None:
    answer = take(
        delta(role="assistant", content=""),
        delta(content=None),
        delta(content="a"),
        delta(content=""),
        text("b"),
        text(""),
    )
    assert answer.moments_ns == [2, 4]
    assert answer.text_parts == ["a", "b"]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "content": None},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_thoughts_and_tool_calls_are_content(fields: dict[str, Any]) -> None:
    assert take(delta(**fields)).moments_ns == [0]


def test_thoughts_are_text_but_not_history() -> None:
    answer = take(delta(reasoning_content="hm"), delta(content="yes"))
    assert answer.text_parts == ["hm", "yes"]
    assert answer.content_parts == ["yes"]


def test_text_is_kept_only_if_asked() -> None:
    answer = take(text("a"), keep_text=False)
    assert answer.moments_ns == [0]
    assert answer.text_parts == []


def test_whole_with_done_or_finish_reason_and_not_without() -> None:
    assert not take(text("a")).is_whole
    assert take(text("a"), b"[DONE]").is_whole
    assert take(text("a"), text("", finish_reason="stop")).is_whole
    assert take(text("a"), text("", finish_reason="stop")).finish_reason == "stop"
    assert not take().is_whole


def test_every_choice_must_finish() -> None:
    first = [delta(content="a"), delta(content="b", index=1), delta("stop", index=1)]
    assert not take(*first).is_whole
    answer = take(*first, delta("length"))
    assert answer.is_whole
    assert answer.finish_reason == "length"
    assert answer.moments_ns == [0, 1]


def test_usage_and_timings_of_the_last_chunk() -> None:
    last = {
        "choices": [],
        "usage": usage(2, prompt_tokens_details={"cached_tokens": 3}),
        "timings": {"queue_ms": 1.5},
    }
    answer = take(text("a") | {"usage": None}, last)
    assert answer.usage == last["usage"]
    assert answer.timings == {"queue_ms": 1.5}
    assert answer.chunk_tokens == []


def test_tokens_of_chunks_from_continuous_usage() -> None:
    answer = take(
        delta(role="assistant", content="") | {"usage": usage(0)},
        delta(content="a") | {"usage": usage(1)},
        delta(content="") | {"usage": usage(2)},  # text held back
        delta(content="bcd") | {"usage": usage(5)},
        {"choices": [], "usage": usage(5)},
    )
    assert answer.chunk_tokens == [1, 4]


def test_tokens_of_chunks_from_token_ids() -> None:
    answer = take(
        text("a", token_ids=[7]),
        text("", token_ids=[8]),
        text("bc", token_ids=[9, 10]),
        {"choices": [], "usage": usage(4)},
    )
    assert answer.chunk_tokens == [1, 3]


def test_tokens_of_chunks_are_told_for_all_or_for_none() -> None:
    assert take(text("a") | {"usage": usage(1)}, text("b")).chunk_tokens == []


def test_continuous_usage_of_several_choices_says_nothing_about_chunks() -> None:
    answer = take(delta(content="a") | {"usage": usage(1)}, delta(content="b", index=1) | {"usage": usage(1)})
    assert answer.chunk_tokens == []


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"error": {"message": "worker lost", "type": "server_error"}}, "worker lost"),
        ({"error": {"code": 7}}, "{'code': 7}"),
        ({"error": "overloaded", "error_type": "x"}, "overloaded"),
        ({"object": "error", "message": "too long"}, "too long"),
        ({"detail": "Not Found"}, "Not Found"),
    ],
)
def test_error_events(event: dict[str, Any], message: str) -> None:
    answer = take(text("a"), event)
    assert answer.error == message
    assert answer.is_over
    assert not answer.is_whole


@pytest.mark.parametrize("event", [{"type": "ping"}, {"error": None}, {"choices": [], "usage": None}])
def test_other_events_change_nothing(event: dict[str, Any]) -> None:
    answer = take(event)
    assert answer.error is None
    assert answer.moments_ns == []


@pytest.mark.parametrize("data", [b"{", b"nonsense", b""])
def test_what_is_not_json_is_an_error_that_quotes_it(data: bytes) -> None:
    answer = take(data)
    assert answer.error is not None
    assert "not JSON" in answer.error
    assert data.decode() in answer.error


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"3",
        b'{"choices":3}',
        b'{"choices":[3]}',
        b'{"choices":[{"delta":"x"}]}',
        b'{"choices":[{"text":"a"}],"usage":{"x":1}}',
    ],
)
def test_what_is_no_chunk_is_an_error(data: bytes) -> None:
    answer = take(data)
    assert answer.error is not None
    assert "not a completion chunk" in answer.error


def test_an_answer_that_was_not_streamed_is_one_chunk() -> None:
    answer = Answer(True)
    choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
    answer.take_whole(orjson.dumps({"choices": [choice], "usage": usage(3)}), 9)
    assert answer.moments_ns == [9]
    assert answer.is_whole
    assert answer.chunk_tokens == [3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"no\\nkey"}}', "no key"),
        (b'{"object":"error","message":"flat"}', "flat"),
        (b'{"message":"plain"}', "plain"),
        (b'{"detail":[{"msg":"x"}]}', "[{'msg': 'x'}]"),
        (b"<html>\n Bad Gateway </html>", "<html> Bad Gateway </html>"),
        (b"[1]", "[1]"),
        (b"", "no reason given"),
        (b"x" * 1000, "x" * 300 + "…"),
        (b"\xff", "\ufffd"),
    ],
)
def test_refusals_in_one_line(body: bytes, message: str) -> None:
    assert body_error(body) == message
