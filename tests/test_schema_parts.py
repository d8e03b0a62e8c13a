"""What is left out of a schema that need not hold in every detail: patterns and references, never data."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.schema_parts import can_be_followed, followable

AHEAD = "(?!a)b"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"(?=a)b", False), (r"(?!a)b", False), (r"a(?<=b)", False), (r"a(?<!b)", False), (r"(a)\1", False),
        (r"(?<n>a)\k<n>", False), (r"\\\1", False), (r"x\\(?=y)", False),
        ("", True), ("^[a-z]+$", True), (r"\(?=a", True), (r"\\1", True), (r"(?:a)", True),
        (r"(?P<n>a)", True), (r"(?<n>a)", True), (r"\d{2}", True), ("\\", True), (r"\\k<", True),
    ],
)  # fmt: skip
def test_what_can_be_followed(pattern: str, expected: bool) -> None:
    assert can_be_followed(pattern) is expected
    assert can_be_followed("é\n" + pattern) is expected


def test_long_patterns_take_no_time_to_judge() -> None:
    for part in ("a", "\\\\", "(?", "[", "(?<"):
        assert can_be_followed(part * 50_000)
        assert not can_be_followed(part * 50_000 + "x(?=y)")


KEPT: list[Any] = [
    True,
    {},
    {"pattern": "^a$", "$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}},
    {"properties": {"pattern": {"type": "string"}, "$ref": {"type": "string"}}},
    {"const": {"pattern": AHEAD}, "default": {"$ref": "x"}, "examples": [{"pattern": AHEAD}]},
    {"enum": [{"pattern": AHEAD}], "description": AHEAD},
    {"pattern": 5, "properties": "no map", "items": [1, None], "$ref": ["x"]},
]


@pytest.mark.parametrize("schema", KEPT)
def test_what_stays(schema: Any) -> None:
    assert followable(schema) == schema


@pytest.mark.parametrize(
    ("schema", "rest"),
    [
        ({"type": "string", "pattern": AHEAD}, {"type": "string"}),
        ({"$ref": "https://x/y", "title": "t"}, {"title": "t"}),
        ({"$dynamicRef": "other#a"}, {}),
        ({"patternProperties": {AHEAD: {}, "^a": {"pattern": AHEAD}}}, {"patternProperties": {"^a": {}}}),
        ({"properties": {"pattern": {"pattern": AHEAD}}}, {"properties": {"pattern": {}}}),
        ({"anyOf": [{"pattern": AHEAD}, {"items": {"$ref": "x"}}]}, {"anyOf": [{}, {"items": {}}]}),
        ({"not": {"pattern": AHEAD}, "if": {"$ref": "x"}}, {"not": {}, "if": {}}),
        ({"$defs": {AHEAD: {"pattern": AHEAD}}}, {"$defs": {AHEAD: {}}}),
    ],
)
def test_what_goes(schema: Any, rest: Any) -> None:
    before = repr(schema)
    assert followable(schema) == rest
    assert repr(schema) == before
