"""How many drafts a step brings: as many as are expected to pay for their time, for all its rows together.

1. `Acceptance` learns how often a drafted token is right, by how much of the history it continues: a
   request's own record, and everybody's where that says little. What goes wrong is drafted less, and tried
   again later, since records fade.
2. `DraftCosts` learns from the steps that run what one with so many rows takes, and what each draft adds. A
   `StepModel` does not tell: its ridge is that of prompts, and below it a draft is far from free (attention
   and logits of its own; 6 to 10 % of a step each on CPUs, so much is assumed before steps have shown).
3. `choose` takes drafts, the most likely ones first, while one more raises the tokens per second of the step:
   while its chance of being right per second that it adds is above what the step yields as it is. With many
   rows a second yields much, and few drafts pay or none. No step gets longer than its streams allow.

Pure and without a clock. Tokens never depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cluster.engine.prompt_lookup import MOST_MATCHED

MOST_ROWS: Final = 8  # with more, nobody drafts: it would have to be right nearly always
MOST_DRAFTS: Final = 7  # of a row in a step

_KINDS: Final = (0, 0, 0, 1, 2, 2, 3, 3, 3)  # of acceptance, by the length of the match
_ASSUMED: Final = (0.35, 0.5, 0.6, 0.8)  # by kind, before any was tried
_OWN_WEIGHT, _COMMON_WEIGHT = 3.0, 6.0  # of what is assumed, in drafts
_KEPT, _COMMON_KEPT = 0.95, 0.99  # of a record, per step with drafts
_KEPT_IDLE, _COMMON_KEPT_IDLE = 0.98, 0.998  # per match that is not used
_ASSUMED_SHARE: Final = 0.07  # of a step that a draft adds
_COST_WEIGHT: Final = 16.0  # of that assumption, in squared drafts
_COST_KEPT: Final = 0.97  # of what was learned, per step
_MOST_ABOVE: Final = 1.5  # times what was expected: a step that took longer was disturbed
_MARGIN: Final = 1.25  # by which a draft must pay


def most_rest(num_rows: int) -> int:
    """For how many steps at most nobody looks for drafts of a request that had none that paid: looking takes
    some 10 us a row when caches are cold, and the more rows there are, the less a draft brings."""
    return num_rows // 2


class Acceptance:
    """A record of drafts by kind; `common` stands in where it says little."""

    __slots__ = ("_common", "_right", "_tried")

    def __init__(self, common: Acceptance | None = None) -> None:
        self._common = common
        self._tried = [0.0] * len(_ASSUMED)
        self._right = [0.0] * len(_ASSUMED)

    def chances(self, length: int, count: int) -> list[float]:
        """Of the first, the first two, ... of `count` drafts after a match of `length` tokens."""
        result, chance = [], 1.0
        for at in range(length, length + count):
            chance *= self._share(_KINDS[min(at, MOST_MATCHED)])
            result.append(chance)
        return result

    def record(self, length: int, num_drafts: int, num_right: int) -> None:
        """`num_right` of the drafts held; after the first wrong one nothing is known."""
        self._fade(_KEPT if self._common is not None else _COMMON_KEPT)
        for index in range(min(num_right + 1, num_drafts)):
            kind = _KINDS[min(length + index, MOST_MATCHED)]
            self._tried[kind] += 1
            self._right[kind] += index < num_right
        if self._common is not None:
            self._common.record(length, num_drafts, num_right)

    def passed_over(self) -> None:
        """There was a match, and no draft. Everybody's record fades, too: else a time of wrong drafts would
        be believed for ever, since nobody tries any more."""
        self._fade(_KEPT_IDLE)
        if self._common is not None:
            self._common._fade(_COMMON_KEPT_IDLE)

    def _share(self, kind: int) -> float:
        if self._common is None:
            assumed, weight = _ASSUMED[kind], _COMMON_WEIGHT
        else:
            assumed, weight = self._common._share(kind), _OWN_WEIGHT
        return (self._right[kind] + weight * assumed) / (self._tried[kind] + weight)

    def _fade(self, kept: float) -> None:
        for kind in range(len(_ASSUMED)):
            self._tried[kind] *= kept
            self._right[kind] *= kept


class _Line:
    """Seconds of a step = base + each * drafts: least squares over the latest steps of one number of rows."""

    __slots__ = ("_k", "_kk", "_kt", "_t", "_weight", "base_s", "each_s")

    def __init__(self) -> None:
        self._weight = self._k = self._kk = self._t = self._kt = 0.0
        self.base_s = self.each_s = 0.0

    def add(self, num_drafts: int, seconds: float) -> None:
        if self._weight > 0:
            seconds = min(seconds, _MOST_ABOVE * (self.base_s + self.each_s * num_drafts))
        kept = _COST_KEPT
        self._weight = kept * self._weight + 1
        self._k = kept * self._k + num_drafts
        self._kk = kept * self._kk + num_drafts * num_drafts
        self._t = kept * self._t + seconds
        self._kt = kept * self._kt + num_drafts * seconds
        assumed_s = _ASSUMED_SHARE * self._t / (self._weight + _ASSUMED_SHARE * self._k)
        spread = self._kk - self._k * self._k / self._weight
        slope = self._kt - self._k * self._t / self._weight
        each_s = (slope + _COST_WEIGHT * assumed_s) / (spread + _COST_WEIGHT)
        self.each_s = min(max(each_s, assumed_s / 8), 8 * assumed_s)
        self.base_s = max(self._t - self.each_s * self._k, 0.1 * self._t) / self._weight


class DraftCosts:
    """What steps take, by their number of rows."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        if seconds > 0:
            self._lines.setdefault(num_rows, _Line()).add(num_drafts, seconds)

    def of(self, num_rows: int) -> tuple[float, float] | None:
        """(seconds of a step without drafts, seconds that each adds); None: no step of so many rows ran."""
        line = self._lines.get(num_rows)
        return None if line is None else (line.base_s, line.each_s)


def choose(
    chances: Sequence[Sequence[float]], num_rows: int, base_s: float, each_s: float, longest_s: float
) -> list[int]:
    """How many drafts each candidate brings; `chances` of each: as `Acceptance.chances`, so they fall.

    `num_rows` are in the step, the candidates among them. It takes `base_s`, `each_s` more for each draft,
    and `longest_s` at most.
    """
    counts = [0] * len(chances)
    expected, seconds = float(num_rows), base_s
    offers = [(chance, index) for index, of_one in enumerate(chances) for chance in of_one]
    offers.sort(key=lambda offer: -offer[0])
    for chance, index in offers:
        if chance * seconds < _MARGIN * each_s * expected or seconds + each_s > longest_s:
            break
        counts[index] += 1
        expected += chance
        seconds += each_s
    return counts
