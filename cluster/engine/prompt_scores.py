"""Log-probabilities of a prompt's own tokens, gathered while its chunks are computed.

1. A row that asks for them (`Row.score`) is a chunk of a prompt that is computed from its first token on,
   without help from the prefix cache: every position's hidden state passes by here.
2. The hidden states become logits a few rows at a time (a whole chunk's would be `chunk x vocabulary`), and
   each row of logits scores the token that follows it in the prompt.
3. What was gathered waits in the request's notes; the row that samples token 0 takes it along.

Logits are row-invariant, so a score does not depend on the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cluster.engine.batch import Row
from cluster.engine.processors import make_finite
from cluster.engine.sampler import with_logprobs
from cluster.sampling import PromptScore

_ROWS_AT_ONCE = 32


def score_prompts(hidden: Tensor, rows: Sequence[Row], logits_of: Callable[[Tensor], Tensor]) -> None:
    """Add to the notes of every row that asks. `hidden` [num_tokens, hidden_size]: of all rows of a step."""
    first = 0
    for row in rows:
        if row.score is not None:
            scores = row.score.notes.scores
            del scores[row.start :]  # of a computation that was given up
            assert len(scores) == row.start, "a part of the prompt was not computed here"
            following = row.score.prompt_ids[row.start + 1 : row.start + len(row.token_ids) + 1]
            num_best = row.score.params.prompt_logprobs
            assert num_best is not None
            scores += _scores(hidden[first : first + len(following)], following, num_best, logits_of)
        first += len(row.token_ids)


def _scores(
    hidden: Tensor, following: Sequence[int], num_best: int, logits_of: Callable[[Tensor], Tensor]
) -> list[PromptScore]:
    scores: list[PromptScore] = []
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for start in range(0, len(following), _ROWS_AT_ONCE):
            logits = logits_of(hidden[start : start + _ROWS_AT_ONCE]).float().cpu().numpy()
            for row, token_id in zip(logits, following[start : start + _ROWS_AT_ONCE], strict=True):
                make_finite(row)
                output = with_logprobs(row, token_id, num_best)
                assert output.logprob is not None
                scores.append(PromptScore(output.logprob, output.top_logprobs, _rank(row, token_id)))
    return scores


def _rank(row: npt.NDArray[np.float32], token_id: int) -> int:
    """Its place among all tokens, from 1: best first, ties by lower id, as `top_logprobs` is ordered."""
    value = row[token_id]
    num_before = np.count_nonzero(row > value) + np.count_nonzero(row[:token_id] == value)
    return 1 + int(num_before)
