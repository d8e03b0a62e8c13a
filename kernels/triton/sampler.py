"""Choosing a step's tokens on the device: the engine's definition, bit for bit.

1. Rows whose requests ask for nothing but temperature, top-k, top-p and min-p are read where they lie;
   others, and rows with bad numbers, are copied and edited (`kernels.triton.sampling_edits`).
2. Greedy rows take their largest score. For the others kernels find what top-k and top-p leave, and draw.
3. Tokens come to the host in one copy; log-probabilities of rows that ask are computed from few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.draw_kind import is_greedy
from kernels.ops import ChosenTokens, Positions, SamplingRequest, StepResult, TokenDetail
from kernels.triton.ahead import compile_sampling
from kernels.triton.availability import interpreting
from kernels.triton.sampling_edits import LARGEST, Seen, edit, is_neutral, mend, needs_seen
from kernels.triton.selection import MAX_VOCABULARY, Choice, draw, top, total_weight

LOGPROB_FLOOR = -9999.0  # stands for -inf
_SPARE_ENTRIES = 64  # kept beyond twice the rows of a step


class TritonSampler:
    """`kernels.ops.FusedSampler`."""

    largest_vocabulary = MAX_VOCABULARY

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_compiled = interpreting()
        self._seen: dict[int, Seen] = {}  # by the id of the request, which the entry keeps alive

    def __call__(
        self, result: StepResult, requests: Sequence[SamplingRequest], positions: Positions
    ) -> ChosenTokens:
        """Raises:
        ValueError: not one request and position per row of logits, or too large a vocabulary.
        """
        logits, num_rows = result.logits, len(requests)
        if logits.dim() != 2 or logits.dtype is not torch.float32 or logits.stride(1) != 1:
            raise ValueError(f"`logits` must be rows of adjacent fp32: {logits.dtype} {list(logits.shape)}")
        if logits.shape[0] != num_rows or len(positions) != num_rows:
            raise ValueError(f"{len(positions)} positions, {num_rows} requests, {logits.shape[0]} rows")
        if not 0 < logits.shape[1] <= self.largest_vocabulary:
            raise ValueError(f"a vocabulary of {logits.shape[1]}, of at most {self.largest_vocabulary}")
        if num_rows == 0:
            return [], [], 0
        if not self._is_compiled:
            self._is_compiled = True
            compile_sampling(logits.shape[1], logits.device)
        ends = torch.stack([result.best.double(), logits.gather(1, result.best[:, None])[:, 0].double()])
        best, peaks = ends.cpu().numpy()
        broken = np.isnan(peaks) | (peaks == np.inf)
        apart = [
            row
            for row, request in enumerate(requests)
            if broken[row] or not is_neutral(request.params, len(request.output_ids))
        ]
        tokens = np.zeros(num_rows, np.int64)
        plain = sorted(set(range(num_rows)) - set(apart))
        at = np.asarray(positions).tolist()
        self._choose(logits, plain, plain, requests, at, best[plain], peaks[plain], tokens)
        if apart:
            scores = mend(logits[apart])
            edit(
                scores,
                [requests[row] for row in apart],
                [self._follow(requests[row], scores) for row in apart],
            )
            found = scores.argmax(dim=1)
            ends = torch.stack([found.double(), scores.gather(1, found[:, None])[:, 0].double()])
            best, peaks = ends.cpu().numpy()
            self._choose(scores, range(len(apart)), apart, requests, at, best, peaks, tokens)
        if len(self._seen) > 2 * num_rows + _SPARE_ENTRIES:
            current = {id(request) for request in requests}
            self._seen = {key: value for key, value in self._seen.items() if key in current}
        chosen: list[int] = tokens.tolist()
        details = [
            _detail(logits[row], row, chosen[row], request.params.num_logprobs)
            for row, request in enumerate(requests)
            if request.params.num_logprobs is not None
        ]
        return chosen, details, int(broken.sum())

    def _follow(self, request: SamplingRequest, scores: Tensor) -> Seen | None:
        if not needs_seen(request.params):
            return None
        seen = self._seen.get(id(request))
        if seen is None:
            seen = self._seen[id(request)] = Seen(request, scores.shape[1])
        return seen

    def _choose(
        self, scores: Tensor, places: Sequence[int], rows: Sequence[int], requests: Sequence[SamplingRequest],
        positions: Sequence[int], best: NDArray[np.float64], peaks: NDArray[np.float64],
        tokens: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Fill in `tokens[rows]`; row i of these lies at `places[i]` of `scores`."""
        choices = []
        for place, row, token, peak in zip(places, rows, best, peaks, strict=True):
            params = requests[row].params
            if peak == -np.inf:
                known = [i for i in params.allowed_token_ids if 0 <= i < scores.shape[1]]
                tokens[row] = min(known, default=0)
            elif is_greedy(params):
                tokens[row] = int(token)
            else:
                choices.append(
                    Choice(
                        place=place,
                        row=row,
                        peak=float(peak),
                        temperature=min(params.temperature, LARGEST),
                        top_k=params.top_k,
                        top_p=params.top_p,
                        min_p=min(params.min_p, 1.0),
                        seed=params.seed,
                        position=positions[row],
                    )
                )
        if choices:
            tokens[[choice.row for choice in choices]] = draw(scores, choices).cpu().numpy()


def _detail(raw: Tensor, row: int, token: int, num_best: int) -> TokenDetail:
    """Log-softmax of the raw row at `token` and the `num_best` most probable ids; fp32 throughout."""
    values = mend(raw.clone())
    peak = values.max()
    size = len(values)
    if peak == -torch.inf:
        best = tuple((index, LOGPROB_FLOOR) for index in range(min(num_best, size)))
        return TokenDetail(row, LOGPROB_FLOOR, best)
    ids = top(values, min(num_best, size))
    numbers = values[[*ids, token]].cpu().numpy()
    log_total = np.float32(math.log(total_weight(values, float(peak))))
    with np.errstate(over="ignore", invalid="ignore"):
        logprobs = [max(float(x), LOGPROB_FLOOR) for x in numbers - np.float32(float(peak)) - log_total]
    return TokenDetail(row, logprobs[-1], tuple(zip(ids, logprobs[:-1], strict=True)))
