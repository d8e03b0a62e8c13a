"""Host side of top-k, top-p, min-p and the draw: `kernels.triton.jit.sampling` says how, without a sort.

A selection is nine launches over all rows, whatever they ask for, and a kind nobody asks for is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.triton.checks import rows_on_device
from kernels.triton.jit.sampling import draw_kernel, select_kernel, sum_parts_kernel
from kernels.triton.launch import cdiv, launch, next_power_of_2

MAX_VOCABULARY = 1 << 19  # sums of so many weights are exact in fp64
_BLOCK = 512
_NUM_WARPS = 8
_LEVELS = 9
_SMALLEST_SHARE = 1e-300  # of a nucleus: it holds an id at least


@dataclass(frozen=True, slots=True)
class Choice:
    """A draw from a row: `place` in the scores, `row` for the caller."""

    place: int
    row: int
    peak: float  # its largest score, finite
    temperature: float  # at most the largest fp32
    top_k: int  # 0 or less: off
    top_p: float
    min_p: float
    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class Rows:
    """What kernels know of the rows they choose from, on the device; R rows."""

    scores: Tensor  # fp32 [any, vocab], rows of adjacent numbers
    places: Tensor  # int64 [R], rows of `scores`
    peaks: Tensor  # fp32 [R]
    inverses: Tensor  # fp32 [R], 1 / temperature
    least: Tensor  # fp32 [R], min-p
    counts: Tensor  # int64 [R], top-k; the vocabulary's size: off
    shares: Tensor  # fp64 [R], top-p, above 0
    seeds: Tensor  # int64 [R], the low 64 bits
    positions: Tensor  # int64 [R]
    by_count: bool  # whether any row has a top-k
    by_weight: bool  # whether any row has a top-p

    @property
    def size(self) -> int:
        size: int = self.scores.shape[1]
        return size

    @property
    def num_rows(self) -> int:
        num_rows: int = self.places.shape[0]
        return num_rows

    @property
    def num_parts(self) -> int:
        return cdiv(self.size, _BLOCK)

    @property
    def shape(self) -> dict[str, int]:
        return {"BLOCK": _BLOCK, "PARTS": next_power_of_2(self.num_parts), "num_warps": _NUM_WARPS}


def kept_count(top_k: int, size: int) -> int:
    """Ids that `top_k` leaves of `size`."""
    return top_k if 0 < top_k < size else size


def kept_share(top_p: float) -> float:
    """The share of the weight that `top_p` asks for: never nothing."""
    return max(min(top_p, 1.0), _SMALLEST_SHARE)


def inverse_temperatures(temperatures: Sequence[float]) -> NDArray[np.float32]:
    """1 / temperature, rounded once."""
    with np.errstate(divide="ignore"):
        inverses: NDArray[np.float32] = np.divide(np.float32(1.0), np.array(temperatures, np.float32))
    return inverses


def signed(value: int) -> int:
    """The low 64 bits, as int64 has them."""
    low = value & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low


def _rows_of(scores: Tensor, choices: Sequence[Choice]) -> Rows:
    size, device = scores.shape[1], scores.device
    counts = [kept_count(choice.top_k, size) for choice in choices]
    integers = np.array(
        [
            [choice.place for choice in choices],
            counts,
            [signed(choice.seed) for choice in choices],
            [signed(choice.position) for choice in choices],
        ],
        np.int64,
    )
    places, on_device, seeds, positions = rows_on_device(integers, device)
    inverses = inverse_temperatures([choice.temperature for choice in choices])
    floats = np.array([[c.peak for c in choices], inverses, [c.min_p for c in choices]], np.float32)
    peaks, inverse, least = rows_on_device(floats, device)
    shares = torch.tensor([kept_share(choice.top_p) for choice in choices], dtype=torch.float64).to(device)
    return Rows(
        scores=scores,
        places=places,
        peaks=peaks,
        inverses=inverse,
        least=least,
        counts=on_device,
        shares=shares,
        seeds=seeds,
        positions=positions,
        by_count=any(count < size for count in counts),
        by_weight=any(choice.top_p < 1.0 for choice in choices),
    )


class _Selection:
    """What is left of the rows, as the kernels keep it."""

    def __init__(self, rows: Rows) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=rows.scores.device)

        self.sums = zeros(_LEVELS - 1, rows.num_rows, 16)
        self.prefixes = zeros(_LEVELS, rows.num_rows)
        self.above = zeros(rows.num_rows)
        self.ties = zeros(rows.num_rows, rows.num_parts)


def _select(rows: Rows, first: _Selection | None, by_weight: bool) -> _Selection:
    """Narrow down what `first` left."""
    made = _Selection(rows)
    earlier = first or made  # not read without FIRST
    for level in range(_LEVELS):
        launch(
            select_kernel, (rows.num_rows, rows.num_parts), rows.scores, rows.places, rows.peaks,
            rows.inverses,
            rows.counts, rows.shares, made.sums, made.prefixes, made.above, made.ties, earlier.prefixes,
            earlier.above, earlier.ties, rows.num_rows, rows.num_parts, rows.size, rows.scores.stride(0),
            level,
            LAST=level == _LEVELS - 1, BY_WEIGHT=by_weight, FIRST=first is not None, **rows.shape,
        )  # fmt: skip
    return made


def _sum_parts(
    rows: Rows, first: _Selection | None, second: _Selection | None
) -> tuple[Tensor, list[Tensor]]:
    """(weight left in each part, the kernels' arguments between `least` and it)."""
    a, b = first or second or _Selection(rows), second or first or _Selection(rows)
    state = [
        rows.counts, rows.shares, b.sums, b.prefixes, b.above, b.ties, a.prefixes, a.above, a.ties,
    ]  # fmt: skip
    part_sums = torch.empty(rows.num_rows, rows.num_parts, dtype=torch.int64, device=rows.scores.device)
    launch(
        sum_parts_kernel, (rows.num_rows, rows.num_parts), rows.scores, rows.places, rows.peaks,
        rows.inverses,
        rows.least, *state, part_sums, rows.num_rows, rows.num_parts, rows.size, rows.scores.stride(0),
        FIRST=first is not None, SECOND=second is not None, **rows.shape,
    )  # fmt: skip
    return part_sums, state


def draw(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    """scores fp32 [rows, vocab] without NaN or +inf → one id per choice, int64."""
    return draw_rows(_rows_of(scores, choices))


def draw_rows(rows: Rows) -> Tensor:
    """One id per row, int64 [R]; asks the host for nothing."""
    scores = rows.scores
    first = _select(rows, None, by_weight=False) if rows.by_count else None
    second = _select(rows, first, by_weight=True) if rows.by_weight else None
    part_sums, state = _sum_parts(rows, first, second)
    tokens = torch.empty(rows.num_rows, dtype=torch.int64, device=scores.device)
    launch(
        draw_kernel, (rows.num_rows,), scores, rows.places, rows.peaks, rows.inverses, rows.least, *state,
        part_sums, rows.seeds, rows.positions, tokens, rows.num_rows, rows.num_parts, rows.size,
        scores.stride(0),
        FIRST=first is not None, SECOND=second is not None, **rows.shape,
    )  # fmt: skip
    return tokens


def top(row: Tensor, count: int) -> list[int]:
    """Ids of the `count` largest scores of one row, larger first, among equals the lower id first."""
    if count == 0:
        return []
    rows = _rows_of(row[None], [_whole(float(row.max()), count)])
    if rows.by_count:
        made = _select(rows, None, by_weight=False)
        threshold, above = int(made.prefixes[-1, 0]), int(made.above[0])
        bits = (row + 0.0).view(torch.int32)
        keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + (1 << 31)
        larger = (keys > threshold).nonzero()[:, 0]
        found = torch.cat([larger, (keys == threshold).nonzero()[: count - above, 0]])
    else:
        found = torch.arange(len(row), device=row.device)
    values = row[found].cpu().numpy()
    ids = found.cpu().numpy()
    return [int(i) for i in ids[np.lexsort((ids, -values))]]


def total_weight(row: Tensor, peak: float) -> float:
    """Σ e^(score - peak), on the grid of the weights; exact."""
    part_sums, _ = _sum_parts(_rows_of(row[None], [_whole(peak, 0)]), None, None)
    return int(part_sums.sum()) * 2.0**-34


def _whole(peak: float, top_k: int) -> Choice:
    return Choice(0, 0, peak, 1.0, top_k, 1.0, 0.0, 0, 0)
