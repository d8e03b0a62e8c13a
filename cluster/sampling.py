"""How a request wants its tokens chosen, and when it is over: values, no tensors.

The gateway resolves everything that needs a tokenizer or the model's defaults (EOS ids, bad words,
the seed) before it builds `SamplingParams`, so that workers only follow ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

BROKEN_TOKEN_ID = 2**32 - 1  # no token has it: what a worker says when it can choose none


class FinishReason(Enum):
    """Why a request ended; the values are OpenAI's, but for FAILED, which no client sees."""

    STOP = "stop"
    LENGTH = "length"
    FAILED = "failed"  # no token could be chosen: the request's grammar gave up


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a request's tokens beside the model and the prompt.

    `max_tokens` counts generated tokens, EOS and stop tokens included. `seed` is always set (the gateway
    draws one when the client gave none), so every worker draws the same numbers: Philox(seed, position).
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that may not be completed
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    min_tokens: int = 0  # EOS and stop ids are masked before this many generated tokens
    eos_token_ids: tuple[int, ...] = ()  # empty when the request ignores EOS
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None  # None = off, 0 = chosen token only, n = and the n best
    grammar: str = ""  # what the answer must match, as `cluster.grammar` writes it; empty = anything
    prompt_logprobs: int | None = None  # as `num_logprobs`, of the prompt's own tokens


def looks_back(params: SamplingParams) -> bool:
    """Whether the tokens generated so far decide more about the next one, or whether it is the last, than the
    model does (`max_tokens` apart, which whoever goes on counts): the history is to be complete when that is
    chosen."""
    return bool(
        params.min_tokens
        or params.grammar
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.bad_words_ids
    )


def finish_reason(params: SamplingParams, output_ids: Sequence[int]) -> FinishReason | None:
    """Why generation ends after the last of `output_ids`, or None to go on.

    EOS or a stop id wins over the length limit when both hold at the same token.
    """
    return finish_reason_at(params, output_ids[-1], len(output_ids)) if output_ids else None


def finish_reason_at(params: SamplingParams, last: int, num_generated: int) -> FinishReason | None:
    """The same of `last`, the `num_generated`-th token."""
    if last == BROKEN_TOKEN_ID:
        return FinishReason.FAILED
    is_end = last in params.eos_token_ids or last in params.stop_token_ids
    if is_end and num_generated >= params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_generated >= params.max_tokens else None


class PromptScore(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One token of a prompt: its log-probability, the best alternatives as in `TokenOutput`, and how many-th
    best it is itself, from 1."""

    logprob: float
    best: tuple[tuple[int, float], ...]
    rank: int


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One generated token. Log-probabilities are of the model's raw distribution, before temperature,
    penalties and masks; `top_logprobs` is ordered best first, ties by lower id. `prompt_scores` comes with
    the first token if it was asked for: of every token of the prompt but the first."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_scores: tuple[PromptScore, ...] = ()
