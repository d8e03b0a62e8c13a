"""Everything a client can make large has a bound, the operator's to set, and an error that names it."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from dataclasses import fields
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.config_sources import resolve_config, setting_infos
from cluster.errors import ConfigError, DeadlineExceeded, NotReady, Overloaded
from cluster.preflight import check_request_limits
from cluster.request_config import RequestConfig
from router.limits import GatewayLimits, RequestLimits
from tests.support.gateway import LIMIT_S, RunningGateway, check_error, running_gateway
from tests.support.tools import ADD, LOOK_UP

CONFIG = RequestConfig(
    max_body_bytes=20_000,
    max_bodies_bytes=100_000,
    max_header_bytes=2000,
    request_arrival_s=7.0,
    max_viewers=2,
    max_json_depth=20,
    max_fields=40,
    max_grammar_bytes=500,
    max_pattern_size=50,
    max_schema_properties=3,
    max_messages=3,
    max_prompts=4,
    max_n=4,
    max_choices=6,
    max_logprobs=2,
    max_prompt_logprobs=30,
    max_stop_strings=2,
    max_stop_chars=10,
    max_bad_words_chars=12,
    max_listed_ids=5,
    max_session_chars=8,
    max_queued=9,
    max_tools=1,
    tool_format="json",
    request_chat_templates="trust",
    overload_status=529,
)


@pytest.fixture(scope="module")
def tight(tokenizer_dir: Path) -> Iterator[RunningGateway]:
    with running_gateway(tokenizer_dir, limits=GatewayLimits.of(CONFIG)) as running:
        yield running


MESSAGE = {"role": "user", "content": "x"}


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


def tools_with(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


PROPERTIES = {"properties": {name: {} for name in "abcd"}}
TAGS: dict[str, Any] = {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"not": nested(20)}}]}


@pytest.mark.parametrize(
    ("fields", "param", "number"),
    [
        ({"messages": [MESSAGE] * 4}, "messages", 3),
        ({"n": 5}, "n", 4),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", 2),
        ({"prompt_logprobs": 3}, "prompt_logprobs", 2),
        ({"stop": ["a", "b", "c"]}, "stop", 2),
        ({"stop": "x" * 11}, "stop", 10),
        ({"stop": ["x", "x" * 11]}, "stop", 10),
        ({"stop_token_ids": [1] * 6}, "stop_token_ids", 5),
        ({"bad_words": ["a"] * 6}, "bad_words", 5),
        ({"bad_words": ["abcd"] * 4}, "bad_words", 12),
        ({"allowed_token_ids": [1] * 6}, "allowed_token_ids", 5),
        ({"logit_bias": {str(index): 1 for index in range(6)}}, "logit_bias", 5),
        ({"session_id": "x" * 9}, "session_id", 8),
        ({"prompt_cache_key": "x" * 9}, "prompt_cache_key", 8),
        ({"user": "é" * 9}, "user", 8),
        ({f"field_{index}": 1 for index in range(40)}, None, 40),
        ({"documents": nested(21)}, None, 20),
        ({"guided_json": json.dumps({"not": nested(21)})}, "guided_json", 20),
        ({"structural_tag": json.dumps(TAGS)}, "structural_tag", 20),
        ({"prompt_logprobs": 2, "messages": [{"role": "user", "content": "x" * 20}]}, "messages", 30),
        ({"tools": [ADD, LOOK_UP]}, "tools", 1),
        ({"guided_json": {"enum": ["x" * 600]}}, "guided_json", 500),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 600]}}}},
            None,
            500,
        ),
        ({"guided_regex": "x" * 501}, "guided_regex", 500),
        ({"guided_choice": ["x" * 501]}, "guided_choice", 500),
        ({"guided_regex": "é" * 251}, "guided_regex", 500),
        ({"guided_regex": "a{51}"}, "guided_regex", 50),
        ({"guided_grammar": "start: /a{51}/"}, "guided_grammar", 50),
        ({"guided_json": {"pattern": "a{51}"}}, "guided_json", 50),
        ({"guided_json": PROPERTIES}, "guided_json", 3),
        (
            {"structural_tag": {**TAGS, "structures": [{"begin": "<", "schema": PROPERTIES}]}},
            "structural_tag",
            3,
        ),
        ({"tools": tools_with(PROPERTIES)}, "tools[0].function.parameters", 3),
        ({"tools": tools_with({"patternProperties": {"a{51}": {}}})}, "tools[0].function.parameters", 50),
        ({"guided_grammar": "start: /" + "x" * 500 + "/"}, "guided_grammar", 500),
    ],
)
def test_a_bound_is_named_with_its_number(
    tight: RunningGateway, fields: dict[str, Any], param: str | None, number: int
) -> None:
    message = check_error(tight.chat(**fields), 400, param=param)
    assert str(number) in message
    tight.check_alive()


def test_answers_of_all_prompts_together(tight: RunningGateway) -> None:
    assert tight.complete(prompt=["a", "b", "c"], n=2).status_code == 200
    message = check_error(tight.complete(prompt=["a", "b", "c"], n=3), 400, param="n")
    assert "6 answers" in message
    assert "4 prompts" in check_error(tight.complete(prompt=["a"] * 5), 400, param="prompt")
    assert tight.complete(prompt=[1] * 5).status_code == 200  # one, of token ids


def test_bodies(tight: RunningGateway) -> None:
    message = check_error(tight.complete(prompt="x" * 20_000), 413, code="body_too_large")
    assert "20000 bytes" in message


def exchange(gateway: RunningGateway, *parts: bytes) -> tuple[bytes, dict[str, Any]]:
    """(status line, body) of what comes back before the server closes the connection."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT_S) as connection:
        for part in parts:
            connection.sendall(part)
            if select.select([connection], [], [], 0.05)[0]:  # refused before all of it was sent
                break
        raw = b""
        while data := connection.recv(65536):
            raw += data
    head, _, body = raw.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body)


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: " + b"a" * 3000 + b"\r\n\r\n"],
        [b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x-small: a\r\n" * 400 + b"\r\n"],
        [b"GET /health HTTP/1.1\r\nhost: x\r\n", *[b"x-endless: " + b"a" * 500] * 8],
        [b"GET /health HTTP/1.1\r\nhost: x\r\nx-line: ", *[b"a" * 700] * 6],
    ],
)
def test_heads(tight: RunningGateway, parts: list[bytes]) -> None:
    status, body = exchange(tight, *parts)
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == "headers_too_large"
    assert "2000 bytes" in body["error"]["message"]
    tight.check_alive()


def test_heads_within_the_bound_and_many_requests_on_a_connection(tight: RunningGateway) -> None:
    request = b"GET /ping HTTP/1.1\r\nhost: x\r\nx-some: " + b"a" * 1500 + b"\r\n\r\n"
    last = request.replace(b"host: x", b"host: x\r\nconnection: close")
    with socket.create_connection(("127.0.0.1", tight.port), timeout=LIMIT_S) as connection:
        connection.sendall(request * 5 + last)
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    assert raw.count(b"HTTP/1.1 200 OK") == 6


def test_status_of_overload(tight: RunningGateway) -> None:
    for error, status, reason in (
        (Overloaded("No.", retry_after_s=0.25), 529, "overloaded"),
        (Overloaded("No."), 529, "overloaded"),
        (NotReady("Not yet."), 503, "not_ready"),
        (DeadlineExceeded("Late."), 504, "deadline_exceeded"),
    ):
        tight.cluster.refuse = error
        for response in (tight.chat(), tight.complete(stream=True)):
            check_error(response, status, code=reason)
            assert response.headers["x-baton-dropped-reason"] == reason
            if status != 504:
                assert int(response.headers["retry-after"]) >= 1
                assert int(response.headers["retry-after-ms"]) >= 250
    tight.cluster.refuse = None


def test_a_trusted_request_brings_its_template(tight: RunningGateway) -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    fields = {"messages": [MESSAGE], "chat_template": template}
    assert tight.chat(**fields, max_tokens=1).status_code == 200
    assert bytes(tight.cluster.streams[-1].spec.token_ids) == b"<x>"
    assert tight.post("/tokenize", **fields).json()["count"] == 3
    for bad in ("{% for %}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "{{ nothing() }}"):
        check_error(tight.chat(messages=[MESSAGE], chat_template=bad), 400)
    tight.check_alive()


def test_settings_reach_the_gateway() -> None:
    limits = GatewayLimits.of(CONFIG)
    assert limits.request == RequestLimits(
        max_json_depth=20,
        max_fields=40,
        max_messages=3,
        max_prompts=4,
        max_n=4,
        max_choices=6,
        max_logprobs=2,
        max_prompt_logprobs=30,
        max_stop_strings=2,
        max_stop_chars=10,
        max_bad_words_chars=12,
        max_listed_ids=5,
        max_session_chars=8,
        max_tools=1,
        max_grammar_bytes=500,
        max_pattern_size=50,
        max_schema_properties=3,
        trust_chat_template=True,
    )
    assert (limits.max_body_bytes, limits.max_bodies_bytes) == (20_000, 100_000)
    assert (limits.max_header_bytes, limits.request_arrival_s, limits.max_viewers) == (2000, 7.0, 2)
    assert GatewayLimits.of(RequestConfig(max_body_bytes=1024)).max_bodies_bytes == 32 * 1024
    assert GatewayLimits.of(RequestConfig()) == GatewayLimits()
    for name in RequestConfig.__struct_fields__:  # the operator's settings have the same names and defaults
        assert getattr(ClusterConfig(), name) == getattr(RequestConfig(), name)


SETTINGS = [
    *(bound.name for bound in fields(RequestLimits) if bound.name != "trust_chat_template"),
    *("max_body_bytes", "max_bodies_bytes", "max_header_bytes", "request_arrival_s", "max_queued"),
    "max_viewers",
]


@pytest.mark.parametrize("name", SETTINGS)
def test_each_is_a_setting_like_any_other(name: str, tmp_path: Path) -> None:
    info = {info.name: info for info in setting_infos()}[name]
    first, second, third = (int(info.default or 4000) - less for less in (1, 2, 3))
    file = tmp_path / "baton.toml"
    file.write_text(f"{name} = {third}\n")
    for flags, environment, expected in (
        ({name: str(first)}, {info.variable: str(second)}, first),
        ({}, {info.variable: str(second)}, second),
        ({}, {}, third),
    ):
        assert getattr(resolve_config(flags, environment, file).config, name) == expected
    for value in ("-1", "many"):
        with pytest.raises(ConfigError, match=f"^{info.flag}: expected a"):
            resolve_config({name: value}, {})


def test_limits_that_exclude_each_other_are_refused_at_the_start() -> None:
    check_request_limits(ClusterConfig())
    check_request_limits(ClusterConfig(max_body_bytes=1 << 30))
    with pytest.raises(ConfigError, match=r"--max-bodies.*2048 bytes.*--max-body.*4096 bytes"):
        check_request_limits(ClusterConfig(max_body_bytes=4096, max_bodies_bytes=2048))


@pytest.mark.parametrize(
    "part",
    [
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nhost: x\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 99\r\n\r\n{",
    ],
)
def test_a_request_that_arrives_too_slowly(tokenizer_dir: Path, part: bytes) -> None:
    with running_gateway(tokenizer_dir, arrival_s=0.3) as gateway:
        status, body = exchange(gateway, part)
        assert status == b"HTTP/1.1 408 Request Timeout"
        assert body["error"]["code"] == "request_timeout"
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT_S) as silent:
            assert silent.recv(100) == b""
        gateway.check_alive()


def test_only_the_arrival_is_timed(tokenizer_dir: Path) -> None:
    """Neither how long an answer takes, nor a connection that is kept."""
    with running_gateway(tokenizer_dir, arrival_s=0.3) as gateway:
        connection = first_answered(gateway)
        own = connection.sock
        for _ in range(2):
            assert connection.sock is own, "the server closed the connection"
            assert select.select([own], [], [], 0.6)[0] == []
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            assert response.status == 200
        connection.close()


def first_answered(gateway: RunningGateway) -> HTTPConnection:
    """With one request answered: a test that is held up may miss the time in which that has to arrive."""
    for _ in range(20):
        connection = HTTPConnection("127.0.0.1", gateway.port, timeout=LIMIT_S)
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        if response.status == 200:
            return connection
        connection.close()
    raise AssertionError("no request arrived in time")


def test_bounds_of_formats_can_be_raised(tokenizer_dir: Path) -> None:
    """At every place that builds a grammar."""
    limits = RequestLimits(max_pattern_size=10_600, max_schema_properties=1100)
    schema = {"properties": {f"p{index}": True for index in range(1050)}, "required": ["p0"]}
    bodies: list[dict[str, Any]] = [
        {"guided_regex": "a{10500}"},
        {"guided_grammar": "start: /a{10500}/"},
        {"guided_json": schema},
        {"tools": tools_with({"properties": {"p": {"pattern": "a{10500}"}}}), "tool_choice": "required"},
    ]
    with running_gateway(tokenizer_dir, limits=GatewayLimits(request=limits)) as gateway:
        for body in bodies:
            answer = gateway.chat(**body, max_tokens=3)
            assert answer.status_code == 200, answer.text
    with running_gateway(tokenizer_dir) as gateway:
        for body in bodies:
            check_error(gateway.chat(**body, max_tokens=3), 400)
