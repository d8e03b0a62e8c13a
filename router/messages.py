"""Chat messages as sent, checked: text only, one role each, nothing dropped.

Content is a string or a list of text parts; parts are joined with a newline, in order, for every role.
`developer` is OpenAI's newer name of `system` and is rendered as that; `function` is the older name of
`tool`. `name` is the client's label of a speaker; `cache_control` asks for prefix caching, which is always
on. Tool calls of an earlier answer reach the template with their arguments as an object, as templates
expect; arguments that were cut short, as text. What belongs to images or audio is refused by name.

Whatever an answer of this server was, it can be sent back as a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest
from router import nested_json
from router.fields import MESSAGE_LABELS
from router.limits import RequestLimits

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
# Fields that clients copy from an earlier answer, and the values in which they say nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "annotations": ([],),
    "audio": (),
}
_STRINGS = frozenset({"name", "tool_call_id", "refusal", "reasoning", "reasoning_content"})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an earlier answer made."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`ignored`: fields that say nothing to a template."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    ignored: tuple[str, ...] = ()

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it; what was not sent is not there."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            fields["name"] = self.name
        if self.reasoning is not None:
            fields["reasoning_content"] = self.reasoning
        return fields


def parse_messages(value: Any, limits: RequestLimits) -> tuple[ChatMessage, ...]:
    """The conversation.

    Raises:
        InvalidRequest: naming the element at fault, e.g. `messages[2].content[0].type`.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequest("`messages` must be a list of at least one message.", param="messages")
    if len(value) > limits.max_messages:
        raise InvalidRequest(f"`messages` may have at most {limits.max_messages} messages.", param="messages")
    depth = limits.max_json_depth
    return tuple(_parse_message(message, f"messages[{index}]", depth) for index, message in enumerate(value))


def _parse_message(value: Any, where: str, max_depth: int) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidRequest(f"`{where}` must be an object with `role` and `content`.", param=where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(
            f"`{where}.role` must be one of: {', '.join(sorted(_ROLES))}.", param=f"{where}.role"
        )
    strings: dict[str, str] = {}
    calls: tuple[ToolCall, ...] = ()
    ignored: list[str] = []
    for name, field in value.items():
        if name in ("role", "content", "cache_control") or field is None:
            continue
        if name in _STRINGS:
            if not isinstance(field, str):
                raise InvalidRequest(f"`{where}.{name}` must be a string.", param=f"{where}.{name}")
            strings[name] = field
        elif name == "tool_calls":
            calls = _parse_calls(field, f"{where}.tool_calls", max_depth)
        elif name in MESSAGE_LABELS:
            ignored.append(name)
        elif name not in _NEUTRAL:
            raise _unknown(f"{where}.{name[:64]}")
        elif field not in _NEUTRAL[name]:
            raise _unsupported(f"{where}.{name}", "only text content is served")
    if calls and role != "assistant":
        raise InvalidRequest(
            f"`{where}.tool_calls`: only the assistant calls tools.", param=f"{where}.tool_calls"
        )
    content = value.get("content")
    has_calls = value.get("tool_calls") is not None  # an empty list, too: of a call that was cut in its name
    if content is None and role == "assistant" and (has_calls or "refusal" in strings):
        content = strings.get("refusal", "")
    return ChatMessage(
        _ROLES[role],
        _parse_content(content, f"{where}.content"),
        calls,
        strings.get("tool_call_id"),
        strings.get("name"),
        strings.get("reasoning_content") or strings.get("reasoning") or None,
        tuple(ignored),
    )


# ---- tool calls ----------------------------------------------------------------------------------


def _parse_calls(value: Any, where: str, max_depth: int) -> tuple[ToolCall, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"`{where}` must be a list of tool calls.", param=where)
    return tuple(_parse_call(call, f"{where}[{index}]", max_depth) for index, call in enumerate(value))


def _parse_call(value: Any, where: str, max_depth: int) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise InvalidRequest(f"`{where}` must be a call of a function.", param=where)
    call_id, name = value.get("id", ""), function.get("name")
    if not isinstance(call_id, str):
        raise InvalidRequest(f"`{where}.id` must be a string.", param=f"{where}.id")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"`{where}.function.name` must be a name.", param=f"{where}.function.name")
    where = f"{where}.function.arguments"
    return ToolCall(call_id, name, _parse_arguments(function.get("arguments"), where, max_depth))


def _parse_arguments(value: Any, where: str, max_depth: int) -> Mapping[str, Any] | str:
    """JSON in a string, as answers have it; nothing at all counts as no arguments. What is no JSON, as of a
    call that was cut by `max_tokens`, or too deep, stays text."""
    arguments = {} if value is None or value == "" else value
    if isinstance(arguments, str):
        try:
            arguments = nested_json.loads(arguments, max_depth)
        except ValueError:
            return str(value)
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"`{where}` must be a JSON object in a string.", param=where)
    return arguments


# ---- content -------------------------------------------------------------------------------------


def _parse_content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"`{where}` must be a string or a list of text parts.", param=where)
    return "\n".join(_parse_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _parse_part(value: Any, where: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise InvalidRequest(f'`{where}` must be an object like {{"type": "text", "text": …}}.', param=where)
    kind = value["type"]
    if kind not in ("text", "refusal"):
        raise _unsupported(f"{where}.type", "the model reads text only")
    text = value.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"`{where}.{kind}` must be a string.", param=f"{where}.{kind}")
    for name, field in value.items():
        if name not in ("type", kind, "cache_control") and field is not None:
            raise _unknown(f"{where}.{name[:64]}")
    return text


def _unknown(where: str) -> InvalidRequest:
    return InvalidRequest(f"Unknown field: `{where}`.", param=where, code="unknown_parameter")


def _unsupported(where: str, hint: str) -> InvalidRequest:
    return InvalidRequest(f"`{where}` is not supported: {hint}.", param=where, code="unsupported_parameter")
