"""Text and log-probabilities: streamed and whole replies are the same, whatever the tokens' shape."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.support.byte_tokenizer import EOS, IM_END, THINK
from tests.support.gateway import RunningGateway
from tests.support.scripted_cluster import Script
from tests.support.sse import CHAT, TEXT, Streamed, check_stream

HARD = "ď 漢字 한 👩‍👩‍👧 🇨🇭 e\u0301"


def both(gateway: RunningGateway, script: Script, *, kind: str = CHAT, **fields: Any) -> tuple[Streamed, Any]:
    """The same request streamed and not: (what the stream adds up to, the whole body), held to be equal."""
    gateway.cluster.script = script
    send = gateway.chat if kind == CHAT else gateway.complete
    fields = {"max_tokens": 200, **fields}
    streamed = send(**fields, stream=True, stream_options={"include_usage": True})
    assert streamed.status_code == 200, streamed.text
    stream = check_stream(streamed.content, kind=kind, include_usage=True)
    whole = send(**fields)
    assert whole.status_code == 200, whole.text
    body = whole.json()
    [choice] = body["choices"]
    assert stream.text == (choice["message"]["content"] if kind == CHAT else choice["text"])
    assert stream.finish_reason == choice["finish_reason"]
    assert stream.usage == body["usage"]
    logprobs = choice["logprobs"]
    if kind == CHAT and logprobs is not None:
        logprobs = logprobs["content"]
    assert stream.logprobs == logprobs
    assert stream.token_ids == choice.get("token_ids", [])
    return stream, body


@pytest.mark.parametrize("kind", [CHAT, TEXT])
@pytest.mark.parametrize("per_delivery", [1, 2, 3, 7])
def test_b001_characters_are_never_split(gateway: RunningGateway, kind: str, per_delivery: int) -> None:
    script = Script(tuple(HARD.encode()), per_delivery=per_delivery)
    logprobs: Any = True if kind == CHAT else 0
    stream, _ = both(gateway, script, kind=kind, logprobs=logprobs, return_token_ids=True)
    assert stream.text == HARD
    assert all("\ufffd" not in delta for delta in stream.deltas)
    assert all(delta.encode("utf-8", "strict") for delta in stream.deltas)
    num_tokens = len(HARD.encode()) + 1  # and EOS
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == num_tokens
    assert stream.token_ids == [*HARD.encode(), EOS]
    entries = stream.logprobs if isinstance(stream.logprobs, list) else (stream.logprobs or {})["tokens"]
    assert len(entries) == num_tokens


@pytest.mark.parametrize("kind", [CHAT, TEXT])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_b002_a_cut_character_is_one_replacement(gateway: RunningGateway, kind: str, num_bytes: int) -> None:
    script = Script(tuple(b"ab" + "👩".encode()))
    stream, body = both(gateway, script, kind=kind, max_tokens=2 + num_bytes)
    assert stream.text == "ab\ufffd"
    assert stream.finish_reason == "length"
    assert body["usage"]["completion_tokens"] == 2 + num_bytes


def test_b004_logprobs_of_partial_characters(gateway: RunningGateway) -> None:
    stream, _ = both(gateway, Script(tuple(HARD.encode())), logprobs=True, top_logprobs=3)
    assert isinstance(stream.logprobs, list)
    joined = b"".join(bytes(entry["bytes"] or ()) for entry in stream.logprobs)
    assert joined.decode() == stream.text == HARD
    for entry in stream.logprobs:
        assert len(entry["top_logprobs"]) == 3
        assert entry["token"]
        for alternative in entry["top_logprobs"]:
            assert "\ufffd" not in alternative["token"]
    assert stream.logprobs[0]["token"] == "bytes:\\xc4"
    assert stream.logprobs[-1]["token"] == "<|eos|>"
    assert stream.logprobs[-1]["bytes"] is None  # counted, but no part of the content


@pytest.mark.parametrize("per_delivery", [1, 2, 5])
def test_text_logprob_columns(gateway: RunningGateway, per_delivery: int) -> None:
    script = Script(tuple(b"Hello, world"), per_delivery=per_delivery)
    stream, _ = both(gateway, script, kind=TEXT, logprobs=2, max_tokens=12)
    columns = stream.logprobs
    assert isinstance(columns, dict)
    assert {len(column) for column in columns.values()} == {12}
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert stream.text[offset:].startswith(token)
    assert all(2 <= len(best) <= 3 for best in columns["top_logprobs"])


@pytest.mark.parametrize("kind", [CHAT, TEXT])
@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_b015_logprobs_are_finite(gateway: RunningGateway, kind: str, value: float) -> None:
    script = Script(tuple(b"abc"), logprob=lambda index, token_id: value)
    fields: dict[str, Any] = (
        {"logprobs": True, "top_logprobs": 5}
        if kind == CHAT
        else {"logprobs": 5, "temperature": 1, "top_k": 1}
    )
    both(gateway, script, kind=kind, **fields)  # `check_stream` reads strict JSON


def test_b005_stop_string_over_several_tokens(gateway: RunningGateway) -> None:
    for per_delivery in (1, 3, 50):
        script = Script(tuple(b"DEFGHIJK"), per_delivery=per_delivery)
        stream, body = both(gateway, script, stop=["DEFGHIJ"])
        assert stream.deltas == []
        assert stream.finish_reason == "stop"
        assert body["usage"]["completion_tokens"] == 7
        for item in gateway.cluster.streams:
            assert item.aborted is None
            assert item.finished == (per_delivery == 1)  # else the same delivery had EOS
        stream, _ = both(gateway, Script(tuple(b"DEFGX"), per_delivery=per_delivery), stop=["DEFGHIJ"])
        assert stream.text == "DEFGX"
        gateway.cluster.streams.clear()


def test_b005_held_logprobs_go_with_their_text(gateway: RunningGateway) -> None:
    stream, _ = both(gateway, Script(tuple(b"abDEFGHIJK")), stop=["DEFGHIJ"], logprobs=True)
    before_end = [
        entry["token"]
        for chunk in stream.chunks[:-3]  # last delta, finish, usage
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert before_end == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": ["lo"]}, "Hel"),
        ({"stop": ["lo"], "include_stop_str_in_output": True}, "Hello"),
        ({"stop": "world"}, "Hello, "),
        ({"stop": ["zzz", ","]}, "Hello"),
        ({"stop": ["H"], "min_tokens": 3}, "Hello, world"),
        ({"stop": ["lo"], "min_tokens": 5}, "Hello, world"),  # "l" came too early to count
        ({"stop_token_ids": [ord("l")]}, "He"),
        ({"stop_token_ids": [ord("l")], "include_stop_str_in_output": True}, "Hel"),
        ({"stop": []}, "Hello, world"),
        ({"stop": None}, "Hello, world"),
    ],
)
def test_b007_stop_values(gateway: RunningGateway, fields: dict[str, Any], text: str) -> None:
    for kind, per_delivery in itertools.product((CHAT, TEXT), (1, 4)):
        script = Script(tuple(b"Hello, world"), per_delivery=per_delivery)
        stream, _ = both(gateway, script, kind=kind, **fields)
        assert stream.text == text
        assert stream.finish_reason == "stop"


@pytest.mark.parametrize("kind", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "reason", "num_tokens"),
    [
        ({}, "stop", 4),  # EOS
        ({"stop": ["b"]}, "stop", 2),
        ({"max_tokens": 2}, "length", 2),
        ({"max_tokens": 4}, "stop", 4),  # EOS is the last token allowed
        ({"ignore_eos": True, "max_tokens": 20}, "length", 20),
        ({"max_tokens": 2, "stop": ["b"]}, "stop", 2),  # a stop string on the last token allowed
    ],
)
def test_b024_finish_reasons(
    gateway: RunningGateway, kind: str, fields: dict[str, Any], reason: str, num_tokens: int
) -> None:
    stream, body = both(gateway, Script(tuple(b"abc")), kind=kind, **fields)
    assert stream.finish_reason == reason
    assert body["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_b070_eos_as_first_token(gateway: RunningGateway, kind: str) -> None:
    stream, body = both(gateway, Script(()), kind=kind, logprobs=True if kind == CHAT else 1)
    assert (stream.text, stream.finish_reason) == ("", "stop")
    assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("token_ids", "fields", "text", "num_tokens"),
    [
        (b"xyz", {"stop_token_ids": [ord("x")]}, "", 1),
        (b"xyz", {"stop": ["x"]}, "", 1),
        (b"xyz", {"stop": ["xy"]}, "", 2),  # the first token is the head of a stop string
        (b"xaz", {"stop": ["xy"]}, "xaz", 4),
        ((EOS, *b"ab"), {"ignore_eos": True, "max_tokens": 3}, "ab", 3),
        ((EOS, *b"ab"), {"min_tokens": 3}, "ab", 4),
    ],
)
def test_b072_stop_on_the_first_token(
    gateway: RunningGateway, token_ids: Any, fields: dict[str, Any], text: str, num_tokens: int
) -> None:
    for kind in (CHAT, TEXT):
        stream, body = both(gateway, Script(tuple(token_ids)), kind=kind, **fields)
        assert stream.text == text
        assert body["usage"]["completion_tokens"] == num_tokens


def test_special_tokens_in_the_text(gateway: RunningGateway) -> None:
    script = Script((THINK, ord("a"), IM_END, ord("b")))
    assert both(gateway, script)[0].text == "<think>ab"
    assert both(gateway, script, skip_special_tokens=False)[0].text == "<think>a<|im_end|>b"


@pytest.mark.parametrize("per_delivery", [1, 2, 8])
def test_b019_text_is_the_same_however_it_was_cut(gateway: RunningGateway, per_delivery: int) -> None:
    rng = random.Random(per_delivery)
    alphabet = 'ab é漢👩\n"\\<>&\u2028'
    for _ in range(25):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 30)))
        script = Script(tuple(text.encode()), per_delivery=per_delivery)
        assert both(gateway, script, kind=rng.choice((CHAT, TEXT)))[0].text == text


def test_one_chunk_per_delivery(gateway: RunningGateway) -> None:
    stream, _ = both(gateway, Script(tuple(b"abcdefgh"), per_delivery=4))
    assert stream.deltas == ["abcd", "efgh"]


def test_usage_and_timings(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(tuple(b"abc"))
    timings = {
        "queue_ms": 1.0,
        "prefill_ms": 20.0,
        "kv_transfer_ms": 3.0,
        "decode_ms": 100.0,
        "ttft_ms": 21.0,
        "attempts": 1,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
    }
    for kind, send in ((CHAT, gateway.chat), (TEXT, gateway.complete)):
        body = send(timings=True).json()
        assert body["timings"] == timings
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 4
        for options in (None, {"include_usage": True}):
            raw = send(timings=True, stream=True, stream_options=options).content
            stream = check_stream(raw, kind=kind, include_usage=options is not None)
            assert stream.timings == timings
        assert "timings" not in send().json()


def test_continuous_usage(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(tuple(b"abc"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = check_stream(
        gateway.complete(stream=True, stream_options=options).content, kind=TEXT, include_usage=True
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in stream.chunks] == [1, 2, 3, 4, 4]


def test_token_ids_are_returned(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(tuple(b"abc"))
    stream = check_stream(gateway.complete(stream=True, return_token_ids=True).content, kind=TEXT)
    assert stream.prompt_token_ids == list(b"Hi")
    assert stream.token_ids == [*b"abc", EOS]
    chat = check_stream(gateway.chat(stream=True, return_token_ids=True).content)
    assert chat.prompt_token_ids == gateway.chat(return_token_ids=True).json()["prompt_token_ids"]
    body = gateway.complete(return_token_ids=True).json()
    assert body["choices"][0]["prompt_token_ids"] == list(b"Hi")


def test_several_prompts_are_choices_in_order(gateway: RunningGateway) -> None:
    gateway.cluster.script = lambda spec: Script(
        spec.token_ids[::-1], delay_s=0.01 if len(spec.token_ids) > 2 else 0
    )
    for prompt in (["abc", "de"], [list(b"abc"), list(b"de")]):
        body = gateway.complete(prompt=prompt).json()
        assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "cba"), (1, "ed")]
        assert body["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 7,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
    assert len({stream.spec.request for stream in gateway.cluster.streams}) == 4
