"""How models write tool calls: one `ToolFormat` per family, found by what the chat template says.

    hermes   <tool_call>
             {"name": "f", "arguments": {…}}
             </tool_call>                          Hermes, Qwen, SmolLM and many more
    json     {"name": "f", "parameters": {…}}      Llama 3: the call is the whole answer
    mistral  [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]
                                                   Mistral 7B v0.3; the mark, a special token, is not shown

1. `format_of` picks the format. A template that knows no tools is told of them in Hermes' words
   (`with_instructions`), so every model can be offered tools.
2. `call_grammar` is what the answer must match where calls are required, or a tool is strict; arguments then
   fit their schema.
3. The text of an answer is read by `router.tool_parser` with the same format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest
from cluster.grammar import Grammars, dumps, json_grammar, json_rule, lark_grammar, literal
from cluster.grammar_size import BOUNDS, GrammarBounds
from router.constraint import Constraint
from router.messages import ChatMessage
from router.tools import ToolPlan, ToolUse


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opening` and `closing` are what stands around a call's JSON object; `separator` between two calls;
    `heads` may come before the first one, in this order, and `tail` after the last. `id_chars`: how long the
    template wants the ids of calls to be; 0: it does not care."""

    name: str
    opening: str
    closing: str
    separator: str
    arguments_key: str
    heads: tuple[str, ...] = ()
    tail: str = ""
    id_chars: int = 0

    @property
    def mark(self) -> str:
        """By what a call is recognized in a text; empty: the whole answer is calls, or none is."""
        return self.opening.strip()

    @property
    def end_mark(self) -> str:
        return self.closing.strip()


HERMES = ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n", "arguments")
JSON = ToolFormat("json", "", "", "; ", "parameters")
MISTRAL = ToolFormat("mistral", "", "", ", ", "arguments", ("[TOOL_CALLS]", "["), "]", 9)
FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, JSON, MISTRAL)}

_READS_TOOLS = re.compile(r"\btools\b")


def knows_tools(template: str | None) -> bool:
    """Whether a chat template tells the model of tools."""
    return template is not None and _READS_TOOLS.search(template) is not None


def format_of(template: str | None) -> ToolFormat:
    """What a model with this template writes."""
    if template is None or not knows_tools(template) or HERMES.mark in template:
        return HERMES
    if MISTRAL.heads[0] in template and "[ARGS]" not in template:  # its later models write names apart
        return MISTRAL
    return JSON if '"parameters"' in template else HERMES


# ---- grammars ------------------------------------------------------------------------------------


def check_tools(plan: ToolPlan, grammars: Grammars, bounds: GrammarBounds) -> None:
    """Raises:
    InvalidRequest: a tool's parameters are no schema, or a strict tool's one that cannot be enforced.
    """
    for index, tool in enumerate(plan.shown):
        where = f"tools[{index}].function.parameters"
        try:
            grammar = json_grammar(tool.parameters, bounds, lenient=not tool.strict)
            grammars.check(grammar, where)
        except ValueError as error:
            raise InvalidRequest(f"`{where}` cannot be used: {error}.", param=where) from None


def call_grammar(
    plan: ToolPlan, style: ToolFormat, constraint: Constraint | None, bounds: GrammarBounds = BOUNDS
) -> str:
    """What the answer must match; empty if anything may come. With `auto` and a constraint: calls, or what
    the constraint says. With `auto` and a strict tool: text, in which calls fit.

    Raises:
        InvalidRequest: the constraint cannot be combined with tools.
    """
    calls = _call_rules(plan, style, bounds)
    if plan.use is ToolUse.REQUIRED:
        return lark_grammar("\n".join(["start: calls", *calls]), bounds)
    if constraint is None:
        if not any(tool.strict for tool in plan.tools):
            return ""
        return lark_grammar("\n".join([*_text_with_calls(style), *calls]), bounds)
    if constraint.rule is None:
        raise InvalidRequest(
            f"`{constraint.param}` cannot be combined with `tools`: use a JSON schema, expression or choice.",
            param=constraint.param,
        )
    return lark_grammar("\n".join(["start: calls | answer", f"answer: {constraint.rule}", *calls]), bounds)


def _call_rules(plan: ToolPlan, style: ToolFormat, bounds: GrammarBounds) -> list[str]:
    """Rules for `calls` and their parts."""
    more = f" ({literal(style.separator)} call)*" if plan.parallel else ""
    around = [literal(text) if text else "" for text in (style.opening, style.closing)]
    ends = (style.heads[-1] if style.heads else "", style.tail)
    head, tail = (literal(text) if text else "" for text in ends)
    rules = [f"calls: {head} call{more} {tail}", f"call: {around[0]} body {around[1]}"]
    rules.append("body: " + " | ".join(f"call_{index}" for index in range(len(plan.tools))))
    for index, tool in enumerate(plan.tools):
        head = literal(f'{{"name": {dumps(tool.name)}, "{style.arguments_key}": ')
        schema = json_rule(tool.parameters, bounds, lenient=not tool.strict)
        rules.append(f"call_{index}: {head} {schema} {literal('}')}")
    return rules


def _text_with_calls(style: ToolFormat) -> list[str]:
    """`start`: any text, but what looks like a call is one."""
    if not style.mark:
        first = "\\[" if style.heads else "{"
        return ["start: calls | text", f"text: /([^{first}](.|\\n)*)?/"]
    rest = style.opening[len(style.mark) :]
    return [
        "%llguidance {}",
        "start: in_text* end",
        f"in_text: head {literal(rest)} body {literal(style.closing)}",
        f"head[lazy]: TEXT {literal(style.mark)}",
        "end: TEXT",
        "TEXT: /(.|\\n)*/",
    ]


# ---- templates that know no tools ----------------------------------------------------------------


def with_instructions(messages: Sequence[ChatMessage], plan: ToolPlan | None) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools: they are described in the system message, calls are
    part of the assistant's text, and results come from the user."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            shown.append({"role": "user", "content": text})
            continue
        calls = [
            HERMES.opening + dumps({"name": call.name, "arguments": call.arguments}) + HERMES.closing
            for call in message.tool_calls
        ]
        content = "\n".join([*([message.content] if message.content else []), *calls])
        shown.append({"role": message.role, "content": content})
    if plan is None:
        return shown
    instructions = _instructions(plan)
    if shown and shown[0]["role"] == "system":
        shown[0]["content"] = f"{shown[0]['content']}\n\n{instructions}"
        return shown
    return [{"role": "system", "content": instructions}, *shown]


def _instructions(plan: ToolPlan) -> str:
    lines = "\n".join(dumps(tool.for_template()) for tool in plan.shown)
    example = f'{HERMES.opening}{{"name": <name>, "arguments": <arguments>}}{HERMES.closing}'
    return (
        "You can call these functions. Each line describes one, with the JSON schema of its arguments:\n"
        f"<tools>\n{lines}\n</tools>\n"
        f"To call one, answer with its name and arguments as JSON, like this:\n{example}"
    )
