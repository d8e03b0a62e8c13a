"""What an answer has to look like, in the many spellings clients use: one value, one grammar.

Spellings: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`, SGLang's `regex`,
`ebnf` and `json_schema`. A request may use one. Every kind becomes a `Constraint`: a whole grammar, or a rule
of one that also offers tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest
from cluster.grammar import (
    choice_grammar,
    choice_rule,
    dumps,
    foreign_grammar,
    json_grammar,
    json_rule,
    regex_grammar,
    regex_rule,
    tag_grammar,
)
from cluster.grammar_size import GrammarBounds
from router import nested_json
from router.limits import RequestLimits

SPELLINGS = frozenset(
    {
        *("response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("json_schema", "regex", "ebnf", "structural_tag"),
    }
)
_OPTIONS = frozenset({"disable_fallback", "disable_any_whitespace", "disable_additional_properties"})


@dataclass(frozen=True, slots=True)
class Constraint:
    """`param`: the field it came from. `rule` None: it can only be a grammar of its own."""

    param: str
    grammar: str
    rule: str | None


def parse_constraint(fields: Mapping[str, Any], limits: RequestLimits) -> Constraint | None:
    """The constraint of a request; `fields` are those of `SPELLINGS` that it has. None: any text will do.

    Raises:
        InvalidRequest: a field is not what it must be, too large or deep, or not the only one.
    """
    found = [part for name, value in fields.items() if (part := _read(name, value)) is not None]
    if len(found) > 1:
        raise InvalidRequest(
            f"`{found[0][1]}` and `{found[1][1]}` exclude each other: an answer has one format.",
            param=found[1][1],
        )
    if not found:
        return None
    build, param, value = found[0]
    try:
        if len((value if isinstance(value, str) else dumps(value)).encode()) > limits.max_grammar_bytes:
            most = limits.max_grammar_bytes
            raise InvalidRequest(f"`{param}` may have at most {most} bytes.", param=param)
        nested_json.check_depth(value, limits.max_json_depth)  # it may have come as JSON in a string
        grammar, rule = build(value, limits.grammar)
    except ValueError as error:
        raise InvalidRequest(f"`{param}` cannot be used: {str(error)[:200]}.", param=param) from None
    return Constraint(param, grammar, rule)


_Build = Callable[[Any, GrammarBounds], tuple[str, str | None]]
_Found = tuple[_Build, str, Any]


def _read(name: str, value: Any) -> _Found | None:
    match name:
        case "response_format":
            return _response_format(value)
        case "structured_outputs":
            return _structured_outputs(value)
        case "guided_json" | "json_schema":
            return _json(value, name)
        case "guided_regex" | "regex":
            return _regex(value, name)
        case "guided_choice":
            return _choice(value, name)
        case "guided_grammar" | "ebnf":
            return _grammar(value, name)
        case _:
            return _tags(value, name)


def _response_format(value: Any) -> _Found | None:
    where = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return _build_json, where, {"type": "object"}
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict):
                raise _must_be(f"{where}.json_schema", "an object with a `schema`")
            if not isinstance(inner.get("name", ""), str):
                raise _must_be(f"{where}.json_schema.name", "a string")
            strict = inner.get("strict")
            if strict is not None and not isinstance(strict, bool):
                raise _must_be(f"{where}.json_schema.strict", "a boolean")
            return _json(inner.get("schema"), f"{where}.json_schema.schema", lenient=strict is False)
        case "structural_tag":
            return _tags(value, where)
        case _:
            raise _must_be(f"{where}.type", "`text`, `json_object`, `json_schema` or `structural_tag`")


def _structured_outputs(value: Any) -> _Found | None:
    where = "structured_outputs"
    if not isinstance(value, dict):
        raise _must_be(where, "an object")
    readers: dict[str, Callable[[Any, str], _Found | None]] = {
        "json": _json,
        "regex": _regex,
        "choice": _choice,
        "grammar": _grammar,
        "json_object": _json_object,
        "structural_tag": _tags,
    }
    found: list[_Found] = []
    for name, item in value.items():
        if item is None or (name in _OPTIONS and item is False):
            continue
        if name not in readers:
            raise InvalidRequest(
                f"`{where}.{name[:64]}` is not supported.",
                param=f"{where}.{name[:64]}",
                code="unsupported_parameter",
            )
        part = readers[name](item, f"{where}.{name}")
        if part is not None:
            found.append(part)
    if len(found) != 1:
        kinds = ", ".join(f"`{name}`" for name in readers)
        raise InvalidRequest(f"`{where}` must have exactly one of {kinds}.", param=where)
    return found[0]


# ---- kinds ---------------------------------------------------------------------------------------


def _json(value: Any, where: str, *, lenient: bool = False) -> _Found:
    """A schema, as an object or as JSON in a string."""
    schema = value
    if isinstance(schema, str):
        try:
            schema = nested_json.loads(schema)
        except ValueError:
            raise _must_be(where, "a JSON schema") from None
    if not isinstance(schema, dict | bool):
        raise _must_be(where, "a JSON schema")
    return (_build_lenient_json if lenient else _build_json), where, schema


def _json_object(value: Any, where: str) -> _Found | None:
    if not isinstance(value, bool):
        raise _must_be(where, "a boolean")
    return (_build_json, where, {"type": "object"}) if value else None


def _regex(value: Any, where: str) -> _Found:
    if not isinstance(value, str) or not value:
        raise _must_be(where, "a regular expression")
    return _build_regex, where, value


def _choice(value: Any, where: str) -> _Found:
    if not isinstance(value, list) or not value or not all(isinstance(x, str) and x for x in value):
        raise _must_be(where, "a list of at least one text")
    return _build_choice, where, value


def _grammar(value: Any, where: str) -> _Found:
    if not isinstance(value, str) or not value.strip():
        raise _must_be(where, "a grammar")
    return _build_grammar, where, value


def _tags(value: Any, where: str) -> _Found:
    """`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, as an object or JSON in a string."""
    if isinstance(value, str):
        try:
            value = nested_json.loads(value)
        except ValueError:
            value = None
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise _must_be(where, "an object with `structures` and `triggers`")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise _must_be(f"{where}.triggers", "a list of texts")
    tags = []
    for index, item in enumerate(structures):
        at = f"{where}.structures[{index}]"
        begin, end = (item.get("begin"), item.get("end", "")) if isinstance(item, dict) else (None, None)
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(item.get("schema"), dict):
            raise _must_be(at, "an object with `begin`, `schema` and `end`")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise _must_be(f"{at}.begin", "a text that starts with one of the triggers")
        tags.append((trigger, begin, item["schema"], end))
    return _build_tags, where, tags


def _build_json(schema: Any, bounds: GrammarBounds) -> tuple[str, str | None]:
    return json_grammar(schema, bounds), json_rule(schema, bounds)


def _build_lenient_json(schema: Any, bounds: GrammarBounds) -> tuple[str, str | None]:
    return json_grammar(schema, bounds, lenient=True), json_rule(schema, bounds, lenient=True)


def _build_regex(pattern: str, bounds: GrammarBounds) -> tuple[str, str | None]:
    return regex_grammar(pattern, bounds), regex_rule(pattern, bounds)


def _build_choice(choices: list[str], bounds: GrammarBounds) -> tuple[str, str | None]:
    return choice_grammar(choices), choice_rule(choices)  # texts repeat nothing


def _build_grammar(text: str, bounds: GrammarBounds) -> tuple[str, str | None]:
    return foreign_grammar(text, bounds), None


def _build_tags(tags: list[tuple[str, str, Any, str]], bounds: GrammarBounds) -> tuple[str, str | None]:
    return tag_grammar(tags, bounds), None


def _must_be(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"`{where}` must be {what}.", param=where)
