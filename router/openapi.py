"""What the API takes and gives, for tools that read OpenAPI: made from what requests are checked by.

1. Names, types and ranges of request fields are those of `router.schema`. Fields that are read by hand have
   their shapes here (`_BY_HAND`), and what the operator limits has its numbers (`_bounds`).
2. A null stands for a field that is not sent, everywhere. Fields that are not described are ignored, or
   refused by name (`router.fields`).
3. What depends on the model, or on other fields of the same request, is not in the description.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from router.limits import RequestLimits
from router.openapi_parts import ERROR, ERRORS, RESPONSES
from router.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

_Schema = dict[str, Any]
_STRING: Final[_Schema] = {"type": "string"}
_OBJECT: Final[_Schema] = {"type": "object"}
_IDS: Final[_Schema] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_PARTS: Final[_Schema] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"type": {"const": kind}, kind: _STRING},
                "required": ["type", kind],
            }
            for kind in ("text", "refusal")
        ]
    },
}
_FUNCTION_NAME: Final[_Schema] = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_NAMED: Final[_Schema] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": _STRING}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_MESSAGE: Final[_Schema] = {
    "type": "object",
    "properties": {
        "role": {"enum": ["assistant", "developer", "function", "system", "tool", "user"]},
        "content": {"anyOf": [_STRING, _TEXT_PARTS, {"type": "null"}]},
        "name": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object", "required": ["function"]}},
        "tool_call_id": {"type": ["string", "null"]},
    },
    "required": ["role"],
}
_TOOL: Final[_Schema] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": _FUNCTION_NAME,
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_ALLOWED_TOOLS: Final[_Schema] = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED, "minItems": 1},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
_RESPONSE_FORMAT: Final[_Schema] = {
    "oneOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": _STRING,
                        "schema": {"type": ["object", "boolean", "string"]},
                        "strict": {"type": ["boolean", "null"]},
                    },
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "structural_tag"}},
            "required": ["type", "structures", "triggers"],
        },
    ]
}
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_CHOICES: Final[_Schema] = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
_PATTERN: Final[_Schema] = {"type": "string", "minLength": 1}

# Fields that are checked by functions of their own.
_BY_HAND: Final[dict[str, _Schema]] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "prompt": {
        "anyOf": [
            _STRING,
            {"type": "array", "items": _STRING, "minItems": 1},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1},
        ]
    },
    "stop": {"anyOf": [_PATTERN, {"type": "array", "items": _PATTERN}]},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,18}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "tools": {"type": "array", "items": _TOOL},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED_TOOLS]},
    "response_format": _RESPONSE_FORMAT,
    "structured_outputs": {
        "type": "object",
        "anyOf": [{"required": [kind]} for kind in _KINDS],
    },
    "guided_json": {"type": ["object", "boolean", "string"]},
    "json_schema": {"type": ["object", "boolean", "string"]},
    "guided_regex": _PATTERN,
    "regex": _PATTERN,
    "guided_choice": _CHOICES,
    "guided_grammar": _PATTERN,
    "ebnf": _PATTERN,
    "structural_tag": {"type": ["object", "string"]},
}


def _bounds(limits: RequestLimits) -> dict[str, _Schema]:
    """What the operator limits; a keyword binds values of its own type alone."""
    listed, grammar = {"maxItems": limits.max_listed_ids}, {"maxLength": limits.max_grammar_bytes}
    session, logprobs = {"maxLength": limits.max_session_chars}, {"maximum": limits.max_logprobs}
    word = {"maxLength": limits.max_bad_words_chars}
    stop = {"maxLength": limits.max_stop_chars}
    return {
        "messages": {"maxItems": limits.max_messages},
        "prompt": {"anyOf": [{"items": {"type": "integer"}}, {"maxItems": limits.max_prompts}]},
        "n": {"maximum": limits.max_n},
        "best_of": {"maximum": limits.max_n},
        "stop": {**stop, "maxItems": limits.max_stop_strings, "items": stop},
        "bad_words": {**listed, "items": word},
        "logit_bias": {"maxProperties": limits.max_listed_ids},
        "tools": {"maxItems": limits.max_tools},
        **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), listed),
        **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), logprobs),
        **dict.fromkeys(("session_id", "prompt_cache_key", "user"), session),
        **dict.fromkeys(("guided_regex", "regex", "guided_grammar", "ebnf"), grammar),
    }


def describe(version: str, limits: RequestLimits) -> _Schema:
    """The OpenAPI document."""
    operations = {
        "/v1/chat/completions": _post("Answer a conversation", _request(ChatRequest, limits), "Chat"),
        "/v1/completions": _post("Go on with a text", _request(CompletionRequest, limits), "Completion"),
        "/tokenize": _post(
            "Token ids of a text or a conversation",
            {"anyOf": [_request(kind, limits) for kind in (TokenizeTextRequest, TokenizeChatRequest)]},
            "Tokenized",
        ),
        "/detokenize": _post("Text of token ids", _request(DetokenizeRequest, limits), "Detokenized"),
        "/v1/models": _get("The model that is served", "ModelList"),
        "/v1/models/{model}": _get("One model", "Model", path_name="model"),
        "/health": _get("Whether the process lives", "Status"),
        "/ready": _get("Whether a request can be served; 503 with the phase if not", "Status"),
        "/ping": _get("As /health", "Empty"),
        "/version": _get("Baton's version", "Version"),
        "/openapi.json": _get("This description", "Empty"),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "description": "An OpenAI-compatible LLM server."},
        "paths": operations,
        "components": {
            "schemas": {**RESPONSES, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _request(model: type[BaseModel], limits: RequestLimits) -> _Schema:
    """The body of a request, without references."""
    described = model.model_json_schema()
    parts = described.get("$defs", {})
    required = described.get("required", [])
    bounds = _bounds(limits)
    properties = {}
    for name, shape in described["properties"].items():
        if "$ref" in shape:
            shape = parts[shape["$ref"].rpartition("/")[2]]
        shape = _BY_HAND.get(name, shape)
        if name in bounds:
            shape = {"allOf": [shape, bounds[name]]}
        properties[name] = shape if name in required else _or_null(shape)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "maxProperties": limits.max_fields,
    }


def _or_null(shape: _Schema) -> _Schema:
    """A nested null, too, counts as not sent."""
    inner = {key: value for key, value in shape.items() if key not in ("title", "default")}
    if "properties" in inner and inner.get("additionalProperties") is False:
        parts = inner["properties"].items()
        inner["properties"] = {name: {"anyOf": [part, {"type": "null"}]} for name, part in parts}
    return {"anyOf": [inner, {"type": "null"}]}


def _answers(name: str, *, streams: bool = False) -> _Schema:
    content: _Schema = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    if streams:
        content["text/event-stream"] = {"schema": _STRING}
    return {"200": {"description": "The answer", "content": content}, **ERRORS}


def _post(summary: str, body: _Schema, answer: str) -> _Schema:
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": _answers(answer, streams=answer in ("Chat", "Completion")),
        }
    }


def _get(summary: str, answer: str, path_name: str | None = None) -> _Schema:
    operation: _Schema = {"summary": summary, "responses": _answers(answer)}
    if path_name is not None:
        operation["parameters"] = [{"name": path_name, "in": "path", "required": True, "schema": _STRING}]
    return {"get": operation}
