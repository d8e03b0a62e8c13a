from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.client.answer import Answer
from bench.load.client.flight import Flight
from bench.load.client.frames import Job
from bench.load.client.http_stream import ResponseStream
from bench.load.client.offering import Due
from bench.load.client.replies import MAX_COUNT, body_error
from bench.load.records import RequestRecord, Status


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
        {"function_call": {"name": "f", "arguments": ""}},
        {"refusal": "no"},
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
    assert (answer.input_tokens, answer.cached_tokens, answer.output_tokens) == (5, 3, 2)
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
        (text("", finish_reason="error") | {"error": {"message": "worker lost"}}, "worker lost"),
        (text("", finish_reason="error"), "the server ended it with finish_reason `error`"),
        (text("", finish_reason="abort"), "the server ended it with finish_reason `abort`"),
        (text("", finish_reason="error", error={"message": "upstream"}), "upstream"),
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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"message":"boom","code":500}', "boom"),
        (b'{"type":"error","error":{"message":"overloaded"}}', "overloaded"),
        (b"Internal\nServer Error", "Internal Server Error"),
        (b"", "no reason given"),
        (b"[DONE]", "[DONE]"),
    ],
)
def test_an_event_named_error_is_one_whatever_it_says(data: bytes, message: str) -> None:
    answer = Answer(True)
    answer.take_event(data, 0, is_error=True)
    assert answer.error == message
    assert not answer.is_whole


def test_white_space_is_no_event_and_does_not_hide_the_end() -> None:
    assert take(b"", b" \r", b"  [DONE] ").is_whole


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[{"index":0,"text":"\xff\xfe","finish_reason":"stop"}]}',
        b'{"choices":[{"index":0,"text":"\\ud83d","finish_reason":"stop"}]}',
        b'{"choices":[{"index":0,"text":"a","finish_reason":"stop","logprobs":[-Infinity,NaN]}]}',
        b'\xef\xbb\xbf{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}',
    ],
)
def test_what_is_odd_where_no_figure_comes_from_is_read(data: bytes) -> None:
    for answer in (Answer(True), Answer(True)):
        answer.take_event(data, 0)
        assert answer.is_whole
        assert len(answer.moments_ns) == 1
        "".join(answer.text_parts).encode()  # no half of a surrogate pair is left


@pytest.mark.parametrize("data", [b"{", b"nonsense", b"[" * 200_000])
def test_what_is_not_json_is_an_error_that_quotes_it(data: bytes) -> None:
    answer = take(data)
    assert answer.error is not None
    assert "not JSON" in answer.error
    assert data.decode()[:100] in answer.error


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"3",
        b'{"choices":3}',
        b'{"choices":[3]}',
        b'{"choices":[{"delta":"x"}]}',
        b'{"choices":[{"text":5}]}',
        b'{"choices":[{"delta":{"content":[{"type":"text","text":"a"}]}}]}',
        b'{"choices":[{"delta":{"reasoning":{"a":1}}}]}',
        b'{"choices":[{"index":null,"text":"a"},{"index":0,"text":"b"}]}',
        b'{"choices":[{"index":true,"text":"a"}]}',
        b'{"choices":[{"text":"a","finish_reason":{"type":"length"}}]}',
        b'{"choices":[{"text":"a","finish_reason":3}]}',
        b'{"choices":[{"text":"a","token_ids":3}]}',
        b'{"choices":[],"usage":"lots"}',
        b'{"choices":[],"usage":[1]}',
        b'{"choices":[],"usage":{"prompt_tokens_details":[3]}}',
        b'{"choices":[],"timings":[1,2]}',
        b'{"choices":[],"timings":"fast"}',
    ],
)
def test_what_is_no_chunk_is_an_error(data: bytes) -> None:
    answer = take(data)
    assert answer.error is not None
    assert "not a completion chunk" in answer.error
    assert "\n" not in answer.error


@pytest.mark.parametrize("count", [True, "4", -4, 4.5, MAX_COUNT + 1, 2**64 - 1, 1e300, [4], {}])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_a_count_that_cannot_be_one_is_an_error_that_names_it(name: str, count: Any) -> None:
    answer = take(text("a"), {"choices": [], "usage": {name: count}})
    assert answer.error is not None
    assert f"`{name}` is " in answer.error
    assert "no number of tokens" in answer.error


@pytest.mark.parametrize(("count", "number"), [(0, 0), (4.0, 4), (MAX_COUNT, MAX_COUNT), (None, None)])
def test_counts(count: Any, number: int | None) -> None:
    answer = take(text("a"), {"choices": [], "usage": {"completion_tokens": count}})
    assert answer.error is None
    assert answer.output_tokens == number


@pytest.mark.parametrize(
    "partial", [{}, {"prompt_tokens": 5}, {"prompt_tokens": 5, "completion_tokens": None}]
)
def test_a_usage_that_leaves_something_out_takes_nothing_back(partial: dict[str, Any]) -> None:
    answer = take(text("a") | {"usage": usage(1)}, text("b") | {"usage": partial})
    assert answer.error is None
    assert (answer.input_tokens, answer.output_tokens) == (5, 1)
    assert answer.chunk_tokens == []


def test_a_count_that_shrinks_says_nothing_about_chunks() -> None:
    answer = take(text("a") | {"usage": usage(3)}, text("b") | {"usage": usage(1)})
    assert answer.chunk_tokens == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def some(names: list[str], **shapes: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with some of these fields, each of its shape or of any."""
    return st.fixed_dictionaries({}, optional={name: shapes.get(name, JSON) | JSON for name in names})


DELTAS = some(["content", "reasoning", "refusal", "tool_calls", "function_call"], content=st.text(max_size=2))
CHOICES = some(["index", "text", "delta", "message", "finish_reason", "token_ids"], delta=DELTAS)
USAGES = some(["prompt_tokens", "completion_tokens", "prompt_tokens_details"])
EVENTS = some(["choices", "usage", "timings", "error"], choices=st.lists(CHOICES, max_size=2), usage=USAGES)


@given(st.lists(EVENTS, max_size=3), st.booleans())
def test_whatever_the_fields_are_the_record_can_be_told_to_the_parent(
    events: list[Any], is_stream: bool
) -> None:
    """The record's types are what the parent decodes: one it cannot read would cost a whole process."""
    job = Job(0, 0.0, b"{}")
    stream = ResponseStream(keep_text=True)
    for event in events:
        data = msgspec.json.encode(event)
        if is_stream:
            stream.answer.take_event(data, 1)
        else:
            stream.answer.take_whole(data, 1)
    flight = Flight(Due(0.0, job), b"", stream, started_ns=0, last_ns=0)
    record = flight.record(Status.OK, stream.answer.error, 2, start_ns=0, process=0, keep_text=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=RequestRecord) == record
    "".join(stream.answer.content_parts)


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
