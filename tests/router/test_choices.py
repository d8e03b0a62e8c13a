"""Several answers in one reply: `n`, `best_of`, lists of prompts, echoes, and scores of prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.errors import Overloaded, WorkerLost
from cluster.request import RequestSpec
from router.limits import GatewayLimits, RequestLimits
from tests.support.byte_tokenizer import BOS, EOS, write_byte_tokenizer
from tests.support.gateway import LIMIT_S, RunningGateway, check_error, running_gateway
from tests.support.scripted_cluster import Script
from tests.support.sse import CHAT, TEXT, check_choices, check_error_stream, check_stream, strict_json

WORDS = (b"one", b"twentytwo", b"three!")
LONG = "x" * 100  # long enough that further answers wait until it is computed


def by_index(spec: RequestSpec) -> Script:
    """What answer `i` of a reply says; a single answer is the first."""
    index = spec.request.rpartition("-")[2]
    return Script(WORDS[int(index) % len(WORDS)] if index.isdigit() else WORDS[0], delay_s=0.001)


@pytest.mark.parametrize("prompt", ["Hi", LONG])
@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_b020_several_choices(gateway: RunningGateway, kind: str, prompt: str) -> None:
    gateway.cluster.script = by_index
    messages = [{"role": "user", "content": prompt}]
    send = gateway.chat if kind == CHAT else gateway.complete
    fields: dict[str, Any] = {"n": 3, "temperature": 1, "max_tokens": 100}
    fields |= {"messages": messages} if kind == CHAT else {"prompt": prompt}
    raw = send(**fields, stream=True, stream_options={"include_usage": True}).content
    streamed = check_choices(raw, 3, kind=kind, include_usage=True)
    body = send(**fields).json()
    texts = [word.decode() for word in WORDS]
    assert [stream.text for stream in streamed] == texts
    shown = [c["message"]["content"] if kind == CHAT else c["text"] for c in body["choices"]]
    assert shown == texts
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    assert streamed[0].usage == body["usage"]
    num_prompt = len(gateway.cluster.streams[0].spec.token_ids)
    assert body["usage"]["prompt_tokens"] == num_prompt  # counted once
    assert body["usage"]["completion_tokens"] == sum(len(word) + 1 for word in WORDS)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_b020_bad_numbers_close_the_stream(gateway: RunningGateway) -> None:
    for n in (0, -1, 17):
        check_error(gateway.chat(n=n, stream=True), 400, param="n")
    check_error(gateway.complete(prompt=["a"] * 100, n=3), 400, param="n")
    gateway.check_alive()


def test_b022_seeds_of_choices(gateway: RunningGateway) -> None:
    """One seed gives different answers, the same ones each time, the first of them as if it were alone."""
    for _ in range(2):
        assert gateway.complete(n=3, seed=42, temperature=1).status_code == 200
    assert gateway.complete(seed=42, temperature=1).status_code == 200
    seeds = [stream.spec.sampling.seed for stream in gateway.cluster.streams]
    assert seeds[:3] == seeds[3:6]
    assert len(set(seeds[:3])) == 3
    assert seeds[6] == seeds[0] == 42
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_further_answers_wait_for_a_long_prompt(gateway: RunningGateway) -> None:
    """So that it is computed once: they are submitted when the first one has its first token."""
    order: list[tuple[str, int]] = []

    def script(spec: RequestSpec) -> Script:
        order.append((spec.request.rpartition("-")[2], sum(s.num_delivered for s in gateway.cluster.streams)))
        return Script(b"ab", first_delay_s=0.05 if not order[1:] else 0.0)

    gateway.cluster.script = script
    assert gateway.complete(prompt=LONG, n=3).status_code == 200
    assert [index for index, _ in order] == ["0", "1", "2"]
    assert order[0][1] == 0
    assert all(num_tokens > 0 for _, num_tokens in order[1:])
    order.clear()
    assert gateway.complete(prompt="short", n=3).status_code == 200
    specs = [stream.spec for stream in gateway.cluster.streams[-3:]]
    assert len({spec.token_ids for spec in specs}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hi", LONG])
def test_one_failing_choice_ends_all(gateway: RunningGateway, prompt: str, stream: bool) -> None:
    def script(spec: RequestSpec) -> Script:
        if spec.request.endswith("-1"):
            return Script(fail_after=1, error=WorkerLost("gone"), first_delay_s=0.05)
        return Script(hang_after=2)

    gateway.cluster.script = script
    response = gateway.complete(prompt=prompt, n=3, stream=stream)
    if stream:
        assert check_error_stream(response.content)[1]["code"] == "worker_lost"
    else:
        check_error(response, 502, code="worker_lost")
    assert all(item.ended.wait(LIMIT_S) for item in gateway.cluster.streams)
    gateway.cluster.script = Script()
    gateway.check_alive()
    gateway.until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_choice_fails_and_the_others_never_start(gateway: RunningGateway, stream: bool) -> None:
    gateway.cluster.script = Script(fail_after=0, error=Overloaded("No.", retry_after_s=2))
    check_error(gateway.complete(prompt=LONG, n=3, stream=stream), 503, code="overloaded")
    assert len(gateway.cluster.streams) == 1


def test_a_later_choice_is_refused(gateway: RunningGateway) -> None:
    def script(spec: RequestSpec) -> Script:
        if spec.request.endswith("-2"):
            raise Overloaded("No worker can take it.", retry_after_s=1)
        return Script(hang_after=1)

    gateway.cluster.script = script
    check_error(gateway.complete(prompt=LONG, n=3), 503, code="overloaded")
    assert all(item.ended.wait(LIMIT_S) and item.aborted for item in gateway.cluster.streams)


@pytest.mark.parametrize("prompts", [["a", "bb", "ccc"], [[97], [98, 98], [99, 99, 99]]])
def test_lists_of_prompts(gateway: RunningGateway, prompts: list[Any]) -> None:
    """Choices in order of prompts, each with as many as `n`; streamed and not the same."""
    gateway.cluster.script = lambda spec: Script(bytes(spec.token_ids) + b"!")
    fields = {"prompt": prompts, "n": 2, "return_token_ids": True}
    raw = gateway.complete(**fields, stream=True, stream_options={"include_usage": True}).content
    streamed = check_choices(raw, 6, kind=TEXT, include_usage=True)
    body = gateway.complete(**fields).json()
    texts = [text for word in ("a!", "bb!", "ccc!") for text in (word, word)]
    assert [stream.text for stream in streamed] == [choice["text"] for choice in body["choices"]] == texts
    assert [stream.token_ids for stream in streamed] == [c["token_ids"] for c in body["choices"]]
    assert [stream.prompt_token_ids for stream in streamed] == [
        choice["prompt_token_ids"] for choice in body["choices"]
    ]
    assert streamed[0].usage == body["usage"]
    assert body["usage"]["prompt_tokens"] == 1 + 2 + 3
    assert body["usage"]["completion_tokens"] == 2 * (3 + 4 + 5)


def test_continuous_usage_and_timings_of_several_choices(gateway: RunningGateway) -> None:
    gateway.cluster.script = by_index
    options = {"include_usage": True, "continuous_usage_stats": True}
    raw = gateway.complete(n=3, stream=True, stream_options=options, timings=True).content
    results = check_choices(raw, 3, kind=TEXT, include_usage=True)
    assert all(result.timings is not None for result in results)
    chunks = results[0].chunks
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert sum("timings" in chunk for chunk in chunks) == 3
    body = gateway.complete(n=3, timings=True).json()
    assert all(choice["timings"]["decode_worker"] == "decode-0" for choice in body["choices"])


# ---- best_of -------------------------------------------------------------------------------------


def test_best_of_takes_the_most_probable(gateway: RunningGateway) -> None:
    scores = {"0": -0.5, "1": -0.1, "2": -3.0, "3": -0.2}

    def script(spec: RequestSpec) -> Script:
        index = spec.request.rpartition("-")[2]
        return Script(f"answer {index}".encode(), logprob=lambda at, token_id: scores[index])

    gateway.cluster.script = script
    body = gateway.complete(n=2, best_of=4).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "answer 1"),
        (1, "answer 3"),
    ]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 4 * 9  # all that was generated
    check_error(gateway.complete(n=2, best_of=1), 400, param="best_of")
    check_error(gateway.complete(best_of=2, stream=True), 400, param="best_of")
    check_error(gateway.complete(best_of=17), 400, param="best_of")


# ---- echo and the prompt's own log-probabilities -------------------------------------------------


def columns_of(body: dict[str, Any]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = body["choices"][0]["logprobs"]
    return columns


def test_b010_a_prompt_is_scored(gateway: RunningGateway) -> None:
    """The way harnesses ask for the likelihood of a text: no token is asked for, or paid."""
    body = gateway.complete(prompt="a b c", max_tokens=0, echo=True, logprobs=1).json()
    [choice] = body["choices"]
    assert choice["text"] == "a b c"
    assert choice["finish_reason"] == "length"
    assert body["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": 5,
        "completion_tokens": 0,
        "total_tokens": 5,
        "prompt_tokens_details": 0,
    }
    columns = columns_of(body)
    assert {len(column) for column in columns.values()} == {5}
    assert columns["tokens"] == list("a b c")
    assert columns["token_logprobs"][0] is None
    assert columns["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in columns["token_logprobs"][1:])
    sampling = gateway.cluster.streams[0].spec.sampling
    assert (sampling.max_tokens, sampling.prompt_logprobs) == (1, 1)
    raw = gateway.complete(prompt="a b c", max_tokens=0, echo=True, logprobs=1, stream=True).content
    stream = check_stream(raw, kind=TEXT)
    assert (stream.text, stream.logprobs) == ("a b c", columns)
    gateway.check_alive()


@pytest.mark.parametrize("per_delivery", [1, 3])
def test_b017_offsets_with_echo(gateway: RunningGateway, per_delivery: int) -> None:
    gateway.cluster.script = Script("é 漢!".encode(), per_delivery=per_delivery)
    fields = {"prompt": "Hé 漢 x", "echo": True, "logprobs": 1, "max_tokens": 50}
    body = gateway.complete(**fields).json()
    stream = check_stream(gateway.complete(**fields, stream=True).content, kind=TEXT)
    text = body["choices"][0]["text"]
    assert stream.text == text == "Hé 漢 xé 漢!"
    assert stream.logprobs == columns_of(body)
    columns = columns_of(body)
    assert len(columns["tokens"]) == len("Hé 漢 xé 漢!".encode()) + 1  # and the end of text
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        whole_character = not token.startswith("bytes:") and token != "<|eos|>"
        assert not whole_character or text[offset:].startswith(token)
    assert columns["text_offset"] == sorted(columns["text_offset"])


def test_echo_without_logprobs_scores_nothing(gateway: RunningGateway) -> None:
    body = gateway.complete(prompt=["a", "b"], echo=True, n=2).json()
    assert [choice["text"][0] for choice in body["choices"]] == ["a", "a", "b", "b"]
    assert all(stream.spec.sampling.prompt_logprobs is None for stream in gateway.cluster.streams)
    results = check_choices(
        gateway.complete(prompt=["a", "b"], echo=True, n=2, stream=True).content, 4, kind=TEXT
    )
    assert [result.text for result in results] == [choice["text"] for choice in body["choices"]]


def test_echo_with_several_choices_scores_the_prompt_once(gateway: RunningGateway) -> None:
    fields = {"prompt": "abc", "echo": True, "logprobs": 2, "n": 3}
    body = gateway.complete(**fields).json()
    asked = [stream.spec.sampling.prompt_logprobs for stream in gateway.cluster.streams]
    assert asked == [2, None, None]
    first, *others = (choice["logprobs"] for choice in body["choices"])
    assert all(other == first for other in others)
    results = check_choices(gateway.complete(**fields, stream=True).content, 3, kind=TEXT)
    assert all(result.logprobs == first for result in results)


def test_echo_in_a_chat_is_of_the_message_that_goes_on(gateway: RunningGateway) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    gateway.cluster.script = Script(b"hello")
    fields = {"messages": messages, "continue_final_message": True, "echo": True}
    for _ in range(2):
        assert gateway.chat(**fields).json()["choices"][0]["message"]["content"] == "Well, hello"
    assert check_stream(gateway.chat(**fields, stream=True).content).text == "Well, hello"
    fields = {"messages": messages[:1], "echo": True}
    assert gateway.chat(**fields).json()["choices"][0]["message"]["content"] == "hello"


def test_echo_with_bos_shows_no_special_token(tmp_path: Any) -> None:
    with running_gateway(write_byte_tokenizer(tmp_path, add_bos=True)) as gateway:
        gateway.cluster.script = Script(b"!")
        body = gateway.complete(prompt="ab", echo=True, logprobs=0, max_tokens=5).json()
        assert body["choices"][0]["text"] == "ab!"
        columns = columns_of(body)
        assert gateway.cluster.streams[0].spec.token_ids == (BOS, *b"ab")
        assert columns["tokens"] == ["<|bos|>", "a", "b", "!", "<|eos|>"]
        assert columns["text_offset"] == [0, 0, 1, 2, 3]
        assert columns["top_logprobs"] is None


@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_prompt_logprobs(gateway: RunningGateway, kind: str) -> None:
    send = gateway.chat if kind == CHAT else gateway.complete
    body = send(prompt_logprobs=2, max_tokens=2).json()
    where = body if kind == CHAT else body["choices"][0]
    prompt_ids = gateway.cluster.streams[0].spec.token_ids
    entries = where["prompt_logprobs"]
    assert len(entries) == len(prompt_ids)
    assert entries[0] is None
    for token_id, entry in zip(prompt_ids[1:], entries[1:], strict=True):
        assert set(entry) == {str(token_id), str(token_id + 1)}
        assert [entry[str(token_id + step)]["rank"] for step in (0, 1)] == [1, 2]
        assert isinstance(entry[str(token_id)]["decoded_token"], str)
    body = send(prompt_logprobs=0, max_tokens=2).json()
    entries = (body if kind == CHAT else body["choices"][0])["prompt_logprobs"]
    assert all([one["rank"] for one in entry.values()] == [1] for entry in entries[1:])
    check_error(send(prompt_logprobs=2, stream=True), 400, param="prompt_logprobs")
    check_error(send(prompt_logprobs=21), 400, param="prompt_logprobs")


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_b015_scores_of_a_prompt_are_finite(gateway: RunningGateway, value: float) -> None:
    gateway.cluster.script = Script(b"abc", logprob=lambda index, token_id: value)
    fields = {"temperature": 1, "top_k": 1, "echo": True, "logprobs": 5, "prompt_logprobs": 5}
    strict_json(gateway.complete(**fields).content)
    assert b"NaN" not in json.dumps(gateway.complete(**fields).json()).encode()


def test_b157_scores_of_a_long_prompt_are_bounded(tokenizer_dir: Any) -> None:
    limits = GatewayLimits(request=RequestLimits(max_prompt_logprobs=100))
    with running_gateway(tokenizer_dir, limits=limits) as gateway:
        fields = {"echo": True, "logprobs": 9, "max_tokens": 0}
        assert gateway.complete(prompt=[1] * 10, **fields).status_code == 200
        message = check_error(gateway.complete(prompt=[1] * 11, **fields), 400, param="prompt")
        assert "11 prompt tokens with 9 alternatives" in message
        gateway.check_alive()


def test_a_token_that_could_not_be_chosen_is_an_error(gateway: RunningGateway) -> None:
    """A worker whose grammar gave up says so with a token that none is."""
    broken = 2**32 - 1
    gateway.cluster.script = Script((*b'{"a', broken))
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    check_error(gateway.chat(response_format=schema), 400, code="format_too_complex")
    before, error = check_error_stream(gateway.chat(response_format=schema, stream=True).content)
    assert error["code"] == "format_too_complex"
    assert len(before) >= 3
    assert EOS not in gateway.cluster.streams[0].spec.token_ids
    gateway.cluster.script = Script()
    gateway.check_alive()
