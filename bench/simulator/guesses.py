"""Drafts by somebody who knows the answers, and is often wrong all the same: what no history would suggest.

So steps with drafts that are right, wrong, and right for a while are as common as a test wants them, whatever
the tokens are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from cluster.engine.batch import Row, StepOutput, StepPlan
from cluster.engine.drafts import with_drafts

_SHARE_OF_ROWS = 0.7  # that bring any
_SHARE_RIGHT = 0.7  # of the drafts


class Guesses:
    """`cluster.engine.speculation.Drafts`. `tokens_of`: prompt and answer of a row's request."""

    def __init__(
        self,
        rng: random.Random,
        tokens_of: Callable[[Row], Sequence[int]],
        vocabulary: int,
        most: int = 5,
    ) -> None:
        self._rng, self._tokens_of, self._vocabulary, self._most = rng, tokens_of, vocabulary, most
        self.num_drafted = self.num_right = 0

    def draft(self, plan: StepPlan) -> StepPlan:
        if not plan.longest_s:
            return plan
        return msgspec.structs.replace(plan, rows=tuple([self._guess(row) for row in plan.rows]))

    def learn(self, plan: StepPlan, output: StepOutput) -> None:
        self.num_drafted += sum(row.num_drafts for row in plan.rows)
        self.num_right += sum(map(len, output.further.values()))

    def _guess(self, row: Row) -> Row:
        rng, room = self._rng, min(row.end - row.start - 1, self._most)
        if room <= 0 or rng.random() > _SHARE_OF_ROWS:
            return row
        first = row.start + 1
        right = self._tokens_of(row)[first : first + rng.randint(1, room)]
        guessed = [
            token if rng.random() < _SHARE_RIGHT else rng.randrange(self._vocabulary) for token in right
        ]
        return with_drafts(row, guessed) if guessed else row
