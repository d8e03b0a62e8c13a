"""Logits to tokens, row by row.

1. The runner hands over one row of logits per sequence that is due a token, with the sequence's own
   parameters and history, and the position the token will have.
2. Penalties, bias and masks (`cluster.engine.processors`), on a copy, only where the request asks for any.
3. Temperature 0: the largest logit, lowest id among equals. Otherwise temperature → top-k → top-p → min-p
   (each over what the former left; top-p of the mass that is left) → one draw by inverse CDF in id order.
4. Log-probabilities are of the model's raw distribution, before step 2.

A token is a function of (row, params, own history, seed, position), bit for bit: rows never meet in one
reduction, all arithmetic is NumPy on one thread, and the random number is Philox(seed, position).

Bad numbers never stop a batch: NaN counts as -inf, +inf as the largest finite number; a row with nothing left
yields its lowest allowed id. Reported log-probabilities are finite, -9999.0 standing for -inf.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cluster.engine.batch import SampleSpec
from cluster.engine.philox import uniform
from cluster.engine.processors import LARGEST, is_neutral, make_finite, process
from cluster.engine.selection import Row, draw, largest, nucleus, total, weigh
from cluster.sampling import SamplingParams, TokenOutput
from kernels.draw_kind import is_greedy

if TYPE_CHECKING:
    from torch import Tensor

LOGPROB_FLOOR = -9999.0  # stands for -inf: JSON has no infinity

_logger = logging.getLogger(__name__)


def sample(
    logits: Tensor,  # [num_rows, vocab], read only
    specs: Sequence[SampleSpec],  # one per row
    positions: Sequence[int],  # one per row: index in the sequence of the token to choose
    best_ids: Sequence[int]
    | None = None,  # one per row: its first largest logit, or first NaN; None: found here
) -> list[TokenOutput]:
    """One token per row. Logits on another device or of another dtype are copied to CPU fp32 first."""
    rows: Row = np.ascontiguousarray(logits.detach().float().cpu().numpy())
    assert len(rows) == len(specs) == len(positions)
    if best_ids is None:
        best_ids = rows.argmax(axis=1).tolist() if len(rows) else ()
    peaks = rows[np.arange(len(rows)), best_ids].tolist()
    num_broken = 0
    outputs = []
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for index, (spec, position, best) in enumerate(zip(specs, positions, best_ids, strict=True)):
            if math.isfinite(peaks[index]) and _is_plain_greedy(spec):
                outputs.append(TokenOutput(best))
                continue
            row = rows[index]
            if not math.isfinite(peaks[index]):
                row = row.copy()
                num_broken += make_finite(row)
                best = int(row.argmax())
            outputs.append(_sample_row(row, best, spec, position))
    if num_broken:
        _logger.error("NaN or +inf in the logits of %d of %d rows", num_broken, len(rows))
    return outputs


def _is_plain_greedy(spec: SampleSpec) -> bool:
    """Whether the row's largest logit is its token, with nothing else to report."""
    params = spec.params
    return is_greedy(params) and params.num_logprobs is None and is_neutral(params, len(spec.output_ids))


def _sample_row(row: Row, best: int, spec: SampleSpec, position: int) -> TokenOutput:
    """`best` is the id of the row's largest logit."""
    params = spec.params
    scores = row
    if not is_neutral(params, len(spec.output_ids)):
        scores = row.copy()
        process(scores, spec)
        best = int(scores.argmax())
    if scores[best] == -np.inf:
        token_id = min((i for i in params.allowed_token_ids if 0 <= i < len(row)), default=0)
    elif is_greedy(params):
        token_id = best
    else:
        token_id = _draw_token(scores, scores[best], params, uniform(params.seed, position))
    if params.num_logprobs is None:
        return TokenOutput(token_id)
    return with_logprobs(row, token_id, params.num_logprobs)


def _draw_token(scores: Row, peak: np.float32, params: SamplingParams, u: float) -> int:
    """Temperature, top-k, top-p, min-p, draw. `peak` is the largest score, and finite."""
    ids = None  # what is left, in order of score; None: everything
    if 0 < params.top_k < len(scores):
        ids = largest(scores, params.top_k)
        scores = scores[ids]
    weights = weigh(scores, peak, np.float32(min(params.temperature, LARGEST)))
    if params.top_p < 1.0:
        kept = nucleus(scores, weights, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if params.min_p > 0.0:
        weights[weights < np.float32(min(params.min_p, 1.0))] = 0.0
    if ids is None:
        return draw(weights, u)
    by_id = ids.argsort()
    return int(ids[by_id[draw(weights[by_id], u)]])


def with_logprobs(row: Row, token_id: int, num_best: int) -> TokenOutput:
    """Log-softmax of the raw row at the chosen token and the `num_best` most probable ones."""
    peak = row.max()
    if peak == -np.inf:
        best = tuple((index, LOGPROB_FLOOR) for index in range(min(num_best, len(row))))
        return TokenOutput(token_id, LOGPROB_FLOOR, best)
    log_total = np.float32(math.log(total(weigh(row, peak, np.float32(1.0)))))

    def logprob(index: int) -> float:
        return max(float(row[index] - peak - log_total), LOGPROB_FLOOR)

    top = largest(row, num_best).tolist()
    return TokenOutput(token_id, logprob(token_id), tuple((index, logprob(index)) for index in top))
