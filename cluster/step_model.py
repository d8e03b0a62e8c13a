"""How long a step takes, as a function of what is in it: predicted and inverted.

    step_s = fixed + max(floor, per_token * m) + per_context * ctx + per_attention * att [+ mixed]

`m` is the tokens in the step, `ctx` the keys its decode rows read, `att` the query-key pairs of its prefill
chunks. `floor` is the time to read the weights once, whatever the batch: up to the ridge,
`floor / per_token` tokens, a chunk rides for free, but for `mixed`: what a step with both decode rows and
chunks takes more than that, where an engine computes them one after the other.

1. A worker (or a calibration, or a table of hardware) supplies a `StepModel`.
2. A scheduler asks `most_chunk_tokens`: how much of a prompt fits into a step of so many seconds.
3. A router asks `step_s` for what a placement would do to those who decode there.
4. `cluster.step_fit` learns a model from steps that ran; it travels to routers with the worker's load.

Pure and without a clock.
"""

from __future__ import annotations

import math

import msgspec


class StepWork(msgspec.Struct, frozen=True):
    """What a step computes. `attention` of a chunk of n tokens after p: n * p + n * (n + 1) / 2."""

    num_tokens: int  # decode rows and chunk tokens
    context: int = 0  # keys read by decode rows, summed
    attention: float = 0.0  # query-key pairs of chunks, summed


def chunk_attention(start: int, num_tokens: int) -> float:
    """Query-key pairs of a chunk of `num_tokens` that follow `start` tokens."""
    return num_tokens * start + num_tokens * (num_tokens + 1) / 2


class StepModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds; see the module."""

    fixed_s: float
    floor_s: float
    per_token_s: float
    per_context_s: float
    per_attention_s: float
    mixed_s: float = 0.0

    def step_s(self, work: StepWork) -> float:
        return (
            self.fixed_s
            + max(self.floor_s, self.per_token_s * work.num_tokens)
            + self.per_context_s * work.context
            + self.per_attention_s * work.attention
            + (self.mixed_s if work.context > 0 and work.attention > 0 else 0.0)
        )

    def slower(self, times: float) -> StepModel:
        """On a machine on which everything takes `times` as long."""
        return StepModel(*(getattr(self, name) * times for name in self.__struct_fields__))

    @property
    def ridge_tokens(self) -> float:
        """Tokens in a step up to which reading the weights takes longer than the arithmetic."""
        return self.floor_s / self.per_token_s if self.per_token_s > 0 else math.inf

    def most_chunk_tokens(self, beside: StepWork, start: int, limit: int, budget_s: float) -> int:
        """The longest chunk, `limit` at most, of a prompt whose first `start` tokens are computed, that fits
        beside `beside` into a step of `budget_s`; 0 if none does.

        Both sides of the ridge are a quadratic in the chunk's length n; the smaller answer holds for both:
            per_attention / 2 * n^2 + (per_attention * (start + 1/2) + [per_token]) * n <= what is left
        """
        left_s = budget_s - self.fixed_s - self.per_context_s * beside.context
        left_s -= self.per_attention_s * beside.attention
        if beside.context > 0:
            left_s -= self.mixed_s
        square, line = self.per_attention_s / 2, self.per_attention_s * (start + 0.5)
        below = _most(square, line, left_s - self.floor_s)
        above = _most(square, line + self.per_token_s, left_s - self.per_token_s * beside.num_tokens)
        return max(0, math.floor(min(below, above, limit)))

    def most_rows(self, beside: StepWork, context: float, limit: int, budget_s: float) -> int:
        """How many decode rows, `limit` at most, of `context` keys each fit beside `beside` into a step."""
        left_s = budget_s - self.fixed_s - self.per_context_s * beside.context
        left_s -= self.per_attention_s * beside.attention
        if beside.attention > 0:
            left_s -= self.mixed_s
        reading_s = self.per_context_s * context
        below = _most(0.0, reading_s, left_s - self.floor_s)
        above = _most(0.0, reading_s + self.per_token_s, left_s - self.per_token_s * beside.num_tokens)
        return max(0, math.floor(min(below, above, limit)))


def _most(square: float, line: float, left: float) -> float:
    """The largest n with square * n^2 + line * n <= left; all coefficients are at least 0."""
    if left < 0:
        return 0.0
    if square > 0:
        # the form of the root that does not cancel where `square` is small beside `line`
        return 2 * left / (line + math.sqrt(line * line + 4 * square * left))
    return left / line if line > 0 else math.inf
