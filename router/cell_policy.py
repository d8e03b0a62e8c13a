"""Placement in a fleet too large to look at as a whole: a cell is chosen, the elastic policy decides in it.

1. Who joined and left is followed; a fleet of one cell is the elastic policy's alone, decision by decision.
2. `router.cells` probes a few cells, among them the one that holds most of the prompt's prefix, and orders
   them by their load summaries. These are at most `oldest_s` old; what was placed since is added to them.
3. `Elastic` decides over a copy of the best cell's rows, as of now; if nobody there can take the request, in
   the next one.
4. A request for which none of these has a place is decided over the whole fleet. So it waits or is refused
   only if the elastic policy says so of all workers, and for the reason that it gives.

Bounds: O(workers of a cell), and a few vector operations over all where a prefix is known; step 4 costs what
a decision costs without cells.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from cluster.ids import BlockHash, WorkerId
from router.cell_members import CellMembers, Member
from router.cells import NOTHING, CellAsk, CellBook, CellLoad, CellSettings, load_of, probes
from router.choosing import Rows, highest
from router.fleet import Column, Fleet
from router.policy import Elastic, Placement, PlacementRequest, Reject
from router.prefix_index import PrefixIndex
from router.view import ClusterView


class InCells:
    """See the module. What it keeps follows from the views it was shown: who is in which cell, how loaded."""

    def __init__(self, inside: Elastic, settings: CellSettings | None = None) -> None:
        self._inside = inside
        self._settings = settings or CellSettings()
        self._members = CellMembers(self._settings)
        self._followed: tuple[ClusterView, int] | None = None  # the view and its `abilities`
        self._parts: list[_Part] = []  # one per cell
        self._cell_of: Rows = np.zeros(0, dtype=np.intp)  # row |-> cell
        self._book = CellBook([], self._settings)

    @property
    def num_cells(self) -> int:
        return len(self._members)

    def place(self, view: ClusterView, request: PlacementRequest, now: float) -> Placement | Reject:
        self._follow(view)
        if len(self._members) == 1 or view.is_full:
            return self._inside.place(view, request, now)
        cached = view.prefix.lookup(request.hashes, view.fleet.num_workers)
        ask = self._ask(view, request, cached, now)
        probed = self._book.probed(ask)
        self._refresh(probed, now)
        for cell in self._book.best_first(probed, ask):
            self._parts[cell].refresh(cached)
            decision = self._inside.place(self._parts[cell], request, now)
            if isinstance(decision, Placement):
                self._book.placed(cell, ask)
                return decision
        return self._inside.place(view, request, now)

    def _ask(
        self, view: ClusterView, request: PlacementRequest, cached: Column | None, now: float
    ) -> CellAsk:
        own, defaults = request.targets, self._inside.defaults
        step_s = min(own.tpot_s, own.gap_s, defaults.tpot_s, defaults.gap_s)
        draw = _draw(request, now)
        return CellAsk(
            num_tokens=request.num_tokens,
            kv_tokens=request.num_tokens + 1,
            expected_output=request.expected_output,
            step_s=step_s * self._inside.config.elastic.safety,
            draw=draw,
            cached=NOTHING if cached is None else self._cached_tokens(view, request, cached, draw),
            near=None if cached is not None else self._cell_of_session(view, request),
        )

    def _cell_of_session(self, view: ClusterView, request: PlacementRequest) -> int | None:
        row = None if request.near is None else view.rows.get(request.near.decode)
        return None if row is None else int(self._cell_of[row])

    def _cached_tokens(
        self, view: ClusterView, request: PlacementRequest, cached: Column, draw: int
    ) -> dict[int, float]:
        """By cell: of those that are drawn, and of one with the longest prefix, if that is longer."""
        most = request.num_tokens - 1.0
        tokens = {}
        for cell in probes(draw, len(self._parts), self._settings.num_probed):
            tokens[cell] = min(highest(cached[self._parts[cell].of_whole]) * view.block_size, most)
        longest = highest(cached)
        if min(longest * view.block_size, most) > max(tokens.values()):
            holders = (cached == longest).nonzero()[0]
            row = int(holders[draw % len(holders)])
            tokens[int(self._cell_of[row])] = min(longest * view.block_size, most)
        return tokens

    def _refresh(self, probed: Sequence[int], now: float) -> None:
        """New summaries: of the cell that needs it most, and of those that must have one; the others have
        theirs made by later decisions, so that none makes many."""
        settings = self._settings
        aged = sorted((self._parts[cell].told_at, cell) for cell in probed)
        for order, (told_at, cell) in enumerate(aged):
            if now - told_at >= (settings.refresh_s if order == 0 else settings.oldest_s):
                self._parts[cell].told_at = now
                self._book.tell(cell, self._parts[cell].load())

    def _follow(self, view: ClusterView) -> None:
        is_other = self._followed is None or self._followed[0] is not view
        if self._followed is not None and not is_other and self._followed[1] == view.abilities:
            return
        self._followed = view, view.abilities
        here = {name: Member(row, bool(view.model_len[row] > 0)) for name, row in view.rows.items()}
        if not self._members.follow(here) and not is_other:
            return
        self._parts = []
        if len(self._members) == 1:
            return
        self._cell_of = np.zeros(view.fleet.num_workers, dtype=np.intp)
        for cell, members in enumerate(self._members.rows()):
            rows = np.array(members, dtype=np.intp)
            self._cell_of[rows] = cell
            self._parts.append(_Part(view, rows))
        self._book = CellBook([CellLoad() for _ in self._parts], self._settings)


def _draw(request: PlacementRequest, now: float) -> int:
    """Differs from request to request, and depends on nothing else."""
    bits: int = struct.unpack("<Q", struct.pack("<d", now))[0]
    last = int.from_bytes(request.hashes[-1][:8], "little") if request.hashes else 0
    return bits ^ last ^ (request.num_tokens << 20) ^ request.max_tokens


class _Part(ClusterView):
    """A cell of a view: copies of its rows, taken anew before each decision."""

    def __init__(self, whole: ClusterView, rows: Rows) -> None:
        ids: list[WorkerId | None] = [whole.ids[row] for row in rows]
        super().__init__(
            fleet=_PartOfFleet(whole.fleet, rows),
            prefix=_Known(rows),
            ids=ids,
            rows={name: at for at, name in enumerate(ids) if name is not None},
            block_size=whole.block_size,
        )
        self.told_at = -np.inf  # when its summary was made
        self._whole = whole
        self.of_whole = rows

    def refresh(self, cached: Column | None) -> None:
        """As of now. `cached`: blocks of the prompt, by row of the whole view."""
        whole, rows = self._whole, self.of_whole
        assert isinstance(self.fleet, _PartOfFleet)
        assert isinstance(self.prefix, _Known)
        self.fleet.refresh()
        self.prefix.cached = cached
        self.block_size, self.kv_bytes_per_token = whole.block_size, whole.kv_bytes_per_token
        self.decode_capacity = whole.decode_capacity[rows]
        self.send_capacity = whole.send_capacity[rows]
        self.open_blocks = whole.open_blocks[rows]
        self.guessed = whole.guessed and {at for at, row in enumerate(rows.tolist()) if row in whole.guessed}

    def load(self) -> CellLoad:
        assert isinstance(self.fleet, _PartOfFleet)
        self.fleet.refresh()
        return load_of(self.fleet)

    def mean_life_s(self) -> float | None:
        return self._whole.mean_life_s()


class _PartOfFleet(Fleet):
    def __init__(self, whole: Fleet, rows: Rows) -> None:
        super().__init__([], [], [])
        self.resize(len(rows))
        self._whole = whole
        self._of_whole = rows

    def refresh(self) -> None:
        self.take(self._whole, self._of_whole)

    def exposed_s(self, prefill: int, num_bytes: Column | float, handoff_s: float) -> Column:
        edge = self._whole.edges.get(int(self._of_whole[prefill]))
        if edge is None:
            return super().exposed_s(prefill, num_bytes, handoff_s)
        exposed: Column = edge.base_s[self._of_whole] + num_bytes * edge.byte_s[self._of_whole]
        return exposed


class _Known(PrefixIndex):
    """What a look-up has found, in a cell."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._of_whole = rows
        self.cached: Column | None = None

    def lookup(self, hashes: Sequence[BlockHash], num_rows: int) -> Column | None:
        if self.cached is None:
            return None
        found: Column = self.cached[self._of_whole]
        return found if found.any() else None
