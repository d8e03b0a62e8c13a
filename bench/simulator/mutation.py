"""One rule of the protocol, and a way to break it: what `bench.simulator.mutations` lets be found.

A `Patch` replaces one attribute of a live class or module by what `broken` makes of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Broken = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Patch:
    """`broken(original)` takes the place of `owner.name`."""

    owner: Any
    name: str
    broken: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule, not kept."""

    name: str
    patches: Sequence[Patch]
