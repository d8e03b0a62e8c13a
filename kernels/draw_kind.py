"""What drawing the tokens of a step takes: a plan made before the step, since kernels are chosen by it.

A greedier batch needs fewer passes over its rows; a row's token is the same whichever kind its batch has.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Protocol

GREEDY_TEMPERATURE = 1e-5  # below this a temperature is 0


class DrawKind(enum.IntEnum):
    """Of a batch: the largest kind of its rows."""

    GREEDY = 0  # every row takes its largest logit
    DRAW = 1  # some draw: by temperature and min-p
    NARROW = 2  # some draw from what top-k or top-p leaves


class Rule(Protocol):
    """The numbers that decide it, of `kernels.ops.SamplingParameters`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...


def is_greedy(rule: Rule) -> bool:
    return rule.temperature < GREEDY_TEMPERATURE


def draw_kind(rules: Iterable[Rule]) -> DrawKind:
    """The kind of a batch of rows with these rules."""
    kind = DrawKind.GREEDY
    for rule in rules:
        if not is_greedy(rule):
            if rule.top_k > 0 or rule.top_p < 1.0:
                return DrawKind.NARROW
            kind = DrawKind.DRAW
    return kind
