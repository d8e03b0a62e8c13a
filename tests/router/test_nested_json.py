"""Values nested as deep as a body can say, at every place that takes one: an answer or a 400, never a 5xx."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from router import nested_json
from tests.support.gateway import RunningGateway, check_error
from tests.support.tools import ADD

DEPTHS = (40, 120, nested_json.MAX_DEPTH - 8, 250, 600, 980, 1000, 1023)


def objects(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def lists(depth: int) -> str:
    return "[" * depth + "]" * depth


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"properties": {"p": "@"}}


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def tool(**parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def format_of(**json_schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


# where |-> (path, a body): "@" stands for the value, $ for its text within a string
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "any field": (TEXT, {"prompt": "Hi", "foo": "@"}),
    "the prompt": (TEXT, {"prompt": "@"}),
    "metadata": (CHAT, {**HI, "metadata": {"x": "@"}}),
    "logit_bias": (TEXT, {"prompt": "Hi", "logit_bias": {"1": "@"}}),
    "a message": (CHAT, {"messages": [{"role": "user", "content": "@"}]}),
    "arguments": (CHAT, {"messages": called({"x": "@"})}),
    "arguments in a string": (CHAT, {"messages": called('{"x": $}')}),
    "arguments of a chat that goes on": (
        CHAT,
        {"messages": called({"x": "@"}), "continue_final_message": True},
    ),
    "a tool": (CHAT, {**HI, "tools": tool(default="@")}),
    "tool_choice": (CHAT, {**HI, "tools": [ADD], "tool_choice": "@"}),
    "a schema": (CHAT, {**HI, **format_of(schema=SCHEMA)}),
    "a loose schema": (CHAT, {**HI, **format_of(schema=SCHEMA, strict=False)}),
    "a schema in a string": (CHAT, {**HI, "guided_json": '{"properties": {"p": $}}'}),
    "tags": (
        CHAT,
        {
            **HI,
            "structural_tag": {
                "triggers": ["<"],
                "structures": [{"begin": "<a>", "schema": SCHEMA, "end": ""}],
            },
        },
    ),
    "documents": (CHAT, {**HI, "documents": [{"x": "@"}]}),
    "template options": (CHAT, {**HI, "chat_template_kwargs": {"date_string": "@"}}),
    "a chat to count": ("/tokenize", {"messages": called({"x": "@"})}),
    "tokens": ("/detokenize", {"tokens": "@"}),
}


@pytest.mark.parametrize("shape", [objects, lists])
@pytest.mark.parametrize("place", PLACES)
def test_depth_is_never_our_fault(gateway: RunningGateway, place: str, shape: Callable[[int], str]) -> None:
    path, body = PLACES[place]
    for depth in DEPTHS:
        value = shape(depth)
        content = json.dumps(body).replace('"@"', value).replace("$", json.dumps(value)[1:-1])
        response = gateway.client.post(path, content=content, headers={"content-type": "application/json"})
        if response.status_code != 200:
            check_error(response, 400)
    gateway.check_alive()


def test_the_limit_is_told(gateway: RunningGateway) -> None:
    value: Any = json.loads(lists(nested_json.MAX_DEPTH))
    message = check_error(gateway.complete(foo=value), 400, code="invalid_json")
    assert f"nested more than {nested_json.MAX_DEPTH} deep" in message


@pytest.mark.parametrize("shape", [objects, lists])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_depth_is_counted_to_the_level(shape: Callable[[int], str], as_bytes: bool) -> None:
    most = nested_json.MAX_DEPTH
    for depth in (1, most - 1, most, most + 1, most + 2):
        text = shape(depth)
        if depth > most:
            with pytest.raises(ValueError, match="deep"):
                nested_json.loads(text.encode() if as_bytes else text)
        else:
            assert nested_json.loads(text.encode() if as_bytes else text) == json.loads(text)
    wide = [["[{"], {}, 1, None] * 1000  # many, and not deep
    assert nested_json.loads(json.dumps(wide)) == wide
    with pytest.raises(ValueError, match=r"."):
        nested_json.loads("{")
