"""What a user asks for by an environment variable: one of the members of an enum."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

E = TypeVar("E", bound=enum.StrEnum)


def requested(environment: Mapping[str, str], variable: str, default: E, error: type[ValueError]) -> E:
    """`default` where the variable is not set.

    Raises:
        error: it names no member.
    """
    members = list(type(default))
    wanted = environment.get(variable) or default
    if wanted not in members:
        names = " or ".join(members) if len(members) == 2 else ", ".join(members)
        raise error(f"{variable} is `{wanted}`; use {names}")
    return type(default)(wanted)
