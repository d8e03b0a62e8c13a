"""Every field of both routes: what is taken, what is refused, and that a refusal names its field."""

from __future__ import annotations

import difflib
import json
from typing import Any

import pytest

from cluster.sampling import SamplingParams
from router.fields import ACCEPTED, MAX_FIELDS
from tests.support.byte_tokenizer import EOS, VOCAB_SIZE
from tests.support.gateway import MAX_MODEL_LEN, RunningGateway, check_error

ROUTES = ("/v1/chat/completions", "/v1/completions")
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}

# field, values taken, values refused; on both routes
SHARED: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 1, 0.7, 2, 2.0], [-0.01, 2.01, "1", True, [1]]),
    ("top_p", [1, 1.0, 0.5, 1e-6], [0, 1.01, -1, "0.5"]),
    ("top_k", [-1, 0, 1, 50], [-2, 1.5, "5", True, 2**31]),
    ("min_p", [0, 1, 0.05], [-0.1, 1.1, "0"]),
    ("presence_penalty", [-2, 2, 0], [-2.01, 2.01, "1"]),
    ("frequency_penalty", [-2, 2, 0.5], [-2.01, 2.01, False]),
    ("repetition_penalty", [1, 1.2, 0.5], [0, -1, "1"]),
    ("seed", [0, 42, -1, 2**63 - 1, -(2**63)], [1.5, "1", True, 2**63, 2**70]),
    ("stop", ["x", [], ["a", "b"], ["s"] * 16], ["", [""], ["a", ""], [1], 5, list("abcdefghijklmnopq")]),
    ("stop_token_ids", [[], [1, 2]], [[-1], [VOCAB_SIZE], ["1"], 1, [1.5]]),
    ("include_stop_str_in_output", [True, False], [1, "true"]),
    ("ignore_eos", [True, False], [0, "no"]),
    ("min_tokens", [0, 3], [-1, 1.5, "2", 17]),
    ("skip_special_tokens", [True, False], ["x"]),
    ("spaces_between_special_tokens", [True, False], ["x"]),
    ("bad_words", [[], ["foo", "bar"]], [[""], "foo", [1]]),
    ("allowed_token_ids", [[1, 2, 3]], [[], [VOCAB_SIZE], [-1], ["1"]]),
    ("truncate_prompt_tokens", [1, 5, -1], [0, -2, MAX_MODEL_LEN + 1, 1.5]),
    ("truncation_side", ["left", "right"], ["middle", 1]),
    ("logit_bias", [{}, {"5": 1, "6": -100.0, "7": 100}], [{"5": 101}, {"5": "1"}, {"x": 1}, {"-1": 1}, [1]]),
    ("stream", [False], ["yes", 1]),
    ("stream_options", [{}, {"include_usage": True}, {"include_usage": None}], ["x", {"include_usage": 1}]),
    ("cache_salt", ["tenant-a"], ["", "a@b", "a/b", "x" * 129, 5]),
    ("return_token_ids", [True, False], ["x"]),
    ("timings", [True, False], ["x", 1]),
    ("max_tokens", [1, 16], [0, -1, 1.5, "5", True, 2**63]),
    ("max_completion_tokens", [1, 16], [0, -1, 1.5, "5", True, 2**63]),
    ("add_special_tokens", [True, False], ["x"]),
    ("n", [1, 2, 16], [0, -1, 17, 1.0, True, "1"]),
    ("prompt_logprobs", [0, 5, 20], [-1, 21, True, "1", 1.5]),
    ("echo", [False, True], ["x", 1]),
    ("priority", [0, 1, -5, 2**63 - 1], ["1", 1.5, True, 2**63]),
    ("response_format", [{"type": "text"}, {"type": "json_object"}], [{"type": "xml"}, "text", {}, 5]),
    ("response_format", [], [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 5}}]),
    ("structured_outputs", [{"choice": ["a"]}, {"regex": "a+"}], [{}, "x", {"json": {}, "regex": "a"}]),
    ("structured_outputs", [{"json_object": True}], [{"colour": 1}, {"choice": []}, {"json_object": False}]),
    ("guided_json", [{"type": "object"}, '{"type": "integer"}'], [5, "{", [1]]),
    ("guided_regex", ["[0-9]+"], ["", 5, "(["]),
    ("guided_choice", [["yes", "no"]], [[], "yes", [1], [""]]),
    ("guided_grammar", ['root ::= "a" | "b"', 'start: "a"'], ["", 5, "root ::= (", "start: b"]),
    ("regex", ["a"], [5]),
    ("ebnf", ['root ::= "a"'], [5]),
    ("json_schema", [{"type": "object"}], [5]),
    ("suffix", [""], ["tail"]),
    ("prompt_embeds", [], ["x"]),
    ("use_beam_search", [False, True], [1, "true"]),
    ("length_penalty", [1, 1.0], [0.5, "1", -11, True]),  # others: with `use_beam_search`
    ("early_stopping", [False], [True, "never"]),
    ("chat_template", [], ["{{ ''.__class__ }}", 5]),
    ("logits_processors", [[]], [["x"]]),
    ("audio", [], [{"voice": "alloy"}]),
    ("functions", [[]], [[{"name": "f"}]]),
    ("function_call", ["none"], ["auto"]),
    ("stop_regex", [], ["x"]),
    # asked for in vain, but taken: the reply says so
    ("modalities", [["text"], ["audio"]], ["text"]),
    ("store", [False, True], ["x"]),
    ("service_tier", ["auto", "default", "flex"], [1]),
    ("verbosity", ["low", "medium"], [1]),
    ("prediction", [{"type": "content", "content": "x"}], ["x"]),
    ("web_search_options", [{}], [5]),
    ("moderation", [{}], [5]),
    ("kv_transfer_params", [], [{"do_remote_decode": True}, {}]),
    ("bootstrap_host", [], ["10.0.0.1"]),
    ("data_parallel_rank", [], [0]),
    ("tp_size", [], [10**9]),
    ("user", ["someone"], [5, ["someone"], {}]),
    ("metadata", [{"a": "b"}], ["x", ["a"], True]),
    ("safety_identifier", ["x"], [1]),
    ("prompt_cache_key", ["x"], [1.5, "x" * 513]),
    ("session_id", ["x"], [7]),
    ("request_id", ["x"], [7]),
    ("include_reasoning", [True, False], ["x"]),
    ("parallel_tool_calls", [True, False], ["yes", 1]),
]
CHAT_ONLY: list[tuple[str, list[Any], list[Any]]] = [
    ("logprobs", [True, False], [1, "true"]),
    ("tools", [[], [TOOL]], [[{"type": "function"}], {}, [5], [TOOL, TOOL], [{**TOOL, "type": "retrieval"}]]),
    ("tool_choice", ["none"], ["auto", "required", {"type": "function"}, 5]),
    ("reasoning_effort", ["none", "low", "medium", "high", "max"], ["lots", 5]),
    ("thinking_token_budget", [0, 100], [-1, "x"]),
    ("documents", [[], [{"title": "t", "text": "x"}]], ["x", [1]]),
    ("prompt", [], ["x"]),
    ("best_of", [1], [2, "1"]),
    ("top_logprobs", [0], [-1, 21, 10**9, VOCAB_SIZE, 1.5, 5]),  # 5: without `logprobs`
    ("add_generation_prompt", [True, False], ["x"]),
    ("continue_final_message", [False], ["x"]),
    ("chat_template_kwargs", [{}, {"enable_thinking": False}], [{"tokenize": True}, {"messages": []}, "x"]),
    ("messages", [], [[], "x", {}, 5, [5], [[]]]),
]
TEXT_ONLY: list[tuple[str, list[Any], list[Any]]] = [
    ("best_of", [1, 3], [0, 17, "1", True]),
    ("tools", [[]], [[TOOL], {}]),
    ("tool_choice", ["none"], ["auto", "required", {"type": "function"}]),
    ("messages", [], [[{"role": "user", "content": "x"}]]),
    ("reasoning_effort", [], ["low"]),
    ("logprobs", [0, 5, 20], [-1, 21, 10**9, VOCAB_SIZE - 1, True, "5", 1.5]),
    ("prompt", ["x", ["a", "b"], [1, 2], [[1], [2, 3]]], ["", [], [""], [[]], ["a", ""], 5, {}, [1, "a"]]),
    ("prompt", [[0, VOCAB_SIZE - 1]], [[VOCAB_SIZE], [-1], [1.5], [True], ["a", 1], [["a"]], [[1], "a"]]),
]

# field, a value that is told of, and one that asks for nothing
WITHOUT_EFFECT: list[tuple[str, Any, Any]] = [
    ("store", True, False),
    ("service_tier", "flex", "default"),
    ("verbosity", "low", "medium"),
    ("modalities", ["audio"], ["text"]),
    ("include_reasoning", False, True),
    ("metadata", {"a": "b"}, {}),
    ("request_id", "mine", None),
    ("safety_identifier", "x", None),
    ("prompt_cache_retention", "24h", None),
    ("prediction", {"type": "content", "content": "x"}, None),
    ("web_search_options", {}, None),
    ("moderation", {}, None),
]


def _cases(accepted: bool) -> list[Any]:
    cases = []
    for routes, table in ((ROUTES, SHARED), (ROUTES[:1], CHAT_ONLY), (ROUTES[1:], TEXT_ONLY)):
        for route in routes:
            for name, good, bad in table:
                for value in good if accepted else bad:
                    cases.append(pytest.param(route, name, value, id=f"{route[4:8]}-{name}-{value!r:.20}"))
    return cases


@pytest.mark.parametrize(("route", "name", "value"), _cases(True))
def test_b029_good_values_are_taken(gateway: RunningGateway, route: str, name: str, value: Any) -> None:
    response = gateway.post(route, **{**BASE[route], name: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("route", "name", "value"), _cases(False))
def test_b029_bad_values_are_refused_by_name(
    gateway: RunningGateway, route: str, name: str, value: Any
) -> None:
    response = gateway.post(route, **{**BASE[route], "max_tokens": 16, name: value})
    check_error(response, 400)
    param = response.json()["error"]["param"]
    assert param == name or param.startswith((f"{name}.", f"{name}[")) or param == "max_tokens", param
    assert not gateway.cluster.streams, "a refused request reached the cluster"


@pytest.mark.parametrize("route", ROUTES)
def test_b029_null_is_omitted(gateway: RunningGateway, route: str) -> None:
    names = {name for name, _, _ in SHARED} - {"messages", "prompt"}
    response = gateway.post(route, **{**BASE[route], **dict.fromkeys(names)})
    assert response.status_code == 200, response.text
    plain = gateway.post(route, **BASE[route])
    with_nulls, without = (stream.spec.sampling for stream in gateway.cluster.streams)
    assert plain.status_code == 200
    assert with_nulls.__class__ is SamplingParams
    assert _but_seed(with_nulls) == _but_seed(without)


def _but_seed(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__ if name != "seed"}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_b029_numbers_that_json_does_not_have(gateway: RunningGateway, route: str, number: str) -> None:
    body = json.dumps({**BASE[route], "temperature": 0}).replace(
        '"temperature": 0', f'"temperature": {number}'
    )
    response = gateway.client.post(route, content=body, headers={"content-type": "application/json"})
    check_error(response, 400, code="invalid_json")


@pytest.mark.parametrize("route", ROUTES)
def test_b029_unknown_fields_are_ignored_and_told(
    gateway: RunningGateway, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        for stream in (False, True):
            response = gateway.post(route, **BASE[route], stream=stream, temprature=1, foo_bar=None)
            assert response.status_code == 200
            assert response.headers["x-baton-ignored"] == "temprature (did you mean temperature?)"
    assert "temprature" not in caplog.text  # the client's own text
    assert sum("did you mean temperature" in record.getMessage() for record in caplog.records) <= 1  # once
    odd = {"\r\nx-evil: 1": 1, "é" * 99: 2, **{f"field_{index}": 1 for index in range(50)}}
    told = gateway.post(route, **BASE[route], **odd).headers["x-baton-ignored"]
    assert "x-evil" not in told
    assert told.count(",") == 7
    assert told.endswith(f" and {len(odd) - 8} more")
    plain = gateway.post(route, **BASE[route], store=False, service_tier="auto", metadata={})
    assert "x-baton-ignored" not in plain.headers


@pytest.mark.parametrize("route", ROUTES)
def test_b029_telling_of_unknown_fields_is_no_work(
    gateway: RunningGateway, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for what was meant takes a fifth of a millisecond, on the event loop: however many fields come,
    it is done for the few that are told."""
    looked_for: list[str] = []

    def look(name: str, *args: Any, **kwargs: Any) -> list[str]:
        looked_for.append(name)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", look)
    many = {f"fresh_{route[4:8]}_{index}": 1 for index in range(MAX_FIELDS - 1)}
    told = gateway.post(route, **BASE[route], **many).headers["x-baton-ignored"]
    assert told.endswith(f" and {len(many) - 8} more")
    assert len(looked_for) == 8
    message = check_error(gateway.post(route, **BASE[route], **many, one_more=1), 400)
    assert str(MAX_FIELDS) in message
    assert len(looked_for) == 8


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("name", "value", "neutral"), WITHOUT_EFFECT)
def test_b029_known_fields_without_effect_are_told(
    gateway: RunningGateway, route: str, name: str, value: Any, neutral: Any
) -> None:
    response = gateway.post(route, **BASE[route], **{name: value})
    assert response.headers["x-baton-ignored"] == name
    assert "x-baton-ignored" not in gateway.post(route, **BASE[route], **{name: neutral}).headers


def test_every_field_without_effect_is_tried() -> None:
    assert {name for name, _, _ in WITHOUT_EFFECT} == set(ACCEPTED)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "name", ["suffix", "stop_regex", "prompt_embeds", "functions", "beam_width", "audio"]
)
def test_unsupported_says_so(gateway: RunningGateway, route: str, name: str) -> None:
    message = check_error(
        gateway.post(route, **BASE[route], **{name: {"x": 1}}), 400, param=name, code="unsupported_parameter"
    )
    assert "not supported" in message


def test_fields_of_the_other_route_say_where_they_belong(gateway: RunningGateway) -> None:
    message = check_error(gateway.complete(tools=[TOOL]), 400, param="tools", code="unsupported_parameter")
    assert "/v1/chat/completions" in message
    message = check_error(gateway.chat(best_of=2), 400, param="best_of", code="unsupported_parameter")
    assert "/v1/completions" in message


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "name", ["kv_transfer_params", "bootstrap_host", "bootstrap_room", "do_remote_decode", "transfer_id"]
)
def test_b164_internal_fields_are_never_taken(gateway: RunningGateway, route: str, name: str) -> None:
    response = gateway.post(route, **BASE[route], **{name: "10.0.0.1:1"})
    message = check_error(response, 400, param=name, code="internal_parameter")
    assert "10.0.0.1" not in message
    assert not gateway.cluster.streams


@pytest.mark.parametrize("route", ROUTES)
def test_b165_a_complaint_names_no_class(gateway: RunningGateway, route: str) -> None:
    for value in ("x", [], 5):
        message = check_error(gateway.post(route, **BASE[route], stream_options=value), 400)
        assert message == "`stream_options` must be an object."


@pytest.mark.parametrize("value", [20, 21, VOCAB_SIZE - 1, VOCAB_SIZE, 10**9, -1])
def test_b157_logprobs_are_capped(gateway: RunningGateway, value: int) -> None:
    chat = gateway.chat(logprobs=True, top_logprobs=value)
    text = gateway.complete(logprobs=value)
    if value == 20:
        assert chat.status_code == text.status_code == 200
    else:
        check_error(chat, 400, param="top_logprobs")
        check_error(text, 400, param="logprobs")


def test_b014_logit_bias(gateway: RunningGateway) -> None:
    assert gateway.chat(logit_bias={str(EOS): 100, "7": -3.5}).status_code == 200
    assert gateway.cluster.streams[0].spec.sampling.logit_bias == ((EOS, 100.0), (7, -3.5))
    check_error(gateway.chat(logit_bias={str(VOCAB_SIZE): 1}), 400, param=f"logit_bias.{VOCAB_SIZE}")
    check_error(gateway.chat(logit_bias={str(i): 1 for i in range(1025)}), 400, param="logit_bias")


def test_every_field_arrives(gateway: RunningGateway) -> None:
    response = gateway.complete(
        max_tokens=9, seed=-7, temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"3": 2}, bad_words=["no"],
        allowed_token_ids=[1, 2, 1], min_tokens=4, stop_token_ids=[5, 5], logprobs=3, cache_salt="s",
    )  # fmt: skip
    assert response.status_code == 200, response.text
    spec = gateway.cluster.streams[0].spec
    assert spec.cache_salt == "s"
    assert spec.sampling == SamplingParams(
        max_tokens=9, seed=-7, temperature=0.5, top_k=0, top_p=0.9, min_p=0.1, presence_penalty=1.0,
        frequency_penalty=-1.0, repetition_penalty=1.5, logit_bias=((3, 2.0),),
        bad_words_ids=(tuple(b"no"),), allowed_token_ids=(1, 2), min_tokens=4,
        eos_token_ids=(EOS,), stop_token_ids=(5,), num_logprobs=3,
    )  # fmt: skip
    assert gateway.complete(ignore_eos=True).status_code == 200
    assert gateway.cluster.streams[1].spec.sampling.eos_token_ids == ()


def test_seed_is_drawn_when_none_came(gateway: RunningGateway) -> None:
    for _ in range(2):
        assert gateway.complete().status_code == 200
    first, second = (stream.spec.sampling.seed for stream in gateway.cluster.streams)
    assert first != second
