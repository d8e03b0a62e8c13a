"""How much a client's patterns repeat: what llguidance's own counts do not bound.

`a{100000}` is a few bytes, and so is `(a{1000}){1000}`; a mask for one token of either takes a large part of
a second, in a step that other requests wait for. A pattern's size is what it would be written out: its atoms,
each times the largest counts around it. It is bounded before anything is compiled; `*` and `+` cost nothing.

Pure; no pattern is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class GrammarBounds:
    """The operator's to choose; llguidance's own counts (`cluster.grammar`) hold beside them."""

    max_pattern_size: int = 10_000
    max_properties: int = 1_000  # of a schema, in all: compiling takes a time that grows with their square


BOUNDS: Final = GrammarBounds()

_COUNT: Final = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_NAMED: Final = re.compile(r"\\[pPxu]\{[^}]*\}")
# A pattern within a grammar in Lark's notation; texts are passed over.
_LARK_PATTERN: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/((?:\\.|[^/\\\n])+)/')


def pattern_size(pattern: str) -> int:
    """Atoms of a regular expression written out. Of one that is none, some number."""
    sums, last, at = [0], 0, 0
    while at < len(pattern):
        if (count := _COUNT.match(pattern, at)) is not None:
            times = max(int(count[1]), int(count[2] or 0), 1)
            sums[-1] += last * (times - 1)
            last *= times
            at = count.end()
            continue
        mark = pattern[at]
        if mark == "(":
            sums.append(0)
            last = 0
        elif mark == ")" and len(sums) > 1:
            last = max(1, sums.pop())
            sums[-1] += last
        elif mark not in "|*+?":
            last = 1
            sums[-1] += 1
            at = _end_of_atom(pattern, at)
            continue
        at += 1
    return sum(sums)


def _end_of_atom(pattern: str, at: int) -> int:
    if (named := _NAMED.match(pattern, at)) is not None:
        return named.end()
    if pattern[at] == "\\":
        return at + 2
    if pattern[at] != "[":
        return at + 1
    depth, at = 1, at + (3 if pattern.startswith(("[^]",), at) else 2 if pattern.startswith("[]", at) else 1)
    while at < len(pattern) and depth:
        depth += {"[": 1, "]": -1}.get(pattern[at], 0)
        at += 2 if pattern[at] == "\\" else 1
    return at


def check_pattern(pattern: str, bounds: GrammarBounds = BOUNDS) -> None:
    """Raises ValueError: it repeats too much."""
    size = pattern_size(pattern)
    if size > bounds.max_pattern_size:
        most = bounds.max_pattern_size
        raise ValueError(f"a pattern repeats up to {size:,} characters; at most {most:,} can be followed")


def check_lark(text: str, bounds: GrammarBounds = BOUNDS) -> None:
    """Raises ValueError: a pattern in it repeats too much."""
    for found in _LARK_PATTERN.finditer(text):
        if found[1] is not None:
            check_pattern(found[1], bounds)


def check_schema(schema: object, bounds: GrammarBounds = BOUNDS) -> None:
    """Raises ValueError: a pattern in it repeats too much, or it has too many properties."""
    num_properties = 0
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            num_properties += _check_object(part, bounds)
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
    if num_properties > bounds.max_properties:
        most = bounds.max_properties
        raise ValueError(f"a schema has {num_properties:,} properties; at most {most:,} can be followed")


def _check_object(part: Mapping[str, Any], bounds: GrammarBounds) -> int:
    """How many properties it has."""
    if isinstance(pattern := part.get("pattern"), str):
        check_pattern(pattern, bounds)
    patterns = part.get("patternProperties")
    for pattern in patterns if isinstance(patterns, Mapping) else ():
        check_pattern(pattern, bounds)
    properties = part.get("properties")
    return len(properties) if isinstance(properties, Mapping) else 0
