"""The scripts of the mock server, and what a request to it asks for. No IO.

A script comes from the `mock` field of a request's body, over the server's default. Prompts are counted by
a rule that a test can state: a list of ids has its length, a text has as many tokens as words (whatever
whitespace parts). Every generated token is the word `" mock"`, so a text's words are its tokens there, too.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import msgspec

from cluster.errors import ConfigError, InvalidRequest

DEFAULT_MAX_TOKENS = 16


class ErrorShape(Enum):
    NESTED = "nested"  # {"error": {"message", …}}
    FLAT = "flat"  # {"object": "error", "message", …}
    TEXT = "text"  # plain text
    EMPTY = "empty"


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds. Counts of `*_after` are tokens sent before it happens."""

    ttft_s: float = 0.0  # from the moment the request is admitted to the first chunk with content
    itl_s: float | list[float] = 0.0  # between chunks; a list is used from its start again when it ends
    num_tokens: int | None = None  # None: the request's max_tokens
    tokens_per_chunk: int = 1
    role_chunk: bool = True  # chat: a chunk with the role alone, `role_s` after admission
    role_s: float = 0.0
    usage: bool = True  # False: none, though asked for
    usage_error: int = 0  # added to the true completion_tokens
    continuous_usage: bool = False  # also when not asked for
    token_ids: bool = False
    cached_tokens: int | None = None
    finish_reason: str | None = "length"
    done_mark: bool = True  # the `[DONE]` at the end
    timings: dict[str, float | int | str] | None = None
    error_after: int | None = None  # an error event, then `[DONE]`
    cut_after: int | None = None  # the connection is closed in the middle of the body
    reset_after: int | None = None  # the connection is reset
    end_after: int | None = None  # the body ends in good order, without finish_reason and [DONE]
    stall_after: int | None = None  # nothing more comes
    http_status: int = 200
    error_shape: ErrorShape = ErrorShape.NESTED
    message: str = "as scripted"
    heartbeat_s: float | None = None  # comments while the first token is awaited
    split_bytes: int | None = None  # the body is written in slices of this size
    line_end: str = "\n"
    space_after_colon: bool = True
    framing: str = "chunked"  # "chunked", "close"
    keep_alive: bool = True
    label: str = ""  # comes back in the truth


class Call(NamedTuple):
    """A request, as far as the mock looks at it."""

    is_chat: bool
    is_stream: bool
    wants_usage: bool
    wants_continuous_usage: bool
    prompt_tokens: int
    max_tokens: int
    script: Script


def read_call(body: dict[str, Any], is_chat: bool, default: Script) -> Call:
    """
    Raises:
        InvalidRequest: the body lacks its prompt, or its script has an unknown or wrong field.
    """
    field = body.get("mock", {})
    try:
        script = msgspec.convert(msgspec.to_builtins(default) | field, Script)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"the mock's script cannot be read: {error}", param="mock") from None
    prompt = body.get("messages" if is_chat else "prompt")
    if not prompt:
        raise InvalidRequest("no prompt", param="messages" if is_chat else "prompt")
    options = body.get("stream_options") or {}
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS
    return Call(
        is_chat=is_chat,
        is_stream=bool(body.get("stream")),
        wants_usage=bool(options.get("include_usage")),
        wants_continuous_usage=bool(options.get("continuous_usage_stats")),
        prompt_tokens=count_tokens(prompt),
        max_tokens=max_tokens,
        script=script,
    )


def count_tokens(prompt: object) -> int:
    """Words of a text, length of a list of ids, words of all messages' contents."""
    if isinstance(prompt, str):
        return len(prompt.split())
    if isinstance(prompt, list):
        if all(isinstance(item, int) for item in prompt):
            return len(prompt)
        return sum(count_tokens(item.get("content") if isinstance(item, dict) else item) for item in prompt)
    return 0


def read_script(text: str) -> Script:
    """A script written as JSON.

    Raises:
        ConfigError: not JSON, or an unknown or wrong field.
    """
    try:
        return msgspec.json.decode(text.encode(), type=Script)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the script `{text}` cannot be read: {error}") from None
