"""Tool calls out of text: whatever the cuts, the same calls and the same content; nothing is dropped."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tool_formats import HERMES, JSON, MISTRAL, ToolFormat, format_of, knows_tools
from router.tool_parser import ToolParser

NAMES = frozenset({"add", "look_up"})


@dataclass
class Read:
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # [name, arguments]
    has_whole_calls: bool = False


def read(
    text: str,
    style: ToolFormat = HERMES,
    cuts: tuple[int, ...] = (),
    *,
    calls_only: bool = False,
    most_calls: int | None = None,
) -> Read:
    """`text` pushed in parts of these sizes, in turn; in one if there are none."""
    parser = ToolParser(style, NAMES, calls_only=calls_only, most_calls=most_calls)
    parts: list[str] = []
    position = turn = 0
    while position < len(text):
        size = cuts[turn % len(cuts)] if cuts else len(text)
        parts.append(text[position : position + size])
        position, turn = position + size, turn + 1
    result = Read()
    for parsed in [*(parser.push(part) for part in parts), parser.finish()]:
        result.content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.index == len(result.calls)
                result.calls.append([delta.name, ""])
            assert delta.index == len(result.calls) - 1
            result.calls[-1][1] += delta.arguments
    result.has_whole_calls = parser.has_whole_calls
    return result


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": [2, {"c": "}"}]}'

HERMES_CASES: list[tuple[str, str, list[list[str]], bool]] = [
    ("just text", "just text", [], False),
    ("", "", [], False),
    (" \n ", " \n ", [], False),
    (CALL, "", [["add", ARGUMENTS]], True),
    (f"Let me see.\n{CALL}", "Let me see.", [["add", ARGUMENTS]], True),
    (f"{CALL}\n{CALL}\n", "", [["add", ARGUMENTS], ["add", ARGUMENTS]], True),
    (f"{CALL}{CALL}", "", [["add", ARGUMENTS], ["add", ARGUMENTS]], True),
    (f"{CALL} and more", " and more", [["add", ARGUMENTS]], True),
    # the end mark is missing, at the end and before another call
    (CALL.removesuffix("\n</tool_call>"), "", [["add", ARGUMENTS]], True),
    (CALL.removesuffix("</tool_call>") + CALL, "", [["add", ARGUMENTS], ["add", ARGUMENTS]], True),
    # other spellings of the same
    ('<tool_call>{"name":"add","arguments":{}}</tool_call>', "", [["add", "{}"]], True),
    ('<tool_call>{"name":"add","parameters":{}}</tool_call>', "", [["add", "{}"]], True),
    ('<tool_call> {"arguments": {"a": 1}, "name": "add"} </tool_call>', "", [["add", '{"a": 1}']], True),
    ('<tool_call>{"name": "add"}</tool_call>', "", [["add", "{}"]], True),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [["add", '{"a": 1}']], True),
    (
        '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": "x"}</tool_call>',
        "",
        [["add", '{"a": 1}']],
        True,
    ),
    (
        '<tool_call>{"name": "add", "arguments": {"q": "\\"}{"}}</tool_call>',
        "",
        [["add", '{"q": "\\"}{"}']],
        True,
    ),
    # cut short
    ('<tool_call>{"name": "add", "arguments": {"a": ', "", [["add", '{"a": ']], False),
    (f'{CALL}<tool_call>{{"name": "add", "arguments": {{', "", [["add", ARGUMENTS], ["add", "{"]], False),
    ('<tool_call>{"name": "add", "arg', '<tool_call>{"name": "add", "arg', [], False),
    ("text <tool_c", "text <tool_c", [], False),
    # what is no call stays text
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, [], False),  # type: ignore[list-item]
    ("<tool_call>add(1, 2)</tool_call>", None, [], False),  # type: ignore[list-item]
    ("<tool_call>[1]</tool_call>", None, [], False),  # type: ignore[list-item]
    ("<tool_call>}</tool_call>", None, [], False),  # type: ignore[list-item]
    ('a <tool_call>{"name": "add", "arguments": 5}</tool_call>', None, [], False),  # type: ignore[list-item]
    ('a\n<tool_call>{"name": 1}</tool_call> b', None, [], False),  # type: ignore[list-item]
    (f"a < b {CALL}", "a < b", [["add", ARGUMENTS]], True),
]
JSON_CASES: list[tuple[str, str, list[list[str]], bool]] = [
    ("just text {}", "just text {}", [], False),
    ('{"name": "add", "parameters": {"a": 1}}', "", [["add", '{"a": 1}']], True),
    (' \n{"name": "add", "parameters": {"a": 1}}\n', "", [["add", '{"a": 1}']], True),
    (
        '{"name": "add", "parameters": {}}; {"name": "look_up", "parameters": {"q": "é"}}',
        "",
        [["add", "{}"], ["look_up", '{"q": "é"}']],
        True,
    ),
    ('{"answer": 42}', '{"answer": 42}', [], False),
    ('  {"answer": 42} {"name": "add", "parameters": {}}', None, [], False),  # type: ignore[list-item]
    ('{"name": "add", "parameters": {"a"', "", [["add", '{"a"']], False),
    ('{"name": "ad', '{"name": "ad', [], False),
]
ONE = '{"name": "add", "arguments": {"a": 1}}'
OTHER = '{"name": "look_up", "arguments": {"q": "]"}, "id": "abcdef123"}'
MISTRAL_CASES: list[tuple[str, str, list[list[str]], bool]] = [
    ("just [text] {}", "just [text] {}", [], False),
    (f"[TOOL_CALLS] [{ONE}]", "", [["add", '{"a": 1}']], True),
    (f" [{ONE}, {OTHER}]\n", "", [["add", '{"a": 1}'], ["look_up", '{"q": "]"}']], True),
    (f"[TOOL_CALLS][ {ONE} ,{OTHER} ]", "", [["add", '{"a": 1}'], ["look_up", '{"q": "]"}']], True),
    (ONE, "", [["add", '{"a": 1}']], True),
    (f"[{ONE}", "", [["add", '{"a": 1}']], True),
    (f"[{ONE[:-4]}", "", [["add", '{"a":']], False),
    ("[", "[", [], False),
    ("[TOOL_CA", "[TOOL_CA", [], False),
    ("[TOOL_CALLS] none", "[TOOL_CALLS] none", [], False),
    ("[1, 2]", "[1, 2]", [], False),
    ('[{"answer": 42}]', '[{"answer": 42}]', [], False),
    ('[{"name": "rm", "arguments": {}}]', '[{"name": "rm", "arguments": {}}]', [], False),
]


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3), (7,), (13, 1)])
@pytest.mark.parametrize(
    ("style", "case"),
    [
        *((HERMES, case) for case in HERMES_CASES),
        *((JSON, case) for case in JSON_CASES),
        *((MISTRAL, case) for case in MISTRAL_CASES),
    ],
)
def test_what_is_read(
    style: ToolFormat, case: tuple[str, str | None, list[list[str]], bool], cuts: tuple[int, ...]
) -> None:
    text, content, calls, has_whole_calls = case
    assert read(text, style, cuts) == Read(text if content is None else content, calls, has_whole_calls)


@pytest.mark.parametrize("cuts", [(), (1,), (3, 2)])
@pytest.mark.parametrize("style", [HERMES, JSON, MISTRAL])
def test_where_only_calls_may_come_the_head_of_one_is_no_content(
    style: ToolFormat, cuts: tuple[int, ...]
) -> None:
    """Cut anywhere: first no call and no content, then a call with its name and some arguments."""
    call = f'{style.opening}{{"name": "add", "{style.arguments_key}": {ARGUMENTS}}}{style.closing}'
    begins = call.index(ARGUMENTS) + 1
    for end in range(len(call) + 1):
        result = read(call[:end], style, cuts, calls_only=True)
        assert result.content == ""
        assert [name for name, _ in result.calls] == (["add"] if end >= begins else [])
        again = read(call + style.separator + call[:end], style, cuts, calls_only=True)
        assert again.content == ""
        assert len(again.calls) == (2 if end >= begins else 1)
        if 0 < end < begins and call[:end].strip():
            assert not again.has_whole_calls


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "\n", " ", "text", "<", "{", "}", '"', "\\", "[", "]", ","),
        *('{"name": "add", "arguments": ', '{"a": 1}', '{"name": "rm", "arguments": {}}', ": ", "5", "é"),
        CALL,
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=12),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    style=st.sampled_from([HERMES, JSON, MISTRAL]),
)
def test_the_cuts_do_not_matter(pieces: list[str], cuts: tuple[int, ...], style: ToolFormat) -> None:
    text = "".join(pieces)
    whole = read(text, style)
    assert read(text, style, cuts) == whole
    if not whole.calls:
        assert whole.content == text, "nothing is dropped"
    for name, arguments in whole.calls:
        assert name in NAMES
        assert arguments in text or json.loads(arguments) is not None


ARGUMENT_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    arguments=st.lists(
        st.dictionaries(st.text(max_size=5), ARGUMENT_VALUES, max_size=3), min_size=1, max_size=3
    ),
    style=st.sampled_from([HERMES, JSON, MISTRAL]),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    indent=st.sampled_from([None, 1]),
)
def test_calls_come_out_as_they_were_written(
    arguments: list[dict[str, object]], style: ToolFormat, cuts: tuple[int, ...], indent: int | None
) -> None:
    written = [json.dumps(value, ensure_ascii=False, indent=indent) for value in arguments]
    calls = [
        f'{style.opening}{{"name": "add", "{style.arguments_key}": {value}}}{style.closing}'
        for value in written
    ]
    result = read(style.separator.join(calls), style, cuts)
    assert result == Read("", [["add", value] for value in written], True)


def test_formats_are_told_by_the_template() -> None:
    qwen = "{% if tools %}<tools>…</tools> <tool_call>{% endif %}"
    llama = '{% if tools is not none %}{"name": function name, "parameters": …}{% endif %}'
    assert format_of(qwen) is HERMES
    assert format_of(llama) is JSON
    assert format_of("{{ messages }}") is HERMES
    assert format_of(None) is HERMES
    assert [knows_tools(template) for template in (qwen, llama, "{{ messages }}", None)] == [
        True,
        True,
        False,
        False,
    ]


ESCAPES = st.sampled_from(
    [r"\ud83d", r"\ude00", r"\ud83d\ude00", r"\u00e9", r"\u0000", "é", "😀", r"\"", "x", r"\n"]
)
NUMBERS = st.sampled_from(["1", "-0.5", "1e999", "NaN", "-Infinity", "12345678901234567890123", "1.10"])
TEXTS = st.lists(ESCAPES, max_size=4).map(lambda parts: '"' + "".join(parts) + '"')
VALUES = st.recursive(
    TEXTS | NUMBERS | st.just("null"),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: "[" + ", ".join(items) + "]")
        | st.lists(st.tuples(TEXTS, inner), max_size=2).map(
            lambda items: "{" + " , ".join(f"{key}: {item}" for key, item in items) + "}"
        )
    ),
    max_leaves=5,
)
OBJECTS = st.lists(st.tuples(TEXTS, VALUES), max_size=3).map(
    lambda items: "{ " + ",".join(f"{key} :{item}" for key, item in items) + "}"
)


@settings(max_examples=300)
@given(
    arguments=OBJECTS,
    others=st.lists(VALUES, max_size=2),
    cuts=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    style=st.sampled_from([HERMES, JSON, MISTRAL]),
)
def test_arguments_are_as_written_wherever_they_stand(
    arguments: str, others: list[str], cuts: tuple[int, ...], style: ToolFormat
) -> None:
    """Numbers that JSON's readers round, or have not, and halves of characters: nothing is written anew."""
    around = "".join(f'"other": {value}, ' for value in others)
    for body in (
        f'{{{around}"arguments" : {arguments} , "name": "add"}}',
        f'{{"name": "add", {around}"parameters": {arguments}}}',
    ):
        found = read(style.opening + body + style.closing, style, cuts)
        assert found.calls == [["add", arguments]]
        assert found.content == ""
        assert found.has_whole_calls


@given(
    inner=st.lists(ESCAPES, max_size=5),
    cuts=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    style=st.sampled_from([HERMES, JSON, MISTRAL]),
)
def test_arguments_in_a_string_are_text(inner: list[str], cuts: tuple[int, ...], style: ToolFormat) -> None:
    """Half a character that the model spelled out is none that a reply could carry."""
    spelled = "".join(inner)
    found = read(f'{style.opening}{{"name": "add", "arguments": "{spelled}"}}{style.closing}', style, cuts)
    [[name, arguments]] = found.calls
    assert name == "add"
    arguments.encode()
    whole = json.loads(f'"{spelled}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert arguments == whole


@pytest.mark.parametrize("cuts", [(), (1,), (3,), (40, 1)])
@pytest.mark.parametrize("style", [HERMES, JSON, MISTRAL])
def test_calls_beyond_those_that_are_wanted_are_left_out(style: ToolFormat, cuts: tuple[int, ...]) -> None:
    calls = [
        f'{style.opening}{{"name": "{name}", "{style.arguments_key}": {{"n": {number}}}}}{style.closing}'
        for number, name in enumerate(("add", "look_up", "add"))
    ]
    late = f'{style.opening}{{"{style.arguments_key}": {{}}, "name": "add"}}{style.closing}'
    text = style.separator.join([*calls, late])
    for most in (1, 2):
        found = read(text, style, cuts, most_calls=most)
        assert found.calls == [["add", '{"n": 0}'], ["look_up", '{"n": 1}']][:most]
        assert found.content == ""
        assert found.has_whole_calls
    assert len(read(text, style, cuts).calls) == 4
