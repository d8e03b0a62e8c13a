"""What no grammar can follow in a JSON schema, left out where the schema is a wish and not a promise.

Schemas of tools come from generators: zod writes a look-ahead into the pattern of an e-mail address, pydantic
into that of a decimal. The model is shown the schema as it is; what it writes is held to the rest.

1. Only what is right but beyond a grammar goes: patterns that look around or back, and references to other
   documents. A pattern that is none stays, and is complained of when the grammar is compiled.
2. Data is not touched: a `const` or a `default` may hold what looks like a schema, and a property may be
   called `pattern`.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

# `(?=`, `(?!`, `(?<=`, `(?<!`; `\1`, `\k<name>`; an escaped character is no beginning of any.
_BEYOND: Final = re.compile(r"(?:[^\\]|\\.)*?(?:\(\?<?[=!]|\\[1-9]|\\k<)", re.DOTALL)
_DATA: Final = frozenset({"const", "enum", "default", "examples", "example"})
_BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


def can_be_followed(pattern: str) -> bool:
    """Whether a regular expression does without looking around and back."""
    return _BEYOND.match(pattern) is None


def followable(schema: Any) -> Any:
    """The schema, or a copy without the parts that cannot be followed; nested as deep as the schema is."""
    if isinstance(schema, list):
        return [followable(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value if name in _DATA else _by_name(name, value) if name in _BY_NAME else followable(value)
        for name, value in schema.items()
        if not _is_beyond(name, value)
    }


def _by_name(keyword: str, schemas: Any) -> Any:
    """Of a keyword whose value maps names to schemas."""
    if not isinstance(schemas, Mapping):
        return schemas
    keeps: Callable[[str], bool] = can_be_followed if keyword == "patternProperties" else lambda name: True
    return {name: followable(part) for name, part in schemas.items() if keeps(name)}


def _is_beyond(name: str, value: Any) -> bool:
    if not isinstance(value, str):
        return False
    if name == "pattern":
        return not can_be_followed(value)
    return name in ("$ref", "$dynamicRef") and not value.startswith("#")
