"""Whatever an answer was, the client can send it back as a message of the next request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.gateway import RunningGateway
from tests.support.scripted_cluster import Script
from tests.support.tools import ADD, CALL, LOOK_UP, OTHER_CALL

NAMED = {"type": "function", "function": {"name": "add"}}
LATE_NAME = '<tool_call>\n{"arguments": {"a": 1, "b": 2}, "name": "add"}\n</tool_call>'


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("text", [CALL, f"I add.\n{CALL}\n{OTHER_CALL}", LATE_NAME, "No call.", ""])
def test_an_answer_cut_anywhere_can_be_sent_back(gateway: RunningGateway, text: str, choice: Any) -> None:
    gateway.cluster.script = Script(tuple(text.encode()))
    fields: dict[str, Any] = {"tools": [ADD, LOOK_UP], "tool_choice": choice}
    question = {"role": "user", "content": "1 + 2?"}
    for max_tokens in {*range(1, len(text) + 2, 3), len(text) + 1}:
        [answer] = gateway.chat(messages=[question], max_tokens=max_tokens, **fields).json()["choices"]
        message = answer["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            for call in message.get("tool_calls") or ()
        ]
        messages = [question, message, *results, {"role": "user", "content": "Thanks."}]
        response = gateway.chat(messages=messages, max_tokens=1, **fields)
        assert response.status_code == 200, (message, response.text)


def test_what_was_cut_reaches_the_model_as_it_is(gateway: RunningGateway) -> None:
    cut = '{"a": 1, "b'
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": cut}}]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert gateway.chat(messages=messages, max_tokens=1).status_code == 200
    prompt = bytes(t for t in gateway.cluster.streams[-1].spec.token_ids if t < 256).decode()
    assert json.dumps(cut) in prompt


@pytest.mark.parametrize("name", ["id", "provider_specific_fields", "reasoning_details", "thinking_blocks"])
def test_labels_that_clients_leave_in_messages_are_taken_and_told(gateway: RunningGateway, name: str) -> None:
    old = {"role": "assistant", "content": "x", name: {"y": [1]}, "cache_control": {"type": "ephemeral"}}
    new = {"role": "user", "content": "z", name: None}
    response = gateway.chat(messages=[old, new])
    assert response.headers["x-baton-ignored"] == f"messages.{name}"
    assert "x-baton-ignored" not in gateway.chat(messages=[new]).headers
