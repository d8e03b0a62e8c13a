"""Prompts, conversations, limits: what becomes token ids, and what never reaches a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ModelError
from router.model_info import SamplingDefaults, read_sampling_defaults
from tests.support.byte_tokenizer import BOS, CHATML_WITH_BOS, write_byte_tokenizer
from tests.support.gateway import (
    MAX_MODEL_LEN,
    MODEL,
    RunningGateway,
    check_error,
    model_info,
    running_gateway,
)
from tests.support.scripted_cluster import Script


def rendered(gateway: RunningGateway, messages: list[Any], **fields: Any) -> str:
    """The prompt of a chat as text."""
    response = gateway.chat(messages=messages, max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    return gateway.post("/detokenize", tokens=list(gateway.cluster.streams[-1].spec.token_ids)).json()[
        "prompt"
    ]


def call(name: Any = "f", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("role", ["user", "system", "assistant", "developer"])
def test_b027_parts_are_kept_in_order(gateway: RunningGateway, role: str) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    shown = "system" if role == "developer" else role
    text = rendered(gateway, [{"role": role, "content": parts}])
    assert text == f"<|im_start|>{shown}\nA\nB<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content[0].type"),
        (
            {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "input_audio"}]},
            "content[1].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "A", "x": 1}]}, "content[0].x"),
        ({"role": "user", "content": ["A"]}, "content[0]"),
        ({"role": "user", "content": []}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [call(name=5)]}, "tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call(arguments=5)]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call(arguments="[1]")]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{**call(), "id": 5}]}, "tool_calls[0].id"),
        ({"role": "user", "content": "x", "tool_calls": [call()]}, "tool_calls"),
        ({"role": "assistant"}, "content"),
        ({"role": "tool", "content": None, "tool_call_id": "1"}, "content"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "tool_call_id"),
        ({"role": "wizard", "content": "x"}, "role"),
        ({"role": 1, "content": "x"}, "role"),
        ({"content": "x"}, "role"),
        ({"role": "user", "content": "x", "name": 5}, "name"),
        ({"role": "user", "content": "x", "foo": 5}, "foo"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "audio"),
    ],
)
def test_b027_bad_messages(gateway: RunningGateway, message: dict[str, Any], param: str) -> None:
    good = {"role": "user", "content": "Hi"}
    check_error(gateway.chat(messages=[good, message]), 400, param=f"messages[1].{param}")
    assert not gateway.cluster.streams


def test_messages_as_clients_send_them_back(gateway: RunningGateway) -> None:
    old = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    named = {"role": "user", "content": "y", "name": "alice"}
    assert rendered(gateway, [old, named]).startswith(
        "<|im_start|>assistant\nx<|im_end|>\n<|im_start|>user\ny"
    )


@pytest.mark.parametrize("text", ["OK!", "OK! ", "OK!\n", ""])
def test_b042_continue_final_message(gateway: RunningGateway, text: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    prompt = rendered(gateway, messages, continue_final_message=True)
    assert prompt == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{text}"
    check_error(
        gateway.chat(messages=messages, continue_final_message=True, add_generation_prompt=True),
        400,
        param="continue_final_message",
    )
    check_error(
        gateway.chat(messages=messages[:1], continue_final_message=True), 400, param="continue_final_message"
    )


def test_b042_no_generation_prompt(gateway: RunningGateway) -> None:
    prompt = rendered(gateway, [{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("add_bos", [False, True])
def test_b012_empty_prompts(tmp_path: Path, add_bos: bool) -> None:
    with running_gateway(write_byte_tokenizer(tmp_path, add_bos=add_bos)) as gateway:
        for prompt in ("", [""], ["a", ""]):
            response = gateway.complete(prompt=prompt)
            if add_bos:
                assert response.status_code == 200
                assert gateway.cluster.streams[-1].spec.token_ids == (BOS,)
            else:
                check_error(response, 400)
                assert not gateway.cluster.streams, "part of a refused request ran"
        for prompt in ([], [[]]):
            check_error(gateway.complete(prompt=prompt), 400)
        for prompt in (" ", "\u0000"):
            assert gateway.complete(prompt=prompt).status_code == 200
        check_error(gateway.chat(messages=[]), 400, param="messages")
        assert gateway.chat(messages=[{"role": "user", "content": ""}]).status_code == 200
        assert gateway.chat(messages=[{"role": "system", "content": "x"}]).status_code == 200
        gateway.check_alive()


def test_one_bos_only(tmp_path: Path) -> None:
    directory = write_byte_tokenizer(tmp_path, add_bos=True, chat_template=CHATML_WITH_BOS)
    with running_gateway(directory) as gateway:
        assert gateway.chat().status_code == gateway.complete().status_code == 200
        for stream in gateway.cluster.streams:
            assert stream.spec.token_ids[0] == BOS
            assert stream.spec.token_ids.count(BOS) == 1


def test_no_chat_template_says_so(tmp_path: Path) -> None:
    with running_gateway(write_byte_tokenizer(tmp_path, chat_template=None)) as gateway:
        message = check_error(gateway.chat(), 400, param="messages")
        assert "no chat template" in message


# ---- max_tokens and the context ------------------------------------------------------------------


def test_b009_defaults_of_max_tokens(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(tuple(b"ab"))
    num_chat = len(
        rendered(gateway, [{"role": "user", "content": "Hi"}])
        .replace("<|im_start|>", "S")
        .replace("<|im_end|>", "E")
    )
    for fields in ({}, {"max_tokens": None}, {"max_completion_tokens": None}):
        assert gateway.chat(**fields).status_code == gateway.complete(**fields).status_code == 200
        chat, text = gateway.cluster.streams[-2:]
        assert chat.spec.sampling.max_tokens == MAX_MODEL_LEN - num_chat
        assert text.spec.sampling.max_tokens == 16
    for fields in (
        {"max_completion_tokens": 7},
        {"max_tokens": 7},
        {"max_tokens": 7, "max_completion_tokens": 7},
    ):
        assert gateway.chat(**fields).status_code == gateway.complete(**fields).status_code == 200
        assert {stream.spec.sampling.max_tokens for stream in gateway.cluster.streams[-2:]} == {7}
    for send in (gateway.chat, gateway.complete):
        check_error(send(max_tokens=7, max_completion_tokens=8), 400, param="max_tokens")
        for value in ("5", 1.5, True, -1, 2**63):
            check_error(send(max_tokens=value), 400, param="max_tokens")


def test_b010_no_tokens_asked_for(gateway: RunningGateway) -> None:
    check_error(gateway.chat(max_tokens=0), 400, param="max_tokens")
    check_error(gateway.complete(max_tokens=0), 400, param="max_tokens")
    assert not gateway.cluster.streams


@pytest.mark.parametrize("stream", [False, True])
def test_context_is_exceeded_with_both_numbers(gateway: RunningGateway, stream: bool) -> None:
    long, room = [1] * (MAX_MODEL_LEN - 10), MAX_MODEL_LEN
    for fields, numbers in (
        ({"prompt": long, "max_tokens": 11}, (room, room - 10, 11)),
        ({"prompt": [1] * room}, (room, room)),
        ({"prompt": [1] * (room + 5), "max_tokens": 1}, (room, room + 5, 1)),
    ):
        message = check_error(gateway.complete(**fields, stream=stream), 400, code="context_length_exceeded")
        assert all(str(number) in message for number in numbers)
    assert gateway.complete(prompt=long, max_tokens=10).status_code == 200
    assert gateway.complete(prompt=long).status_code == 200
    assert gateway.cluster.streams[-1].spec.sampling.max_tokens == 10  # of the default 16
    words = [{"role": "user", "content": "x" * MAX_MODEL_LEN}]
    check_error(gateway.chat(messages=words), 400, param="messages", code="context_length_exceeded")


def test_the_cluster_can_have_a_shorter_context(gateway: RunningGateway) -> None:
    gateway.cluster.limit = 100
    check_error(gateway.complete(prompt=[1] * 99, max_tokens=2), 400, code="context_length_exceeded")
    assert gateway.client.get("/v1/models").json()["data"][0]["max_model_len"] == 100


def test_truncation(gateway: RunningGateway) -> None:
    prompt = list(range(1, 101))
    for fields, kept in (
        ({"truncate_prompt_tokens": 10}, prompt[-10:]),
        ({"truncate_prompt_tokens": 10, "truncation_side": "right"}, prompt[:10]),
        ({"truncate_prompt_tokens": -1}, prompt),
        ({"truncate_prompt_tokens": 200}, prompt),
    ):
        assert gateway.complete(prompt=prompt, **fields).status_code == 200
        assert list(gateway.cluster.streams[-1].spec.token_ids) == kept


# ---- models and defaults -------------------------------------------------------------------------


def test_models(gateway: RunningGateway) -> None:
    [card] = gateway.client.get("/v1/models").json()["data"]
    assert card["id"] == MODEL
    assert card["max_model_len"] == MAX_MODEL_LEN
    assert gateway.client.get(f"/v1/models/{MODEL}").json() == card
    check_error(gateway.client.get("/v1/models/other/one"), 404, param="model", code="model_not_found")
    assert gateway.complete(model=MODEL).status_code == 200
    for path in ("/v1/completions", "/tokenize"):
        check_error(
            gateway.post(path, model="x" * 5000, prompt="a"), 404, param="model", code="model_not_found"
        )
    check_error(gateway.complete(model=5), 400, param="model")


def test_defaults_of_the_model(tokenizer_dir: Path) -> None:
    defaults = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)
    with running_gateway(tokenizer_dir, model=model_info(defaults)) as gateway:
        assert gateway.complete().status_code == 200
        assert (
            gateway.complete(temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1).status_code
            == 200
        )
        own, asked = (stream.spec.sampling for stream in gateway.cluster.streams)
        assert (own.temperature, own.top_p, own.top_k, own.min_p, own.repetition_penalty) == (
            0.2,
            0.9,
            40,
            0.05,
            1.1,
        )
        assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.repetition_penalty) == (
            1,
            1,
            0,
            0,
            1,
        )
        assert gateway.client.get("/v1/models").json()["data"][0]["default_sampling"]["temperature"] == 0.2


def test_generation_config_is_read(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "do_sample": true, "top_p": null}')
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20)
    for bad in ('{"temperature": "x"}', '{"top_p": 2}', "[]", "{"):
        path.write_text(bad)
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            read_sampling_defaults(tmp_path)


# ---- tokenize ------------------------------------------------------------------------------------


def test_tokenize_and_back(gateway: RunningGateway) -> None:
    body = gateway.post("/tokenize", prompt="Hé", return_token_strs=True).json()
    assert body == {
        "count": 3,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": list("Hé".encode()),
        "token_strs": ["H", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert gateway.post("/detokenize", tokens=body["tokens"]).json() == {"prompt": "Hé"}
    messages = [{"role": "user", "content": "Hi"}]
    tokens = gateway.post("/tokenize", messages=messages).json()["tokens"]
    assert gateway.chat(messages=messages).status_code == 200
    assert tuple(tokens) == gateway.cluster.streams[-1].spec.token_ids
    for fields in (
        {},
        {"prompt": 5},
        {"messages": []},
        {"prompt": "a", "messages": messages},
    ):
        check_error(gateway.post("/tokenize", **fields), 400)
    for fields in ({}, {"tokens": "x"}, {"tokens": [10**9]}, {"tokens": [-1]}):
        check_error(gateway.post("/detokenize", **fields), 400)


def test_b162_templates_come_from_the_model_alone(gateway: RunningGateway) -> None:
    evil = "{{ ''.__class__ }}"
    check_error(gateway.chat(chat_template=evil), 400, param="chat_template", code="unsupported_parameter")
    check_error(
        gateway.post("/tokenize", messages=[{"role": "user", "content": "x"}], chat_template=evil), 400
    )
    for kwargs in (
        {"tokenize": True},
        {"messages": []},
        {"add_generation_prompt": False},
        {"chat_template": evil},
    ):
        [name] = kwargs
        check_error(gateway.chat(chat_template_kwargs=kwargs), 400, param=f"chat_template_kwargs.{name}")
    assert rendered(gateway, [{"role": "user", "content": evil}]).count(evil) == 1
