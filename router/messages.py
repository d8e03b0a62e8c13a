"""Chat messages as sent, checked: text only, one role each, nothing dropped.

Content is a string or a list of text parts; parts are joined with a newline, in order, for every role.
`developer` is OpenAI's newer name of `system` and is rendered as that. `name` is the client's label of a
speaker, which chat templates do not render; `cache_control` asks for prefix caching, which is always on.
What belongs to tools, images or audio is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields that clients copy from an earlier answer, and the values in which they say nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


def parse_messages(value: Any) -> tuple[ChatMessage, ...]:
    """The conversation.

    Raises:
        InvalidRequest: naming the element at fault, e.g. `messages[2].content[0].type`.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequest("`messages` must be a list of at least one message.", param="messages")
    return tuple(_parse_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _parse_message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidRequest(f"`{where}` must be an object with `role` and `content`.", param=where)
    role = value.get("role")
    if role == "tool" or role == "function":
        raise _unsupported(f"{where}.role", "tool calls are not served yet")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(
            f"`{where}.role` must be one of: {', '.join(sorted(_ROLES))}.", param=f"{where}.role"
        )
    for name, field in value.items():
        if name in ("role", "content") or field is None:
            continue
        if name == "name":
            if not isinstance(field, str):
                raise InvalidRequest(f"`{where}.name` must be a string.", param=f"{where}.name")
        elif name not in _NEUTRAL:
            raise InvalidRequest(
                f"Unknown field: `{where}.{name[:64]}`.",
                param=f"{where}.{name[:64]}",
                code="unknown_parameter",
            )
        elif field not in _NEUTRAL[name]:
            raise _unsupported(f"{where}.{name}", "only text content is served")
    return ChatMessage(_ROLES[role], _parse_content(value.get("content"), f"{where}.content"))


def _parse_content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"`{where}` must be a string or a list of text parts.", param=where)
    return "\n".join(_parse_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _parse_part(value: Any, where: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise InvalidRequest(f'`{where}` must be an object like {{"type": "text", "text": …}}.', param=where)
    if value["type"] != "text":
        raise _unsupported(f"{where}.type", "the model reads text only")
    text = value.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"`{where}.text` must be a string.", param=f"{where}.text")
    for name, field in value.items():
        if name not in ("type", "text", "cache_control") and field is not None:
            raise InvalidRequest(
                f"Unknown field: `{where}.{name[:64]}`.",
                param=f"{where}.{name[:64]}",
                code="unknown_parameter",
            )
    return text


def _unsupported(where: str, hint: str) -> InvalidRequest:
    return InvalidRequest(f"`{where}` is not supported: {hint}.", param=where, code="unsupported_parameter")
