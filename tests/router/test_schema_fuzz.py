"""Whatever a client sends, it gets an answer or an error of the right shape: never a 5xx, never a hang."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.fields import ACCEPTED, INTERNAL, UNSUPPORTED
from router.schema import ChatRequest, CompletionRequest
from tests.support.gateway import RunningGateway, check_error
from tests.support.scripted_cluster import Script
from tests.support.sse import parse_events

NAMES = sorted(
    {*ChatRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED, *ACCEPTED, *INTERNAL}
)
WORDS = st.sampled_from(
    [
        *(
            "a",
            "",
            "é",
            "text",
            "function",
            "json_object",
            "json_schema",
            "auto",
            "required",
            "none",
            "object",
        ),
        *(
            "integer",
            "strin",
            "([",
            "a{1,9}",
            "user",
            "assistant",
            "tool",
            "root ::= 'a'",
            "start: /a/",
            "\x00",
        ),
        *("type", "name", "schema", "content", "role", "choice", "regex", "json", "properties", "$ref", "#"),
    ]
)
NUMBERS = st.one_of(
    st.integers(-3, 40), st.sampled_from([2**31, 2**63, -(2**63), 2**64 - 1, 0.5, 1e308, -0.0, 3.0])
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=10,
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": WORDS}, optional={"parameters": VALUES}),
    }
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "tools": st.lists(TOOL, max_size=3),
    "tool_choice": WORDS | st.fixed_dictionaries({"type": WORDS, "function": VALUES}),
    "response_format": st.fixed_dictionaries(
        {"type": WORDS}, optional={"json_schema": st.fixed_dictionaries({"schema": VALUES})}
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar", "json_object", "structural_tag"]),
        VALUES,
        max_size=2,
    ),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": WORDS}, optional={"content": VALUES, "tool_calls": VALUES, "name": VALUES}
        ),
        max_size=3,
    ),
    "logit_bias": st.dictionaries(st.sampled_from(["0", "5", "-1", "300", "x"]), NUMBERS, max_size=3),
    "stop": WORDS | st.lists(WORDS, max_size=20),
    "prompt": WORDS
    | st.lists(WORDS | NUMBERS, max_size=4)
    | st.lists(st.lists(st.integers(0, 300)), max_size=3),
    "n": st.integers(-1, 20),
}
FIELDS = st.lists(st.sampled_from(NAMES) | WORDS, max_size=5, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: LIKELY.get(name, VALUES) | VALUES for name in names})
)
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}
FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check_answer(gateway: RunningGateway, path: str, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode("utf-8", "surrogatepass")
    response = gateway.client.post(path, content=body, headers={"content-type": "application/json"})
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            parse_events(response.content)
        else:
            response.json()
        return
    assert response.status_code in (400, 404), f"{response.status_code} for {fields}: {response.text}"
    check_error(response, response.status_code)


@pytest.mark.parametrize("path", BASE)
@FUZZ
@given(fields=FIELDS)
def test_no_field_breaks_the_server(gateway: RunningGateway, path: str, fields: dict[str, Any]) -> None:
    gateway.cluster.script = Script(b"ab")
    gateway.cluster.streams.clear()
    check_answer(gateway, path, {**BASE[path], **fields})


@pytest.mark.parametrize("path", BASE)
@FUZZ
@given(body=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_body_breaks_the_server(gateway: RunningGateway, path: str, body: bytes) -> None:
    response = gateway.client.post(path, content=body, headers={"content-type": "application/json"})
    if response.status_code != 200:
        assert response.status_code in (400, 404)
        check_error(response, response.status_code)


@FUZZ
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"]),
    path=st.sampled_from(
        ["/", "/v1", "/v1/chat/completions", "/v1/models/x", "/health", "/%2e", "//", "/v1/é"]
    ),
    headers=st.dictionaries(
        st.sampled_from(
            ["content-type", "accept", "authorization", "x-request-id", "x-session-id", "x-priority"]
        ),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
        max_size=4,
    ),
)
def test_no_request_line_breaks_the_server(
    gateway: RunningGateway, method: str, path: str, headers: dict[str, str]
) -> None:
    response = gateway.client.request(method, path, headers=headers)
    assert response.status_code < 500 or response.status_code == 503
    if response.status_code >= 400:
        check_error(response, response.status_code)
