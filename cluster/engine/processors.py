"""What a request's own parameters do to its logits: pure functions of (row, params, history), in fp32.

Order (penalties as vLLM defines them):

1. repetition penalty over prompt and generated tokens, then frequency and presence penalty over generated;
2. logit_bias is added;
3. masks: allowed ids, EOS and stop ids before `min_tokens`, bad words.

Temperature, top-k, top-p and min-p follow, in `cluster.engine.sampler`. The mask of a request's grammar was
laid on the row before (`cluster.engine.grammar_masks`): -inf stays -inf through all of this.

A mask is -inf. A row must keep a token to choose: `allowed_token_ids` always holds, and a later mask that
would leave nothing gives way. Ids outside the vocabulary name no logit and have no effect; the gateway
refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.engine.batch import SampleSpec
from cluster.engine.selection import Row
from cluster.sampling import SamplingParams

_NEG_INF = np.float32(-np.inf)
LARGEST = float(np.finfo(np.float32).max)


def is_neutral(params: SamplingParams, num_generated: int) -> bool:
    """Whether `process` would leave every row as it is."""
    return (
        params.repetition_penalty == 1.0
        and params.frequency_penalty == 0.0
        and params.presence_penalty == 0.0
        and not params.logit_bias
        and not params.allowed_token_ids
        and not params.bad_words_ids
        and (num_generated >= params.min_tokens or not (params.eos_token_ids or params.stop_token_ids))
    )


def process(scores: Row, spec: SampleSpec) -> None:
    """Turn a copy of the logits [vocab], fp32 without NaN or +inf, into processed scores, in place.

    Afterwards at least one score is finite if one of the allowed ids' was.
    """
    params = spec.params
    vocab_size = len(scores)
    _penalize(scores, spec)
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < vocab_size:
            scores[token_id] += np.float32(bias)
    make_finite(scores)

    if params.allowed_token_ids:
        allowed = _known(params.allowed_token_ids, vocab_size)
        kept = scores[allowed]
        scores.fill(_NEG_INF)
        scores[allowed] = kept
    if len(spec.output_ids) < params.min_tokens:
        _mask_unless_last(scores, (*params.eos_token_ids, *params.stop_token_ids))
    if params.bad_words_ids:
        _mask_unless_last(scores, _completions(params.bad_words_ids, spec))


def make_finite(scores: Row) -> bool:
    """NaN becomes -inf and +inf the largest finite number, in place; whether there was any."""
    peak = scores.max(initial=_NEG_INF)  # NaN, if there is one
    if peak < np.inf:
        return False
    np.nan_to_num(scores, copy=False, nan=-np.inf, posinf=LARGEST, neginf=-np.inf)
    return True


def _penalize(scores: Row, spec: SampleSpec) -> None:
    params = spec.params
    if params.repetition_penalty != 1.0:
        penalty = np.float32(params.repetition_penalty)
        seen = np.concatenate([_as_ids(spec.prompt_ids), _as_ids(spec.output_ids)])
        seen = seen[(seen >= 0) & (seen < len(scores))]
        values = scores[seen]  # an id seen twice is read twice and written twice, with one value
        scores[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = np.unique(_as_ids(spec.output_ids), return_counts=True)
        known = (ids >= 0) & (ids < len(scores))
        ids, counts = ids[known], counts[known]
        scores[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        scores[ids] -= np.float32(params.presence_penalty)


def _completions(bad_words: Sequence[Sequence[int]], spec: SampleSpec) -> list[int]:
    """The last id of every bad sequence whose other ids are how prompt and output end."""
    longest = max(len(word) for word in bad_words) - 1
    output = list(spec.output_ids[-longest:]) if longest > 0 else []
    num_missing = longest - len(output)
    tail = [*(spec.prompt_ids[-num_missing:] if num_missing > 0 else ()), *output]
    return [
        word[-1]
        for word in bad_words
        if len(word) == 1 or (1 < len(word) <= len(tail) + 1 and tail[1 - len(word) :] == list(word[:-1]))
    ]


def _mask_unless_last(scores: Row, ids: Iterable[int]) -> None:
    """Mask `ids`, unless nothing would be left to choose."""
    known = _known(ids, len(scores))
    kept = scores[known]
    scores[known] = _NEG_INF
    if scores.max(initial=_NEG_INF) == _NEG_INF:
        scores[known] = kept


def _as_ids(ids: Sequence[int]) -> NDArray[np.int64]:
    return np.array(ids, np.int64)


def _known(ids: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    """The distinct ids that name a logit, ascending."""
    array = np.unique(np.fromiter(ids, np.int64))
    return array[(array >= 0) & (array < vocab_size)]
