"""Tools a request offers, and what it wants of them, checked before anything is queued.

1. `parse_tools`: names and descriptions by OpenAI's rules. What is wrong with a schema of parameters is found
   when its grammar is compiled (`router.tool_formats`).
2. `parse_tool_choice`: none, auto, required, one tool by name, or some of them (`allowed_tools`).

How calls look in the model's text is the business of `router.tool_formats` and `router.tool_parser`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from cluster.errors import InvalidRequest
from cluster.grammar import dumps
from router.limits import RequestLimits

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters`: the schema of its arguments, always an object's. `strict`: it holds in every detail."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        function: dict[str, Any] = {"name": self.name, "parameters": dict(self.parameters)}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolUse(Enum):
    """What the answer is to do with the tools."""

    NONE = auto()  # they are not shown to the model
    AUTO = auto()
    REQUIRED = auto()  # at least one call, and nothing else


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`tools`: those the answer may call; with a named choice that one. `shown`: what the model knows of: all
    of them, so that the prompt's prefix is the same from one choice to the next."""

    use: ToolUse
    tools: tuple[Tool, ...]
    shown: tuple[Tool, ...]
    parallel: bool


def parse_tools(value: Any, limits: RequestLimits) -> tuple[Tool, ...]:
    """Raises:
    InvalidRequest: naming the element at fault, e.g. `tools[1].function.name`.
    """
    if not isinstance(value, list):
        raise InvalidRequest("`tools` must be a list of tools.", param="tools")
    if len(value) > limits.max_tools:
        raise InvalidRequest(f"`tools` may have at most {limits.max_tools} tools.", param="tools")
    tools = tuple(_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            where = f"tools[{index}].function.name"
            raise InvalidRequest(f"`{where}`: two tools are called `{tool.name}`.", param=where)
        seen.add(tool.name)
    try:
        num_bytes = sum(len(dumps(tool.for_template()).encode()) for tool in tools)
    except ValueError as error:
        raise InvalidRequest(f"`tools` cannot be used: {error}.", param="tools") from None
    if num_bytes > limits.max_grammar_bytes:
        raise InvalidRequest(f"`tools` may have at most {limits.max_grammar_bytes} bytes.", param="tools")
    return tools


def _parse_tool(value: Any, where: str) -> Tool:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise InvalidRequest(f"`{where}.type` must be `function`.", param=f"{where}.type")
    function = value.get("function")
    where = f"{where}.function"
    if not isinstance(function, dict):
        raise InvalidRequest(f"`{where}` must be an object with a `name`.", param=where)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"`{where}.name` must be 1 to 64 letters, digits, dots, dashes or underscores.",
            param=f"{where}.name",
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"`{where}.description` must be a string.", param=f"{where}.description")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"`{where}.strict` must be a boolean.", param=f"{where}.strict")
    return Tool(name, description or "", _parse_parameters(function.get("parameters"), where), bool(strict))


def _parse_parameters(value: Any, where: str) -> Mapping[str, Any]:
    where = f"{where}.parameters"
    if value is None or value == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise InvalidRequest(f"`{where}` must be the JSON schema of an object.", param=where)
    if not isinstance(value.get("properties", {}), dict):
        raise InvalidRequest(f"`{where}.properties` must be an object.", param=f"{where}.properties")
    required = value.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequest(f"`{where}.required` must be a list of names.", param=f"{where}.required")
    return {"type": "object", **value}


def parse_tool_choice(value: Any, tools: Sequence[Tool], parallel: bool) -> ToolPlan | None:
    """What to do with the tools; None if there is nothing to do. `value` None: not sent.

    Raises:
        InvalidRequest: no such choice, or no such tool.
    """
    if not tools:
        if value in (None, "none"):
            return None
        raise InvalidRequest("`tool_choice` needs `tools`.", param="tool_choice")
    every = tuple(tools)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        use, some = _allowed(value, every)
        return ToolPlan(use, some, every, parallel)
    if isinstance(value, dict):
        named = _named(value, every)
        return ToolPlan(ToolUse.REQUIRED, (named,), every, parallel=False)
    uses = {None: ToolUse.AUTO, "auto": ToolUse.AUTO, "required": ToolUse.REQUIRED, "none": ToolUse.NONE}
    if not isinstance(value, str | None) or value not in uses:
        raise InvalidRequest(
            "`tool_choice` must be `none`, `auto`, `required` or an object that names a function.",
            param="tool_choice",
        )
    use = uses[value]
    return None if use is ToolUse.NONE else ToolPlan(use, every, every, parallel)


def _allowed(value: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[ToolUse, tuple[Tool, ...]]:
    """Some of the tools, as OpenAI's clients name them; the model is shown all."""
    inner = value.get("allowed_tools")
    mode, names = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
    uses = {"auto": ToolUse.AUTO, "required": ToolUse.REQUIRED}
    if not isinstance(mode, str) or mode not in uses or not isinstance(names, list) or not names:
        raise InvalidRequest(
            '`tool_choice.allowed_tools` must be an object with a `mode`, "auto" or "required", and `tools`.',
            param="tool_choice",
        )
    wanted = [_named(name if isinstance(name, dict) else {}, tools) for name in names]
    return uses[mode], tuple({tool.name: tool for tool in wanted}.values())


def _named(value: Mapping[str, Any], tools: Sequence[Tool]) -> Tool:
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if value.get("type") != "function" or not isinstance(name, str):
        raise InvalidRequest(
            '`tool_choice` must look like {"type": "function", "function": {"name": …}}.', param="tool_choice"
        )
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidRequest(
        f"`tool_choice` names `{name[:64]}`, which is not one of `tools`.", param="tool_choice"
    )
