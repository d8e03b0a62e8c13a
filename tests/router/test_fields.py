"""Every field of both routes: what is taken, what is refused, and that a refusal names its field."""

from __future__ import annotations

import difflib
import json
from typing import Any

import pytest

from cluster.sampling import SamplingParams
from router.fields import ACCEPTED
from router.limits import RequestLimits
from tests.support.byte_tokenizer import EOS, VOCAB_SIZE
from tests.support.field_cases import BASE, CHAT_ONLY, ROUTES, SHARED, TEXT_ONLY, TOOL
from tests.support.gateway import RunningGateway, check_error

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
    many = {f"fresh_{route[4:8]}_{index}": 1 for index in range(RequestLimits().max_fields - 1)}
    told = gateway.post(route, **BASE[route], **many).headers["x-baton-ignored"]
    assert told.endswith(f" and {len(many) - 8} more")
    assert len(looked_for) == 8
    message = check_error(gateway.post(route, **BASE[route], **many, one_more=1), 400)
    assert str(RequestLimits().max_fields) in message
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
