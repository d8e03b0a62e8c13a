"""What requests' own wishes do to copies of their rows of logits, in the order the engine defines.

1. Penalties: one kernel over all (row, id) pairs seen; which ids those are is kept from step to step.
2. Biases are added, then NaN becomes -inf and +inf the largest finite number.
3. Masks: allowed ids, ends before `min_tokens`, bad words. One that would leave nothing gives way.

1 concerns any number of rows at once; 2 and 3 are rarer and go row by row, in torch on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops import SamplingParameters, SamplingRequest
from kernels.triton.checks import rows_on_device
from kernels.triton.jit.sampling import penalize_kernel
from kernels.triton.launch import cdiv, launch

LARGEST = float(np.finfo(np.float32).max)
_BLOCK = 256


def is_neutral(params: SamplingParameters, num_generated: int) -> bool:
    """Whether a row stays as it is."""
    return not (_penalizes(params) or params.logit_bias or _masks(params, num_generated))


def mend(scores: Tensor) -> Tensor:
    """NaN → -inf, +inf → the largest finite number, in place."""
    return torch.nan_to_num_(scores, nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)


class Seen:
    """The distinct ids of a request's prompt and output, and how often each was generated."""

    def __init__(self, request: SamplingRequest, vocab_size: int) -> None:
        self._request = request  # kept: its id names this entry
        self._vocab_size = vocab_size
        self._places: dict[int, int] = {}
        self._ids: list[int] = []
        self._counts: list[int] = []
        self._num_followed = 0
        for token_id in request.prompt_ids:
            self._place(token_id)

    def follow(self) -> tuple[list[int], list[int]]:
        """(ids, counts) after what was generated since."""
        output = self._request.output_ids
        for token_id in output[self._num_followed :]:
            if (place := self._place(token_id)) is not None:
                self._counts[place] += 1
        self._num_followed = len(output)
        return self._ids, self._counts

    def _place(self, token_id: int) -> int | None:
        if not 0 <= token_id < self._vocab_size:
            return None
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        return place


def edit(scores: Tensor, requests: Sequence[SamplingRequest], seen: Sequence[Seen | None]) -> None:
    """Apply steps 1 to 3 to `scores` [rows, vocab], mended copies, in place. `seen`: of rows with
    penalties."""
    _penalize(scores, requests, seen)
    for row, request in zip(scores, requests, strict=True):
        for ids, biases in _rounds(request.params.logit_bias, len(row)):
            row[ids] += torch.from_numpy(biases).to(row.device)
    mend(scores)
    for row, request in zip(scores, requests, strict=True):
        if _masks(request.params, len(request.output_ids)):
            _mask(row, request)


def needs_seen(params: SamplingParameters) -> bool:
    return _penalizes(params)


def _penalizes(params: SamplingParameters) -> bool:
    return bool(
        params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    )


def _masks(params: SamplingParameters, num_generated: int) -> bool:
    ends = bool(params.eos_token_ids or params.stop_token_ids)
    return bool(
        params.allowed_token_ids or params.bad_words_ids or (num_generated < params.min_tokens and ends)
    )


def _penalize(scores: Tensor, requests: Sequence[SamplingRequest], seen: Sequence[Seen | None]) -> None:
    rows: list[NDArray[np.int32]] = []
    ids: list[int] = []
    counts: list[int] = []
    for index, one in enumerate(seen):
        if one is not None:
            own_ids, own_counts = one.follow()
            rows.append(np.full(len(own_ids), index, np.int32))
            ids += own_ids
            counts += own_counts
    if not ids:
        return
    entries = np.stack([np.concatenate(rows), np.array(ids, np.int32), np.array(counts, np.int32)])
    with np.errstate(over="ignore"):
        penalties = np.array(
            [
                (r.params.repetition_penalty, r.params.frequency_penalty, r.params.presence_penalty)
                for r in requests
            ],
            np.float64,
        ).astype(np.float32)
    penalize(scores, entries, penalties.T)


def penalize(scores: Tensor, entries: NDArray[np.int32], penalties: NDArray[np.float32]) -> None:
    """`entries` [3, n]: row, id, how often it was generated; `penalties` [3, rows]: repetition, frequency,
    presence."""
    num_entries = entries.shape[1]
    launch(
        penalize_kernel, (cdiv(num_entries, _BLOCK),), scores, *rows_on_device(entries, scores.device),
        *rows_on_device(penalties, scores.device), num_entries, scores.stride(0), BLOCK=_BLOCK,
    )  # fmt: skip


def _rounds(
    biases: Sequence[tuple[int, float]], vocab_size: int
) -> Iterable[tuple[list[int], NDArray[np.float32]]]:
    """Biases in rounds of distinct ids: an id named twice gets its second bias after its first."""
    left = [(token_id, bias) for token_id, bias in biases if 0 <= token_id < vocab_size]
    while left:
        now: dict[int, float] = {}
        later = []
        for token_id, bias in left:
            if token_id in now:
                later.append((token_id, bias))
            else:
                now[token_id] = bias
        with np.errstate(over="ignore"):
            yield list(now), np.array(list(now.values()), np.float64).astype(np.float32)
        left = later


def _mask(row: Tensor, request: SamplingRequest) -> None:
    params, vocab_size = request.params, len(row)
    if params.allowed_token_ids:
        allowed = _known(params.allowed_token_ids, vocab_size)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
    if len(request.output_ids) < params.min_tokens:
        _mask_unless_last(row, (*params.eos_token_ids, *params.stop_token_ids))
    if params.bad_words_ids:
        _mask_unless_last(row, _completions(params.bad_words_ids, request))


def _mask_unless_last(row: Tensor, ids: Iterable[int]) -> None:
    known = _known(ids, len(row))
    kept = row[known]
    row[known] = -torch.inf
    row[known] = torch.where(row.max() == -torch.inf, kept, -torch.inf)


def _completions(bad_words: Sequence[Sequence[int]], request: SamplingRequest) -> list[int]:
    """The last id of every bad sequence whose other ids are how prompt and output end."""
    longest = max(len(word) for word in bad_words) - 1
    history = [*request.prompt_ids[-longest:], *request.output_ids[-longest:]][-longest:] if longest else []
    found = []
    for word in bad_words:
        head = list(word[:-1])
        if word and len(head) <= len(history) and history[len(history) - len(head) :] == head:
            found.append(word[-1])
    return found


def _known(ids: Iterable[int], vocab_size: int) -> list[int]:
    return sorted({token_id for token_id in ids if 0 <= token_id < vocab_size})
