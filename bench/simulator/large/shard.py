"""One process's share of a large fleet: its cells, each a `Simulation` of its own, and the choice of cells.

1. Time goes on in windows of `Plan.window_s`. Every process draws all arrivals of a window and chooses the
   cell of each by `router.cells`, from the same figures: so all choose equally, without a message per
   request. The requests of its own cells are offered to them.
2. Its cells run to the end of the window, one after the other: between them nothing moves.
3. They say how loaded they are (`load_of`), and that goes to the other processes. In the window after next,
   choices go by it, and by what has been placed since: as a router would see it, one to two windows old.
4. After the last arrival the cells run on until whoever is in flight has ended or missed its targets.

So the number of processes changes nothing: one or many give the same requests to the same cells, in the same
order. What is simplified, against one router that sees every worker at every moment:

- A request stays in its cell; its KV moves within it. A prefix cached in another cell is computed again.
- Cells are chosen by summaries that are one to two windows old. They count answers of `PRIOR_TOKENS`.
- Each cell learns by itself how long answers are.
- Which prefixes a cell has is what it was sent, not what it has kept (`large.prefixes`).

Inside a cell everything is as `baton simulate` has it: the same objects, the same code. With one cell it is
the same run, request by request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from bench.simulator.fleet.elastic import ElasticPolicy
from bench.simulator.fleet.request import Request
from bench.simulator.fleet.simulation import Simulation
from bench.simulator.fleet.worker import BLOCK_TOKENS, Worker
from bench.simulator.hardware import Hardware
from bench.simulator.large.links import Link
from bench.simulator.large.plan import Plan
from bench.simulator.large.prefixes import SentPrefixes
from bench.simulator.large.stream import Arrival, Stream
from bench.simulator.large.tally import Tally
from cluster.slo_classes import Targets
from router.cells import NOTHING, CellAsk, CellBook, CellLoad, CellSettings, load_of, probes
from router.elastic import ElasticSettings
from router.fleet import Fleet
from router.output_lengths import PRIOR_TOKENS

OnEnd = Callable[[Request], None]


class _Told(ElasticPolicy):
    """Says which requests have ended."""

    def __init__(self, targets: Targets, on_end: OnEnd, use_prefix_cache: bool) -> None:
        super().__init__(targets, use_prefix_cache=use_prefix_cache)
        self._on_end = on_end

    def ended(self, request: Request, worker: Worker) -> None:
        super().ended(request, worker)
        self._on_end(request)

    def load(self) -> CellLoad:
        return load_of(self._fleet)


class Cell:
    """A simulated cell and its policy."""

    def __init__(self, pool: Sequence[Hardware], targets: Targets, on_end: OnEnd, prefix_cache: bool) -> None:
        self._policy = _Told(targets, on_end, prefix_cache)
        self.simulation = Simulation(pool, (), self._policy, targets.tpot_s, prefix_cache)

    def load(self) -> CellLoad:
        return self._policy.load()

    def facts(self) -> dict[str, Any]:
        return self._policy.facts()


class Shard:
    """Owns the cells `process`, `process + num_processes`, ..."""

    def __init__(
        self,
        plan: Plan,
        process: int = 0,
        links: Sequence[Link] = (),
        on_end: OnEnd | None = None,
        on_window: Callable[[float], None] | None = None,
    ) -> None:
        """`links`: to all processes but this one, in order. `on_window` is told the virtual time."""
        self._plan = plan
        self._process = process
        self._links = links
        self._num_processes = len(links) + 1
        self._on_window = on_window
        self._targets = plan.targets()
        rows = plan.rows()
        self._stream = Stream(rows, plan.rate, plan.seconds, plan.seed)
        self._longest = max(row.output_tokens for row in rows)
        self._step_s = min(self._targets.tpot_s, self._targets.gap_s) * ElasticSettings().safety
        self.tally = Tally(self._targets, *plan.measured_s)
        pool = plan.pool()
        self.cells = {
            number: Cell(
                plan.cell_pool(pool, number), self._targets, on_end or self.tally.ended, plan.prefix_cache
            )
            for number in range(process, plan.num_cells, self._num_processes)
        }
        self._settings = CellSettings(workers=plan.cell_workers)
        empty = [_empty_load(plan.cell_pool(pool, number)) for number in range(plan.num_cells)]
        self._book = CellBook(empty, self._settings)
        self._sent = SentPrefixes()

    def run(self) -> None:
        plan, book = self._plan, self._book
        num_windows = max(1, -int(-plan.seconds // plan.window_s))
        own: deque[list[CellLoad]] = deque()
        before = _copies(book)
        for window in range(num_windows):
            if window >= 2:
                self._tell(self._all_loads(window - 2, own.popleft()), before)
            before = _copies(book)
            end_s = (window + 1) * plan.window_s
            for arrival in self._stream.until(end_s):
                self._place(arrival)
            for cell in self.cells.values():
                cell.simulation.run(end_s)
            if window + 2 < num_windows:  # somebody will go by it
                own.append([cell.load() for cell in self.cells.values()])
                for link in self._links:
                    link.send(window, own[-1])
            if self._on_window is not None:
                self._on_window(end_s)
        drained_s = plan.seconds + self._targets.ttft_s + self._targets.tpot_s * self._longest
        for cell in self.cells.values():
            cell.simulation.run(drained_s)

    # ---- choosing

    def _place(self, arrival: Arrival) -> None:
        draw = arrival.index ^ (self._plan.seed << 40)
        ask = CellAsk(
            num_tokens=arrival.num_prompt,
            kv_tokens=arrival.num_prompt + arrival.num_output,
            expected_output=PRIOR_TOKENS,
            step_s=self._step_s,
            draw=draw,
            cached=self._cached(arrival, draw) if arrival.blocks and self._plan.prefix_cache else NOTHING,
        )
        number = self._book.best(ask)
        if number is None:  # larger than any worker's KV
            if arrival.index % self._num_processes == self._process:
                self.tally.arrived(arrival.at_s)
                self.tally.rejected(arrival.at_s)
            return
        self._book.placed(number, ask)
        if arrival.blocks:
            self._sent.sent(arrival.blocks, number)
        if (cell := self.cells.get(number)) is not None:
            self.tally.arrived(arrival.at_s)
            cell.simulation.offer((arrival.request(),))

    def _cached(self, arrival: Arrival, draw: int) -> dict[int, float]:
        """Tokens by cell: of those that are drawn, and of one with the longest prefix, if that is longer."""
        sent, blocks, num_cells = self._sent, arrival.blocks, self._plan.num_cells
        count, bits = sent.longest(blocks)
        if not count:
            return {}
        cells = probes(draw, num_cells, self._settings.num_probed)
        found = {cell: sent.of(blocks, cell) for cell in cells}
        if count > max(found.values()):
            holders = [cell for cell in range(num_cells) if bits >> cell & 1]
            found[holders[draw % len(holders)]] = count
        most = arrival.num_prompt - 1
        return {cell: float(min(number * BLOCK_TOKENS, most)) for cell, number in found.items()}

    # ---- loads

    def _all_loads(self, window: int, own: list[CellLoad]) -> list[CellLoad]:
        """Every cell's, as of the end of `window`."""
        parts = [link.receive(window) for link in self._links]
        parts.insert(self._process, own)
        num = self._num_processes
        return [parts[cell % num][cell // num] for cell in range(self._plan.num_cells)]

    def _tell(self, loads: Sequence[CellLoad], before: Sequence[CellLoad]) -> None:
        """Loads of the window before last, and what was placed in the last one since `before`."""
        for cell, load in enumerate(loads):
            now, then = self._book.load(cell), before[cell]
            load.work_s += now.work_s - then.work_s
            load.decode_s += now.decode_s - then.decode_s
            load.held += now.held - then.held
            self._book.tell(cell, load)


def _copies(book: CellBook) -> list[CellLoad]:
    """The loads of this moment."""
    return [copy(book.load(cell)) for cell in range(len(book))]


def _empty_load(pool: Sequence[Hardware]) -> CellLoad:
    return load_of(
        Fleet(
            [one.model for one in pool],
            [one.kv_tokens for one in pool],
            [one.link_bytes_s for one in pool],
        )
    )
