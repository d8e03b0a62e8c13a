"""Tools over HTTP: what is refused, what the model is shown, and the calls of an answer, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.grammar import Grammars
from cluster.tokenizer import Tokenizer
from router.limits import RequestLimits
from router.tool_formats import HERMES, JSON, MISTRAL, ToolFormat, call_grammar
from router.tools import parse_tool_choice, parse_tools
from tests.support.byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer
from tests.support.gateway import RunningGateway, check_error, running_gateway
from tests.support.scripted_cluster import Script
from tests.support.sse import check_choices, check_stream
from tests.support.tools import ADD, CALL, LOOK_UP, OTHER_CALL

NAMED_ADD = {"type": "function", "function": {"name": "add"}}
KNOWING = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}:"
    "{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def with_tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**ADD["function"], "name": "other", **function}}


def with_parameters(**schema: Any) -> dict[str, Any]:
    return with_tool(parameters={"type": "object", **schema})


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({}, "type"),
        ({"type": "retrieval"}, "type"),
        ({"type": "function"}, "function"),
        ({"type": "function", "function": {}}, "function.name"),
        (with_tool(name=""), "function.name"),
        (with_tool(name="two words"), "function.name"),
        (with_tool(name="x" * 65), "function.name"),
        (with_tool(name=5), "function.name"),
        (with_tool(description=5), "function.description"),
        (with_tool(strict="yes"), "function.strict"),
        (with_tool(parameters=[]), "function.parameters"),
        (with_tool(parameters="x"), "function.parameters"),
        (with_tool(parameters={"type": "something"}), "function.parameters"),
        (with_parameters(properties=[]), "function.parameters.properties"),
        (with_parameters(required="a"), "function.parameters.required"),
        (with_parameters(required=[1]), "function.parameters.required"),
        (with_parameters(properties={"a": {"type": "something"}}), "function.parameters"),
        (with_parameters(properties={"a": {"type": "string", "pattern": "("}}), "function.parameters"),
        (with_parameters(properties={"a": {"$ref": "#/nowhere"}}), "function.parameters"),
        (with_parameters(properties={"a": "x"}), "function.parameters"),
        (with_tool(strict=True, parameters={"type": "object", "not": {}}), "function.parameters"),
        (ADD, "function.name"),  # the second of that name
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_b160_malformed_tools(gateway: RunningGateway, tool: dict[str, Any], param: str, choice: str) -> None:
    check_error(gateway.chat(tools=[ADD, tool], tool_choice=choice), 400, param=f"tools[1].{param}")
    assert not gateway.cluster.streams


def test_b160_choices_that_cannot_be(gateway: RunningGateway) -> None:
    absent = {"type": "function", "function": {"name": "multiply"}}
    for choice in (absent, {"type": "function"}, {"type": "x", "function": {"name": "add"}}, "any", 5, []):
        check_error(gateway.chat(tools=[ADD], tool_choice=choice), 400, param="tool_choice")
    for allowed in (
        None, [], {"mode": "auto"}, {"mode": "any", "tools": [NAMED_ADD]}, {"tools": [NAMED_ADD]},
        {"mode": "auto", "tools": []}, {"mode": "auto", "tools": ["add"]}, {"mode": [], "tools": [NAMED_ADD]},
        {"mode": "auto", "tools": [absent]},
    ):  # fmt: skip
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        check_error(gateway.chat(tools=[ADD], tool_choice=choice), 400, param="tool_choice")
    check_error(gateway.chat(tools=[ADD] * 200), 400, param="tools")
    big = with_tool(name="big", description="x" * 70_000)
    check_error(gateway.chat(tools=[big]), 400, param="tools")
    check_error(gateway.chat(tool_choice="required"), 400, param="tool_choice")
    for choice in ("none", None):
        assert gateway.chat(tools=[], tool_choice=choice).status_code == 200
    gateway.check_alive()


def test_tools_that_no_grammar_can_enforce_are_offered_all_the_same(gateway: RunningGateway) -> None:
    loose = with_parameters(properties={"a": {"type": "array", "uniqueItems": True}})
    for choice in ("auto", "required"):
        assert gateway.chat(tools=[loose], tool_choice=choice).status_code == 200


LOOKS_AHEAD = r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+$"  # zod's, of an address
LOOKS_BACK = r"^(?<!x)a$"
REPEATS_ITSELF = r"^(a|b)\1$"


@pytest.mark.parametrize(
    "pattern", [LOOKS_AHEAD, LOOKS_BACK, REPEATS_ITSELF, r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"]
)
def test_patterns_that_no_grammar_can_follow_bind_strict_tools_alone(
    gateway: RunningGateway, pattern: str
) -> None:
    """Generators of schemas write them; a tool that is only offered must not fail for it."""
    text = {"type": "string", "pattern": pattern}
    places: list[dict[str, Any]] = [
        {"properties": {"a": text}},
        {"properties": {"a": {"anyOf": [{"type": "number"}, text]}}},
        {"properties": {"a": {"type": "array", "items": text}}},
        {"properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": text}},
        {"patternProperties": {pattern: {"type": "string"}}},
    ]
    for schema in places:
        for choice in ("auto", "required"):
            response = gateway.chat(tools=[with_parameters(**schema)], tool_choice=choice, max_tokens=1)
            assert response.status_code == 200, response.text
        assert "(" in shown(gateway)  # the model sees the pattern
        strict = with_tool(strict=True, parameters={"type": "object", **schema})
        check_error(gateway.chat(tools=[strict]), 400, param="tools[0].function.parameters")
        loose = {"type": "json_schema", "json_schema": {"strict": False, "schema": schema}}
        assert gateway.chat(response_format=loose, max_tokens=1).status_code == 200
        check_error(gateway.chat(guided_json=schema), 400, param="guided_json")


def test_a_reference_to_another_document_binds_strict_tools_alone(gateway: RunningGateway) -> None:
    schema = {"properties": {"a": {"$ref": "https://example.com/address.json"}}}
    assert gateway.chat(tools=[with_parameters(**schema)], tool_choice="required").status_code == 200
    strict = with_tool(strict=True, parameters={"type": "object", **schema})
    check_error(gateway.chat(tools=[strict]), 400, param="tools[0].function.parameters")


# ---- what the model is shown ---------------------------------------------------------------------


def shown(gateway: RunningGateway) -> str:
    tokens = list(gateway.cluster.streams[-1].spec.token_ids)
    text: str = gateway.post("/detokenize", tokens=tokens).json()["prompt"]
    return text


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


def test_a_template_without_tools_gets_instructions(gateway: RunningGateway) -> None:
    assert gateway.chat(messages=HISTORY, tools=[ADD, LOOK_UP], max_tokens=1).status_code == 200
    text = shown(gateway)
    assert text.startswith("<|im_start|>system\n")
    assert '"name":"add"' in text
    assert '"name":"look_up"' in text
    assert '<tool_call>\n{"name":"add","arguments":{"a":1,"b":2}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\n3\n</tool_response>" in text
    system = {"role": "system", "content": "Be brief."}
    assert gateway.chat(messages=[system, *HISTORY], tools=[ADD], max_tokens=1).status_code == 200
    assert shown(gateway).startswith("<|im_start|>system\nBe brief.\n\nYou can call")
    assert gateway.chat(messages=HISTORY, max_tokens=1).status_code == 200  # of a chat that had tools
    assert "<tools>" not in shown(gateway)
    assert "<tool_call>" in shown(gateway)
    assert gateway.chat(tools=[ADD], tool_choice="none", max_tokens=1).status_code == 200
    assert "add" not in shown(gateway)


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    directory: Path = write_byte_tokenizer(tmp_path_factory.mktemp("knowing"), chat_template=KNOWING)
    with running_gateway(directory) as running:
        yield running


def test_a_template_with_tools_gets_them(knowing: RunningGateway) -> None:
    assert knowing.chat(messages=HISTORY, tools=[LOOK_UP], max_tokens=1).status_code == 200
    function = {"name": "look_up", "parameters": {"type": "object", "properties": {}}}
    tool = json.dumps({"type": "function", "function": function})
    expected = f"<tools>{tool}</tools>[user]1 + 2?[assistant]<tool_call>add:1[tool]3[assistant]"
    assert shown(knowing) == expected
    tokens = knowing.post("/tokenize", messages=HISTORY, tools=[LOOK_UP]).json()["tokens"]
    assert tuple(tokens) == knowing.cluster.streams[-1].spec.token_ids
    named = {"type": "function", "function": {"name": "look_up"}}
    assert knowing.chat(tools=[ADD, LOOK_UP], tool_choice=named, max_tokens=1).status_code == 200
    assert '"name": "add"' in shown(knowing)  # the model is told of all, and may call that one


# ---- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("per_delivery", [1, 2, 7, 500])
@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (CALL, None, ["add"]),
        (f"I will add.\n{CALL}", "I will add.", ["add"]),
        (f"{CALL}\n{OTHER_CALL}", None, ["add", "look_up"]),
        ("No tools are needed, é!", "No tools are needed, é!", []),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "same", []),
    ],
)
def test_calls_streamed_and_whole(
    gateway: RunningGateway, text: str, content: str | None, names: list[str], per_delivery: int
) -> None:
    gateway.cluster.script = Script(tuple(text.encode()), per_delivery=per_delivery)
    fields: dict[str, Any] = {"tools": [ADD, LOOK_UP], "max_tokens": 200}
    [choice] = gateway.chat(**fields).json()["choices"]
    stream = check_stream(gateway.chat(**fields, stream=True).content)
    content = text if content == "same" else content
    message = choice["message"]
    assert message["content"] == content
    assert stream.text == (content or "")
    calls = message.get("tool_calls", [])
    assert [call["function"] for call in stream.tool_calls] == [call["function"] for call in calls]
    assert [call["function"]["name"] for call in calls] == names
    for call in calls:
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert len({call["id"] for call in calls}) == len(calls)
    reason = "tool_calls" if names else "stop"
    assert choice["finish_reason"] == stream.finish_reason == reason


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}])
def test_b025_a_call_that_is_cut_is_not_complete(gateway: RunningGateway, choice: Any) -> None:
    whole = len(CALL) + 1  # and the end of text
    gateway.cluster.script = Script(tuple(CALL.encode()))
    for max_tokens in range(1, whole + 1):
        fields = {"tools": [ADD], "tool_choice": choice, "max_tokens": max_tokens}
        [answer] = gateway.chat(**fields).json()["choices"]
        expected = "tool_calls" if max_tokens == whole else "length"
        assert answer["finish_reason"] == expected
        if max_tokens % 7 == 0 or max_tokens == whole:
            stream = check_stream(gateway.chat(**fields, stream=True).content)
            assert stream.finish_reason == expected
            arguments = [call["function"] for call in stream.tool_calls]
            assert arguments == [call["function"] for call in answer["message"].get("tool_calls", [])]
            assert stream.text == (answer["message"]["content"] or "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_required_call_that_is_cut_within_its_name_is_no_text(gateway: RunningGateway, choice: Any) -> None:
    gateway.cluster.script = Script(tuple(CALL.encode()))
    for max_tokens in (1, len("<tool_call>\n"), CALL.index("add") + 1):
        fields = {"tools": [ADD], "tool_choice": choice, "max_tokens": max_tokens}
        [answer] = gateway.chat(**fields).json()["choices"]
        assert answer["message"]["content"] is None
        assert answer["message"]["tool_calls"] == []
        assert answer["finish_reason"] == "length"
        stream = check_stream(gateway.chat(**fields, stream=True).content)
        assert (stream.text, stream.tool_calls, stream.finish_reason) == ("", [], "length")


def test_a_stop_string_within_a_call_is_a_stop(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(tuple(CALL.encode()))
    [choice] = gateway.chat(tools=[ADD], stop=['"b"']).json()["choices"]
    assert choice["finish_reason"] == "stop"


def test_several_choices_have_calls_of_their_own(gateway: RunningGateway) -> None:
    texts = (CALL, "Hello", OTHER_CALL)
    gateway.cluster.script = lambda spec: Script(tuple(texts[int(spec.request[-1])].encode()))
    fields: dict[str, Any] = {"tools": [ADD, LOOK_UP], "n": 3, "max_tokens": 200}
    body = gateway.chat(**fields).json()
    results = check_choices(gateway.chat(**fields, stream=True).content, 3)
    reasons = ["tool_calls", "stop", "tool_calls"]
    assert [choice["finish_reason"] for choice in body["choices"]] == reasons
    assert [result.finish_reason for result in results] == reasons
    ids = [call["id"] for choice in body["choices"] for call in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids) == 2


def test_logprobs_of_an_answer_with_calls_are_complete(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(tuple(f"Hm {CALL}".encode()))
    fields: dict[str, Any] = {"tools": [ADD], "logprobs": True, "max_tokens": 200, "return_token_ids": True}
    [choice] = gateway.chat(**fields).json()["choices"]
    stream = check_stream(gateway.chat(**fields, stream=True).content)
    assert stream.logprobs == choice["logprobs"]["content"]
    assert stream.token_ids == choice["token_ids"]
    assert len(stream.token_ids) == len(f"Hm {CALL}") + 1


# ---- grammars of calls ---------------------------------------------------------------------------


def test_only_what_must_be_a_call_is_constrained(gateway: RunningGateway) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    grammars = []
    for choice in ("auto", "required", named):
        assert gateway.chat(tools=[ADD, LOOK_UP], tool_choice=choice, max_tokens=1).status_code == 200
        grammars.append(gateway.cluster.streams[-1].spec.sampling.grammar)
    assert grammars[0] == ""
    assert "look_up" in grammars[1]
    assert "look_up" not in grammars[2]
    fields = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 1}
    assert gateway.chat(**fields).status_code == 200
    assert "call)*" not in gateway.cluster.streams[-1].spec.sampling.grammar
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert gateway.chat(tools=[ADD], response_format=schema, max_tokens=1).status_code == 200
    assert "start: calls | answer" in gateway.cluster.streams[-1].spec.sampling.grammar
    tag = {
        "type": "structural_tag",
        "triggers": ["<a"],
        "structures": [{"begin": "<a>", "schema": {}, "end": ""}],
    }
    check_error(gateway.chat(tools=[ADD], response_format=tag), 400, param="response_format")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_called_and_all_are_shown(knowing: RunningGateway, mode: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED_ADD, NAMED_ADD]}}
    knowing.cluster.script = Script(tuple(f"{OTHER_CALL}\n{CALL}".encode()))
    fields: dict[str, Any] = {"tools": [ADD, LOOK_UP], "tool_choice": choice, "max_tokens": 200}
    [answer] = knowing.chat(**fields).json()["choices"]
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["add"]
    assert answer["message"]["content"] == OTHER_CALL  # it is no call that was allowed
    assert '"name": "look_up"' in shown(knowing)
    grammar = knowing.cluster.streams[-1].spec.sampling.grammar
    assert ("look_up" in grammar, bool(grammar)) == (False, mode == "required")
    knowing.cluster.script = Script()


@pytest.mark.parametrize("per_delivery", [1, 5, 500])
@pytest.mark.parametrize("wants", [True, False, None])
def test_one_call_where_no_parallel_ones_are_wanted(
    gateway: RunningGateway, wants: bool | None, per_delivery: int
) -> None:
    gateway.cluster.script = Script(tuple(f"Now.\n{CALL}\n{OTHER_CALL}".encode()), per_delivery=per_delivery)
    fields: dict[str, Any] = {"tools": [ADD, LOOK_UP], "max_tokens": 200, "parallel_tool_calls": wants}
    [choice] = gateway.chat(**fields).json()["choices"]
    stream = check_stream(gateway.chat(**fields, stream=True).content)
    names = ["add"] if wants is False else ["add", "look_up"]
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == names
    assert [call["function"] for call in stream.tool_calls] == [call["function"] for call in calls]
    assert choice["message"]["content"] == stream.text == "Now."
    assert choice["finish_reason"] == stream.finish_reason == "tool_calls"


STRICT = with_tool(name="add", strict=True)
STRICT_CASES: list[tuple[ToolFormat, str, bool]] = [
    (HERMES, "no call at all", True),
    (HERMES, "", True),
    (HERMES, f"text\n{CALL}", True),
    (HERMES, f"{CALL}\n{CALL} and text", True),
    (HERMES, CALL.replace("1", '"one"'), False),
    (HERMES, CALL.replace(', "b": 2', ""), False),
    (HERMES, CALL.replace("add", "rm"), False),
    (HERMES, "<tool_call>\n", False),
    (JSON, "no call at all {}", True),
    (JSON, '{"name": "add", "parameters": {"a": 1, "b": 2}}', True),
    (JSON, '{"name": "add", "parameters": {"a": 1, "b": "2"}}', False),
    (JSON, '{"answer": 42}', False),
    (MISTRAL, "no call at all [1]", True),
    (MISTRAL, '[{"name": "add", "arguments": {"a": 1, "b": 2}}]', True),
    (MISTRAL, '[{"name": "add", "arguments": {"a": 1, "b": 2}}', False),
    (MISTRAL, '[{"name": "add", "arguments": {"a": 1}}]', False),
]


@pytest.mark.parametrize(("style", "text", "fits"), STRICT_CASES)
def test_a_strict_tool_holds_whenever_it_is_called(
    tokenizer_dir: Path, style: ToolFormat, text: str, fits: bool
) -> None:
    """With `auto` the model may write what it likes, but a call has to fit."""
    plan = parse_tool_choice("auto", parse_tools([STRICT], RequestLimits()), parallel=True)
    assert plan is not None
    grammar = call_grammar(plan, style, None)
    grammars = Grammars(Tokenizer.load(tokenizer_dir))
    grammars.check(grammar, "x")
    state = grammars.open(grammar)
    state.follow(list(text.encode()))
    allowed = state.allowed(VOCAB_SIZE)
    assert (allowed is not None and bool(allowed[EOS])) == fits


# ---- Mistral ---------------------------------------------------------------------------------------

# As its models' own: calls are a list after a special token, and their ids have nine letters or digits.
MISTRAL_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' and message.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_CALLS] [{{ call.function | tojson }}]{% endfor %}[{{ message.role }}]{{ message.content }}"
    "{% endfor %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_of_mistral_are_found_and_can_be_sent_back(tmp_path: Path, choice: str) -> None:
    with running_gateway(write_byte_tokenizer(tmp_path, chat_template=MISTRAL_TEMPLATE)) as gateway:
        text = ' [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "look_up", "arguments": {}}]'
        gateway.cluster.script = Script(tuple(text.encode()))
        fields: dict[str, Any] = {"tools": [ADD, LOOK_UP], "tool_choice": choice, "max_tokens": 200}
        [answer] = gateway.chat(**fields).json()["choices"]
        calls = answer["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["add", "look_up"]
        assert answer["message"]["content"] is None
        assert answer["finish_reason"] == "tool_calls"
        assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)
        assert len({call["id"] for call in calls}) == 2
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
        messages = [{"role": "user", "content": "x"}, answer["message"], *results]
        assert gateway.chat(messages=messages, **fields).status_code == 200
