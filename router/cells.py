"""Which part of a large fleet a request goes to: its cell, of some tens to a few hundred workers.

A decision looks at every worker it may choose, so it costs more the larger the fleet is. A large fleet is
therefore divided into cells; hand-offs from P to D stay within one.

1. Each cell sums itself up as a `CellLoad`: the worker that it has on average.
2. `CellBook` keeps the loads as they were last told, and adds what has been placed since: a summary may be
   older than many placements.
3. A request comes: `CellBook.probed` names a few cells for it, `best_first` puts them in order.
   `router.elastic.place` decides within the first; if nobody there can take it, within the next.

Algorithm: a few cells are probed, drawn by a number that the request brings, and so are those that hold a
prefix of it. A cell is judged as `router.elastic` judges a worker, by its mean one: the seconds until a first
token, the queued work and the prompt's uncached tokens, divided by what decode leaves of a step. One whose KV
is nearly full comes after the others. Choosing among few that are drawn, not the least loaded of all, keeps
routers with equally old summaries from all sending to the same cell.

Order: by predicted seconds; among equals one with a prefix, then in the order drawn.

When nothing fits: a cell that could never hold the request is left out. If that leaves none of those probed,
`best` goes on with all others; the live router (`router.cell_policy`) decides over the whole fleet.

Bounds: O(probed), and O(cells log cells) for all. Pure, no clock; equal calls in equal order give equal
answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from router.fleet import Column, Fleet

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_FULL_S = 1e6  # seconds of waiting, for all of the KV beyond what may be held
NOTHING: Mapping[int, float] = {}


@dataclass(frozen=True, slots=True)
class CellSettings:
    workers: int = 256  # of a cell
    most_together: int = 2048  # a fleet of so many is one cell: cells would not make its decisions cheaper
    num_probed: int = 2
    min_share: float = 0.03  # of a step, assumed for prompts when decode leaves less
    near: float = 0.9  # of its predicted seconds, for the cell where the session was last
    most_held: float = 0.95  # share of the KV; a cell that holds more comes later
    refresh_s: float = 0.05  # age of a summary after which the live router makes a new one, one per decision
    oldest_s: float = 0.5  # and after which it makes one in any case


class CellLoad(msgspec.Struct):
    """What a cell says of itself: its mean worker, of those that may compute prompts now.

    `work_s`: queued prefill, late prompts' too. `decode_s`: of a step, what decode takes there once all that
    is queued or on its way decodes. `held`: share of the KV that is held or promised. `largest`: tokens of KV
    that one request may have on some worker.
    """

    num_workers: float = 0.0
    largest: float = 0.0
    token_s: float = 0.0  # of a prompt token
    attention_s: float = 0.0  # of a query-key pair
    context_s: float = 0.0  # of a key read
    kv_tokens: float = 0.0
    work_s: float = 0.0
    decode_s: float = 0.0
    held: float = 0.0

    def own_s(self, num_tokens: int, cached: float) -> float:
        """Seconds of a prompt's uncached tokens."""
        new = num_tokens - cached
        return new * (self.token_s + self.attention_s * (cached + num_tokens + 1) / 2)

    def first_token_s(self, num_tokens: int, cached: float, step_s: float, settings: CellSettings) -> float:
        """Until the first token, on the mean worker; a figure to compare cells by."""
        share = 1.0 - self.decode_s / step_s
        if share < settings.min_share:
            share = settings.min_share
        seconds = (self.work_s + self.own_s(num_tokens, cached)) / share
        over = self.held - settings.most_held
        return seconds + _FULL_S * over if over > 0 else seconds

    def add(self, num_tokens: int, cached: float, expected_output: float) -> None:
        """A request was placed in the cell: its prefill is queued, its decode will come."""
        self.work_s += self.own_s(num_tokens, cached) / self.num_workers
        self.decode_s += (self.token_s + self.context_s * num_tokens) / self.num_workers
        self.held += (num_tokens + expected_output - cached) / (self.num_workers * self.kv_tokens)


def load_of(fleet: Fleet) -> CellLoad:
    """The summary of a cell whose workers are the rows of `fleet`."""
    weights: Column = fleet.can_prefill.astype(np.float64)
    num_workers = float(weights.sum())
    if num_workers == 0:
        return CellLoad()
    weights /= num_workers
    rows, context = fleet.rows + fleet.coming_rows, fleet.context + fleet.coming_context
    kv_tokens = _dot(weights, fleet.kv_tokens)
    decode_s = _dot(weights, fleet.fixed_s) + _dot(weights, fleet.queued_load_s)
    decode_s += _dot(weights * fleet.per_token_s, rows) + _dot(weights * fleet.per_context_s, context)
    return CellLoad(
        num_workers=num_workers,
        largest=float((fleet.kv_tokens * fleet.can_prefill).max()),
        token_s=_dot(weights, fleet.per_token_s),
        attention_s=_dot(weights, fleet.per_attention_s),
        context_s=_dot(weights, fleet.per_context_s),
        kv_tokens=kv_tokens,
        work_s=_dot(weights, fleet.work_s) + _dot(weights, fleet.late_s),
        decode_s=decode_s,
        held=(_dot(weights, fleet.kv_used) + _dot(weights, fleet.kv_promised)) / kv_tokens,
    )


def _dot(left: Column, right: Column) -> float:
    return float(np.dot(left, right))


class CellAsk(msgspec.Struct, frozen=True):
    """What the choice of a cell knows of a request. `cached`: tokens of its prefix by cell, where some are;
    `draw`: a number of its own, from which the cells to probe follow; `near`: where its session was last."""

    num_tokens: int
    kv_tokens: int  # that it must be able to hold at once
    expected_output: float
    step_s: float  # a step as long as its targets allow
    draw: int
    cached: Mapping[int, float] = NOTHING
    near: int | None = None


class CellBook:
    """Owns what is known of the cells' loads."""

    def __init__(self, loads: Sequence[CellLoad], settings: CellSettings) -> None:
        self._loads = list(loads)
        self._settings = settings

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, cell: int) -> CellLoad:
        return self._loads[cell]

    def tell(self, cell: int, load: CellLoad) -> None:
        """A new summary; what was placed before it is part of it."""
        self._loads[cell] = load

    def probed(self, ask: CellAsk) -> list[int]:
        """Those with a prefix, the session's, and some that are drawn; each once."""
        cells = list(ask.cached)
        if ask.near is not None and ask.near not in cells:
            cells.append(ask.near)
        for cell in probes(ask.draw, len(self._loads), self._settings.num_probed):
            if cell not in cells:
                cells.append(cell)
        return cells

    def best_first(self, cells: Sequence[int], ask: CellAsk) -> list[int]:
        """These cells in order, without those that could never hold the request."""
        timed = [(self._seconds(cell, ask), order, cell) for order, cell in enumerate(cells)]
        return [cell for seconds, _, cell in sorted(timed) if seconds < math.inf]

    def best(self, ask: CellAsk) -> int | None:
        """The best of those probed, or of all others if none of those could hold it; None: no cell could."""
        probed = self.probed(ask)
        found = self._best_of(probed, ask)
        if found is None:
            found = self._best_of([cell for cell in range(len(self._loads)) if cell not in probed], ask)
        return found

    def _best_of(self, cells: Sequence[int], ask: CellAsk) -> int | None:
        """The first of `best_first`."""
        best, least_s = None, math.inf
        for cell in cells:
            seconds = self._seconds(cell, ask)
            if seconds < least_s:
                best, least_s = cell, seconds
        return best

    def _seconds(self, cell: int, ask: CellAsk) -> float:
        """What it is judged by; infinite if it could never hold the request."""
        load, settings = self._loads[cell], self._settings
        if load.largest < ask.kv_tokens:
            return math.inf
        cached = ask.cached.get(cell, 0.0) if ask.cached else 0.0
        seconds = load.first_token_s(ask.num_tokens, cached, ask.step_s, settings)
        return seconds * settings.near if cell == ask.near else seconds

    def placed(self, cell: int, ask: CellAsk) -> None:
        """The request went there."""
        self._loads[cell].add(ask.num_tokens, ask.cached.get(cell, 0.0), ask.expected_output)


def probes(draw: int, num_cells: int, num_probed: int) -> list[int]:
    """So many different cells (all, if there are no more), as if drawn at random by `draw`: the generator
    `splitmix64`, begun at it."""
    if num_cells <= num_probed:
        return list(range(num_cells))
    drawn: list[int] = []
    state = (draw * 0xD1342543DE82EF95) & _MASK
    while len(drawn) < num_probed:
        state = (state + _GOLDEN) & _MASK
        mixed = state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        cell = (mixed ^ (mixed >> 31)) % num_cells
        if cell not in drawn:
            drawn.append(cell)
    return drawn
