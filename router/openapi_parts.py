"""The answers of the API as JSON Schema, for its description (`router.openapi`)."""

from __future__ import annotations

from typing import Any, Final

_Schema = dict[str, Any]


def _object(**properties: _Schema) -> _Schema:
    """All of them are always there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


_STRING: Final[_Schema] = {"type": "string"}
_MAYBE_STRING: Final[_Schema] = {"type": ["string", "null"]}
_NUMBER: Final[_Schema] = {"type": "integer", "minimum": 0}
_USAGE: Final = _object(
    prompt_tokens=_NUMBER,
    completion_tokens=_NUMBER,
    total_tokens=_NUMBER,
    prompt_tokens_details=_object(cached_tokens=_NUMBER),
)
_FINISH_REASON: Final[_Schema] = {"enum": ["stop", "length", "tool_calls"]}
_LOGPROBS: Final[_Schema] = {"type": ["object", "null"]}
_CALL: Final = _object(
    id=_STRING, type={"const": "function"}, function=_object(name=_STRING, arguments=_STRING)
)
_MESSAGE: Final = _object(role={"const": "assistant"}, content=_MAYBE_STRING, refusal=_MAYBE_STRING)
_MESSAGE["properties"]["tool_calls"] = _list(_CALL)
_MODEL: Final = _object(
    id=_STRING,
    object={"const": "model"},
    created=_NUMBER,
    owned_by=_STRING,
    root=_STRING,
    max_model_len=_NUMBER,
    default_sampling={"type": "object"},
)


def _reply(kind: str, **shown: _Schema) -> _Schema:
    choice = _object(index=_NUMBER, logprobs=_LOGPROBS, finish_reason=_FINISH_REASON, **shown)
    return _object(
        id=_STRING,
        object={"const": kind},
        created=_NUMBER,
        model=_STRING,
        choices=_list(choice),
        usage=_USAGE,
    )


RESPONSES: Final[dict[str, _Schema]] = {
    "Chat": _reply("chat.completion", message=_MESSAGE),
    "Completion": _reply("text_completion", text=_STRING),
    "Tokenized": _object(
        count=_NUMBER,
        max_model_len=_NUMBER,
        tokens=_list(_NUMBER),
        token_strs={"type": ["array", "null"], "items": _STRING},
    ),
    "Detokenized": _object(prompt=_STRING),
    "Model": _MODEL,
    "ModelList": _object(object={"const": "list"}, data=_list(_MODEL)),
    "Status": _object(status=_STRING),
    "Version": _object(version=_STRING),
    "Empty": {"type": "object"},
}
ERROR: Final = _object(error=_object(message=_STRING, type=_STRING, param=_MAYBE_STRING, code=_MAYBE_STRING))
_ERROR_CONTENT: Final = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
ERRORS: Final[_Schema] = {"default": {"description": "An error", "content": _ERROR_CONTENT}}
