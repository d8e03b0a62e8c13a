"""The scripts of the mock server, and what a request to it asks for. No IO.

A script comes from the `mock` field of a request's body, over the server's default. Prompts are counted by
a rule that a test can state: a list of ids has its length, a text has as many tokens as words (whatever
whitespace parts). Every generated token is the word `" mock"`, so a text's words are its tokens there, too.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from cluster.errors import ConfigError, InvalidRequest

DEFAULT_MAX_TOKENS = 16


class ErrorShape(Enum):
    NESTED = "nested"  # {"error": {"message", …}}
    FLAT = "flat"  # {"object": "error", "message", …}
    TEXT = "text"  # plain text
    EMPTY = "empty"


def _says(text: str) -> msgspec.Meta:
    """What a field does, for readers and for the mock's `--help`."""
    return msgspec.Meta(description=text)


Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Interval = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds. Counts of `*_after` are tokens sent before it happens."""

    ttft_s: Annotated[Seconds, _says("seconds from the admission of the request to the first token")] = 0.0
    itl_s: Annotated[
        Seconds | Annotated[list[Seconds], msgspec.Meta(min_length=1)],
        _says("seconds between chunks; a list is used from its start again when it ends"),
    ] = 0.0
    num_tokens: Annotated[Count | None, _says("tokens of the answer; null: the request's max_tokens")] = None
    tokens_per_chunk: Annotated[Size, _says("tokens in each chunk")] = 1
    role_chunk: Annotated[bool, _says("chat: a first chunk with the role alone")] = True
    role_s: Annotated[Seconds, _says("seconds from admission to that chunk")] = 0.0
    usage: Annotated[bool, _says("false: no usage, though asked for")] = True
    usage_error: Annotated[int, _says("added to the true completion_tokens")] = 0
    continuous_usage: Annotated[bool, _says("usage in every chunk, also when not asked for")] = False
    token_ids: Annotated[bool, _says("token ids in every chunk")] = False
    cached_tokens: Annotated[Count | None, _says("cached prompt tokens that usage tells of")] = None
    finish_reason: Annotated[str | None, _says("of the last chunk; null: none")] = "length"
    done_mark: Annotated[bool, _says("[DONE] at the end")] = True
    timings: Annotated[
        dict[str, float | int | str] | None, _says("object that comes back as timings in the last chunk")
    ] = None
    error_after: Annotated[Count | None, _says("after so many tokens an error event, then [DONE]")] = None
    cut_after: Annotated[Count | None, _says("after so many tokens the connection is closed")] = None
    reset_after: Annotated[Count | None, _says("after so many tokens the connection is reset")] = None
    end_after: Annotated[
        Count | None,
        _says("after so many tokens the body ends in good order, without finish_reason and [DONE]"),
    ] = None
    stall_after: Annotated[Count | None, _says("after so many tokens nothing more comes")] = None
    http_status: Annotated[
        Annotated[int, msgspec.Meta(ge=200, le=599)],
        _says("other than 200: the request is refused with it, after ttft_s"),
    ] = 200
    error_shape: Annotated[
        ErrorShape, _says("body of a refusal: nested ({error: {message}}), flat, text or empty")
    ] = ErrorShape.NESTED
    message: Annotated[str, _says("of errors and refusals")] = "as scripted"
    heartbeat_s: Annotated[
        Interval | None, _says("seconds between comments while the first token is awaited; null: none")
    ] = None
    split_bytes: Annotated[Size | None, _says("the body is written in slices of so many bytes")] = None
    line_end: Annotated[Literal["\n", "\r\n", "\r"], _says("of the event stream's lines")] = "\n"
    space_after_colon: Annotated[bool, _says("of the event stream's fields")] = True
    framing: Annotated[
        Literal["chunked", "close"], _says("of the body: chunked, or close (ends with the connection)")
    ] = "chunked"
    keep_alive: Annotated[bool, _says("the connection may be used again")] = True
    label: Annotated[str, _says("comes back in /mock/truth")] = ""


def field_help() -> list[tuple[str, str, str]]:
    """(name, default, what it does) of each field of a script."""
    hints = get_type_hints(Script, include_extras=True)
    told = []
    for field in msgspec.structs.fields(Script):
        metas = (one for one in hints[field.name].__metadata__ if isinstance(one, msgspec.Meta))
        [meta] = [one for one in metas if one.description is not None]
        default = msgspec.json.encode(field.default).decode()
        told.append((field.name, default, meta.description or ""))
    return told


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
        raise InvalidRequest(f"the mock's script cannot be read: {_why(error)}", param="mock") from None
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
        raise ConfigError(f"the script `{text}` cannot be read: {_why(error)}") from None


def _why(error: Exception) -> str:
    """What is wrong; where a field is unknown, with those that are known."""
    known = f"; the fields are {', '.join(Script.__struct_fields__)}" if "unknown field" in str(error) else ""
    return f"{error}{known}"
