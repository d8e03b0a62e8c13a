"""The description is true: what is taken it allows, what is refused it forbids, answers are as it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.limits import GatewayLimits, RequestLimits
from router.openapi import describe
from router.schema import ChatRequest, CompletionRequest
from tests.support.byte_tokenizer import VOCAB_SIZE
from tests.support.field_cases import BASE, CHAT_ONLY, ROUTES, SHARED, TEXT_ONLY, TOOL
from tests.support.gateway import MAX_MODEL_LEN, MODEL, RunningGateway, running_gateway
from tests.support.scripted_cluster import Script
from tests.support.tools import ADD, CALL

jsonschema: Any = pytest.importorskip("jsonschema")

# What the description cannot say: it depends on the model, on other fields, or on what llguidance makes of
# it; and JSON Schema counts 1.0 among the integers.
BEYOND: dict[str, list[Any]] = {
    "stop_token_ids": [[VOCAB_SIZE]],
    "allowed_token_ids": [[VOCAB_SIZE]],
    "max_tokens": [0],
    "min_tokens": [17],
    "length_penalty": [0.5],
    "early_stopping": [True],
    "truncate_prompt_tokens": [0, MAX_MODEL_LEN + 1],
    "chat_template": ["{{ ''.__class__ }}"],
    "chat_template_kwargs": [{"tokenize": True}, {"messages": []}],
    "n": [1.0],
    "top_logprobs": [5],
    "tool_choice": ["auto", "required"],
    "tools": [[TOOL, TOOL]],
    "guided_json": ["{"],
    "guided_regex": ["(["],
    "guided_grammar": ["root ::= (", "start: b"],
    "structured_outputs": [{"json": {}, "regex": "a"}, {"choice": []}, {"json_object": False}],
    "prompt": ["", [""], ["a", ""], [VOCAB_SIZE]],
}


@pytest.fixture
def document(gateway: RunningGateway) -> dict[str, Any]:
    response = gateway.client.get("/openapi.json")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()
    return body


def body_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def answer_of(document: dict[str, Any], path: str, method: str, status: str = "200") -> dict[str, Any]:
    content = document["paths"][path][method]["responses"][status]["content"]
    return {**content["application/json"]["schema"], "components": document["components"]}


def tables(route: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    yield from SHARED
    yield from CHAT_ONLY if "chat" in route else TEXT_ONLY


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    valid: bool = jsonschema.Draft202012Validator(schema).is_valid(value)
    return valid


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_is_described(document: dict[str, Any], route: str) -> None:
    model = ChatRequest if "chat" in route else CompletionRequest
    properties = body_of(document, route)["properties"]
    assert set(properties) == set(model.model_fields)
    for name, shape in properties.items():
        assert shape, name
        if name not in ("messages", "prompt"):
            assert is_valid({"type": "object", "properties": properties}, {name: None}), f"{name}: null"


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_taken_is_allowed(document: dict[str, Any], route: str) -> None:
    schema = body_of(document, route)
    for name, good, _ in tables(route):
        for value in good:
            assert is_valid(schema, {**BASE[route], name: value}), (name, value)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_refused_is_forbidden(document: dict[str, Any], route: str) -> None:
    """As far as a description can say it; what it does not mention at all is not its business."""
    schema = body_of(document, route)
    allowed = {
        (name, repr(value))
        for name, _, bad in tables(route)
        for value in bad
        if name in schema["properties"] and is_valid(schema, {**BASE[route], name: value})
    }
    assert allowed <= {(name, repr(value)) for name, values in BEYOND.items() for value in values}


def test_limits_are_the_operators() -> None:
    schema = body_of(describe("x", RequestLimits(max_n=3, max_tools=1, max_logprobs=2)), ROUTES[0])
    base = BASE[ROUTES[0]]
    assert is_valid(schema, {**base, "n": 3, "top_logprobs": 2, "tools": [ADD]})
    for fields in ({"n": 4}, {"top_logprobs": 3}, {"tools": [ADD, ADD]}):
        assert not is_valid(schema, {**base, **fields})


def test_every_limit_is_described(tokenizer_dir: Path) -> None:
    """What is just within it is allowed and taken; one more is forbidden and refused."""
    limits = RequestLimits(
        max_fields=6,
        max_prompts=3,
        max_stop_strings=2,
        max_stop_chars=3,
        max_bad_words_chars=4,
        max_listed_ids=2,
        max_session_chars=5,
        max_grammar_bytes=8,
    )
    with running_gateway(tokenizer_dir, limits=GatewayLimits(request=limits)) as gateway:
        schema = body_of(describe("x", limits), "/v1/completions")
        cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"prompt": ["a"] * 3}, {"prompt": ["a"] * 4}),
            ({"prompt": [[1]] * 3}, {"prompt": [[1]] * 4}),
            ({"prompt": [1] * 9}, {"prompt": ["a"] * 9}),
            ({"stop": ["abc", "b"]}, {"stop": ["abcd", "b"]}),
            ({"stop": "abc"}, {"stop": "abcd"}),
            ({"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}),
            ({"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2, 3]}),
            ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": [1, 2, 3]}),
            ({"logit_bias": {"1": 1, "2": 2}}, {"logit_bias": {"1": 1, "2": 2, "3": 3}}),
            ({"bad_words": ["abcd"]}, {"bad_words": ["abcde"]}),
            ({"bad_words": ["a", "b"]}, {"bad_words": ["a", "b", "c"]}),
            ({"session_id": "é" * 5}, {"session_id": "é" * 6}),
            ({"prompt_cache_key": "x" * 5}, {"prompt_cache_key": "x" * 6}),
            ({"user": "x" * 5}, {"user": "x" * 6}),
            ({"guided_regex": "a{1,3}"}, {"guided_regex": "a" * 9}),
            ({f"x{index}": 1 for index in range(5)}, {f"x{index}": 1 for index in range(6)}),
        ]
        for within, beyond in cases:
            assert is_valid(schema, {"prompt": "Hi", **within}), within
            assert gateway.complete(**within).status_code == 200, within
            assert not is_valid(schema, {"prompt": "Hi", **beyond}), beyond
            assert gateway.complete(**beyond).status_code == 400, beyond


def test_answers_are_as_described(gateway: RunningGateway, document: dict[str, Any]) -> None:
    def check(path: str, method: str, response: Any, described_as: str | None = None) -> None:
        status = "200" if response.status_code == 200 else "default"
        schema = answer_of(document, described_as or path, method, status)
        jsonschema.validate(response.json(), schema, jsonschema.Draft202012Validator)

    text, chat = "/v1/completions", "/v1/chat/completions"
    check(text, "post", gateway.complete(logprobs=2, n=2, best_of=3))
    check(chat, "post", gateway.chat(logprobs=True))
    gateway.cluster.script = Script(tuple(CALL.encode()))
    check(chat, "post", gateway.chat(tools=[ADD], max_tokens=200))
    check(chat, "post", gateway.chat(temperature=9))
    check("/tokenize", "post", gateway.post("/tokenize", prompt="Hi", return_token_strs=True))
    check("/tokenize", "post", gateway.post("/tokenize", messages=[{"role": "user", "content": "x"}]))
    check("/detokenize", "post", gateway.post("/detokenize", tokens=[72]))
    check("/detokenize", "post", gateway.post("/detokenize", tokens="x"))
    for path in ("/v1/models", "/health", "/ready", "/ping", "/version", "/openapi.json"):
        check(path, "get", gateway.client.get(path))
    check("/v1/models", "get", gateway.client.get(f"/v1/models/{MODEL}"), "/v1/models/{model}")
    check("/v1/models", "get", gateway.client.get("/v1/models/other"), "/v1/models/{model}")


def test_every_path_is_there(gateway: RunningGateway, document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method in operations:
            response = gateway.client.request(method.upper(), path.replace("{model}", MODEL), json={})
            assert response.status_code not in (404, 405), path
