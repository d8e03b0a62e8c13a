"""Formats an answer must have, over HTTP: every spelling, one at a time; what cannot be followed is refused
before anything is queued, and quickly, however nasty it is."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.gateway import RunningGateway, check_error
from tests.support.scripted_cluster import Script

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


def grammar_of(gateway: RunningGateway, **fields: Any) -> str:
    response = gateway.chat(**fields, max_tokens=1)
    assert response.status_code == 200, response.text
    grammar: str = gateway.cluster.streams[-1].spec.sampling.grammar
    return grammar


def test_spellings_of_the_same_format_are_the_same(gateway: RunningGateway) -> None:
    of_schema = {
        grammar_of(gateway, **fields)
        for fields in (
            {"response_format": json_schema(SCHEMA)},
            {"response_format": json_schema(SCHEMA, strict=True, description="d")},
            {"structured_outputs": {"json": SCHEMA}},
            {
                "structured_outputs": {
                    "json": '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
                }
            },
            {"guided_json": SCHEMA},
            {"json_schema": SCHEMA},
        )
    }
    assert len(of_schema) == 1
    assert grammar_of(gateway, structured_outputs={"regex": "a+"}) == grammar_of(gateway, guided_regex="a+")
    assert grammar_of(gateway, structured_outputs={"choice": ["a"]}) == grammar_of(
        gateway, guided_choice=["a"]
    )
    assert grammar_of(gateway, structured_outputs={"grammar": 'root ::= "a"'}) == grammar_of(
        gateway, ebnf='root ::= "a"'
    )
    assert grammar_of(gateway, response_format={"type": "json_object"}) == grammar_of(
        gateway, structured_outputs={"json_object": True}
    )
    assert grammar_of(gateway, response_format={"type": "text"}) == grammar_of(gateway) == ""
    tags = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}
    assert grammar_of(gateway, response_format={"type": "structural_tag", **tags}) == grammar_of(
        gateway, structured_outputs={"structural_tag": tags}
    )
    loose = json_schema({"type": "array", "uniqueItems": True}, strict=False)
    assert grammar_of(gateway, response_format=loose)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema(SCHEMA), "guided_regex": "a"},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"structured_outputs": {"json": SCHEMA, "choice": ["a"]}},
    ],
)
def test_one_format_only(gateway: RunningGateway, fields: dict[str, Any]) -> None:
    check_error(gateway.chat(**fields), 400)
    assert not gateway.cluster.streams


RECURSIVE = {"type": "object", "properties": {"child": {"$ref": "#"}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"foo": "bar"}},
        {"type": "strin"},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.com/schema"},
        {"type": "string", "pattern": "(["},
        {"enum": []},
        {"type": "array", "uniqueItems": True},
        {"not": {}},
        False,
        {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
    ],
)
def test_b030_schemas_that_cannot_be_followed(gateway: RunningGateway, schema: Any, stream: bool) -> None:
    """Never an answer that was not constrained."""
    response = gateway.chat(response_format=json_schema(schema), stream=stream)
    check_error(response, 400, param="response_format.json_schema.schema")
    check_error(gateway.complete(guided_json=schema), 400, param="guided_json")
    assert not gateway.cluster.streams
    gateway.check_alive()


@pytest.mark.parametrize("schema", [{}, True, RECURSIVE, {"type": ["string", "null"]}, {"const": "é"}])
def test_b030_odd_schemas_that_can(gateway: RunningGateway, schema: Any) -> None:
    assert grammar_of(gateway, response_format=json_schema(schema))


def test_b030_json_object_without_the_word(gateway: RunningGateway) -> None:
    assert grammar_of(gateway, response_format={"type": "json_object"})


def nested(depth: int, inner: Any, wrap: Any) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


BOMBS: dict[str, dict[str, Any]] = {
    "repeats": {"guided_regex": "(a{1,1000}){1,1000}"},
    "many repeats": {"guided_regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "backtracking": {"guided_regex": "(x+x+)+y"},
    "oneOf": {"guided_json": nested(12, {"type": "integer"}, lambda x: {"oneOf": [x, x, {"const": 1}]})},
    "anyOf": {"guided_json": nested(12, {"type": "integer"}, lambda x: {"anyOf": [x, x, {"const": 1}]})},
    "enum": {"guided_json": {"enum": [f"value {index}" for index in range(4000)]}},
    "huge enum": {"guided_json": {"enum": [f"value {index}" for index in range(100_000)]}},
    "cycle": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "name": {"guided_json": {"type": "object", "properties": {"x" * 2**20: {}}}},
    "deep": {"guided_json": nested(400, {"type": "integer"}, lambda x: {"type": "array", "items": x})},
    "deeper": {"guided_json": nested(700, {}, lambda x: {"not": x})},
    "choices": {"guided_choice": [f"choice {index}" for index in range(3000)]},
    "grammar": {"guided_grammar": "root ::= root root | " + " ".join('"a"' for _ in range(5000))},
    "self": {"guided_grammar": "start: start"},
    "tags": {
        "structural_tag": {
            "triggers": ["<"],
            "structures": [{"begin": f"<{index}>", "schema": {}, "end": ""} for index in range(500)],
        }
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_b159_compile_bombs(gateway: RunningGateway, name: str) -> None:
    """Taken or refused, but within the budget, and without holding up anybody else."""
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            assert gateway.client.get("/health", timeout=2).status_code == 200

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        response = gateway.chat(**BOMBS[name], max_tokens=1)
    finally:
        done.set()
        watcher.join()
    if response.status_code != 200:
        check_error(response, 400)
    gateway.check_alive()


def test_b159_too_large_is_refused_by_size(gateway: RunningGateway) -> None:
    for name in ("huge enum", "name"):
        message = check_error(gateway.chat(**BOMBS[name]), 400, param="guided_json")
        assert "65536 bytes" in message


def test_b159_other_streams_go_on(gateway: RunningGateway) -> None:
    """A schema is compiled on a thread: while many are, a stream's tokens keep coming."""
    gateway.cluster.script = Script(tuple(b"abcdefghij" * 4), delay_s=0.005)
    threads = [
        threading.Thread(
            target=gateway.chat,
            kwargs={"guided_json": {"enum": [f"{number} {index}" for index in range(2000)]}, "max_tokens": 1},
        )
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    response = gateway.complete(stream=True, max_tokens=41)
    for thread in threads:
        thread.join()
    assert response.status_code == 200
    gateway.check_alive()
