"""The four shapes of a completion prompt: text, list of texts, token ids, list of lists of token ids."""

from __future__ import annotations

from typing import Any

from cluster.errors import InvalidRequest
from router.limits import RequestLimits

Prompt = str | tuple[int, ...]


def parse_prompts(value: Any, limits: RequestLimits) -> tuple[Prompt, ...]:
    """The prompts of one request, in order.

    Raises:
        InvalidRequest: naming the element at fault, e.g. `prompt[1]`.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise InvalidRequest("`prompt` must be text, token ids, or a list of either.", param="prompt")
    if not value:
        raise InvalidRequest("`prompt` must not be empty.", param="prompt")
    if type(value[0]) is int:
        return (_ids(value, "prompt"),)
    if len(value) > limits.max_prompts:
        raise InvalidRequest(f"`prompt` may hold at most {limits.max_prompts} prompts.", param="prompt")
    return tuple(_parse_one(item, type(value[0]), f"prompt[{index}]") for index, item in enumerate(value))


def _parse_one(value: Any, kind: type, where: str) -> Prompt:
    if type(value) is kind and kind is str:
        return str(value)
    if type(value) is kind and kind is list:
        return _ids(value, where)
    raise InvalidRequest(f"`{where}` must be text or token ids, and all prompts of one kind.", param=where)


def _ids(value: Any, where: str) -> tuple[int, ...]:
    if not value:
        raise InvalidRequest(f"`{where}` must not be empty.", param=where)
    for index, item in enumerate(value):
        if type(item) is not int or item < 0:
            raise InvalidRequest(f"`{where}[{index}]` must be a token id.", param=f"{where}[{index}]")
    return tuple(value)
