"""The chunks of one step as `cluster.slo_schedule` chooses them: how full it is, and what still fits.

1. A step begins with the rows that must be in it.
2. `take` and `force` put in chunks of prompts, `add_yielding` rows that need not be in every step; each says
   what there was room for.
3. `chunks` and `num_yielding` are the plan.

Pure: no clock; it reads prompts and changes none, but for the `begin` it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic

from cluster.slo_classes import DecodeBatch, P
from cluster.step_model import StepModel, StepWork, chunk_attention


class StepFilling(Generic[P]):
    """The chunks of one step as they are chosen."""

    def __init__(
        self,
        model: StepModel,
        decode: DecodeBatch,
        now: float,
        budget_s: float,
        room: int,
        max_chunk_tokens: int,
        begin: Callable[[P], None] | None,
    ) -> None:
        self.num_yielding = 0
        self.room = room
        self._taken: dict[int, tuple[P, int]] = {}  # by id, in order
        self._model = model
        self._now = now
        self._budget_s = budget_s
        self._left = max_chunk_tokens
        self._begin = begin
        self._tokens = decode.num_rows
        self._context = decode.context
        self._attention = 0.0

    @property
    def chunks(self) -> list[tuple[P, int]]:
        return list(self._taken.values())

    @property
    def is_empty(self) -> bool:
        return self._tokens == 0

    def has(self, prompt: P) -> bool:
        return id(prompt) in self._taken

    def has_room(self, seconds: float) -> bool:
        """Whether more work of so many seconds keeps the budget (beyond the ridge)."""
        return self._model.step_s(self._work) + seconds <= self._budget_s

    def most_yielding(self, decode: DecodeBatch) -> int:
        """How many of the rows that yield fit."""
        mean = decode.yielding_context / decode.num_yielding
        return self._model.most_rows(self._work, mean, decode.num_yielding, self._budget_s)

    def add_yielding(self, decode: DecodeBatch, num_rows: int) -> None:
        self._tokens += num_rows
        self._context += round(decode.yielding_context * num_rows / decode.num_yielding)
        self.num_yielding = num_rows

    def keep(self, num_tokens: int) -> None:
        """KV that whoever comes now must leave."""
        self.room -= num_tokens

    @property
    def _work(self) -> StepWork:
        return StepWork(self._tokens, self._context, self._attention)

    def end_of_share_s(self, share: float) -> float:
        """How long the step becomes by this share of what its budget still leaves."""
        taken_s = self._model.step_s(self._work)
        return taken_s + share * max(0.0, self._budget_s - taken_s)

    def take(self, prompt: P, end_s: float = math.inf) -> bool:
        """As much of it as the budget allows, in a step of at most `end_s`. False: there is no room left."""
        return self._take(prompt, min(self._budget_s, end_s))

    def force(self, prompt: P, wanted_s: float) -> bool:
        """A chunk of at most `wanted_s`, a token at least, within the budget or not. False: there is no KV
        for it, or the step has as many tokens as it may have."""
        self._take(prompt, self._model.step_s(self._work) + wanted_s, least=1)
        return self.has(prompt)

    def _take(self, prompt: P, budget_s: float, least: int = 0) -> bool:
        known = self._taken.get(id(prompt))
        taken = 0 if known is None else known[1]
        new_tokens = 0 if taken else prompt.new_kv_tokens
        if new_tokens and new_tokens > self.room:
            return True  # others may be smaller
        start, num_tokens = prompt.num_computed + taken, prompt.num_tokens
        count = self._count(start, num_tokens, budget_s, least)
        if count <= 0:
            return start == num_tokens
        if new_tokens and self._begin is not None:
            self._begin(prompt)
            start = prompt.num_computed
            count = self._count(start, num_tokens, budget_s, 1)
        self._taken[id(prompt)] = (prompt, taken + count)
        self.room -= new_tokens
        self._left -= count
        self._tokens += count
        self._attention += chunk_attention(start, count)
        if start + count == num_tokens and self._now < prompt.deadline_s < self._now + self._budget_s:
            # its first token comes when the step ends: not later than it is due, if that can be
            self._budget_s = max(prompt.deadline_s - self._now, self._model.step_s(self._work))
        return True

    def _count(self, start: int, num_tokens: int, budget_s: float, least: int) -> int:
        limit = min(num_tokens - start, self._left)
        return min(limit, max(least, self._model.most_chunk_tokens(self._work, start, limit, budget_s)))
