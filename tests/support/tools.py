"""Two tools and their calls, for every test that offers some."""

from __future__ import annotations

from typing import Any

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
LOOK_UP: dict[str, Any] = {"type": "function", "function": {"name": "look_up"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
