"""Chat messages as a template wants them: plain dictionaries whose content is one string. Pure.

1. `flatten_messages` checks the shape, joins lists of text parts and turns an absent content into "".
2. `continue_last` makes the end of the last message findable in the rendered text, so that the prompt can be
   cut exactly there whatever the template does around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequest

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_PART_SEPARATOR = "\n"  # vLLM and llama.cpp put parts on lines of their own too


def flatten_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with string contents; keys whose value is None are left out.

    Raises:
        InvalidRequest: no messages, no role, or a content that is neither text nor text parts.
    """
    if not messages:
        raise InvalidRequest("at least one message is needed", param="messages")
    flat = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest("a message is an object with a `role`", param=f"messages[{index}]")
        content = _content_text(message.get("content"), f"messages[{index}].content")
        flat.append(
            {key: value for key, value in message.items() if value is not None} | {"content": content}
        )
    return flat


def continue_last(
    messages: Sequence[dict[str, Any]], add_generation_prompt: bool
) -> tuple[list[dict[str, Any]], str]:
    """(messages with a marker at the end of the last one's content, the marker). The marker is plain letters
    and digits that occur nowhere else, so no template trims, escapes or duplicates part of it.

    Raises:
        InvalidRequest: both flags are set, or the last message is not the assistant's.
    """
    if add_generation_prompt:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other",
            param="continue_final_message",
        )
    last = messages[-1]
    if last["role"] != "assistant":
        raise InvalidRequest(
            f"only an assistant message can be continued; the last one is from `{last['role']}`",
            param="continue_final_message",
        )
    haystack = repr(messages)
    number = 0
    while (marker := f"CONTINUE{number}HERE") in haystack:
        number += 1
    return [*messages[:-1], last | {"content": last["content"] + marker}], marker


def _content_text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest("the content of a message is a string or a list of parts", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise InvalidRequest(
                f"unsupported content part `{kind}`: this model takes text only", param=where
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest("a text part needs a `text` string", param=where)
        texts.append(text)
    return _PART_SEPARATOR.join(texts)
