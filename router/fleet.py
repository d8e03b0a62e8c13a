"""What placement reads of all workers: a column per figure, an entry per worker.

1. The simulated pool builds a `Fleet` once; the live router gives a worker a row when it joins and takes it
   back when it leaves (`router.view`). A row that nobody has may neither prefill nor decode.
2. Whoever owns it writes entries as workers report and requests move. Decisions only read.
3. `EdgeRow`s say what a hand-off from one prefill worker costs towards every other worker, where it was
   measured; elsewhere it follows from the workers' bandwidth.

Seconds, tokens, bytes per second; counts are floats because they are only compared and multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.step_model import StepModel
from router.prompt_lengths import HASTE_FROM, NEARLY, Lengths, shares_in_time

Column = NDArray[np.float64]
Flags = NDArray[np.bool_]

NOBODY = StepModel(0.0, 0.0, 1.0, 0.0, 0.0)  # of a row without a worker
EXPOSED = 0.1  # share of a transfer that is not hidden behind the prefill
NO_WORTH = 1e9  # reading per token computed, of a row without a worker: never the least

_T = TypeVar("_T", bound=np.generic)

_FLOATS = 25
_FLAGS = 3


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """Hand-offs from one prefill worker: exposed seconds = `base_s` + bytes x `byte_s`, per decode worker."""

    base_s: Column
    byte_s: Column


class Worker(msgspec.Struct, frozen=True, gc=False):
    """One worker's entries, by the names and in the order of the columns."""

    fixed_s: float
    floor_s: float
    per_token_s: float
    per_context_s: float
    per_attention_s: float
    reading: float
    kv_tokens: float
    bytes_s: float
    work_s: float
    late_s: float
    queued_load_s: float
    rows: float
    context: float
    coming_rows: float
    coming_context: float
    kv_used: float
    kv_promised: float
    last_placed: float
    yield_s: float
    late_rate: float
    on_time_share: float
    worth: float
    mixed_s: float
    haste: float
    far_load_s: float
    can_prefill: bool
    can_decode: bool
    can_send: bool


def grown(table: NDArray[_T], num_columns: int) -> NDArray[_T]:
    """The table, with room for so many columns; it doubles, so that they may come one by one."""
    num_rows, room = table.shape
    if num_columns <= room:
        return table
    larger = np.zeros((num_rows, max(num_columns, 2 * room)), dtype=table.dtype)
    larger[:, :room] = table
    return larger


class Fleet:
    """See the module. The columns are views of two tables, bound anew by `resize`. The tables have room for
    more; columns end with the last row that was ever taken, so that decisions see few of nobody's."""

    def __init__(
        self, models: Sequence[StepModel], kv_tokens: Sequence[float], bytes_s: Sequence[float]
    ) -> None:
        self.edges: dict[int, EdgeRow] = {}
        self._prompts: tuple[Lengths, float, float] | None = None  # see `expect`
        self._best_worth = 1.0  # of all, when `expect` was told
        self._bind(np.zeros((_FLOATS, 0)), np.zeros((_FLAGS, 0), dtype=np.bool_), 0)
        self.resize(len(models))
        for row, model in enumerate(models):
            self.set_model(row, model)
        self.rows[:] = 0.0
        self.kv_tokens[:] = kv_tokens
        self.bytes_s[:] = bytes_s
        self.can_prefill[:] = self.can_decode[:] = self.can_send[:] = True

    def _bind(self, floats: Column, flags: Flags, num_workers: int) -> None:
        self._floats, self._flags = floats, flags
        self._least: tuple[float, float] | None = None  # see `least`; None: not known
        self._dearest: tuple[float, float] | None = None  # see `dearest`
        self._either: tuple[tuple[bytes, float, float], Column] | None = None  # what was asked for, answered
        self.num_workers = num_workers
        floats, flags = floats[:, :num_workers], flags[:, :num_workers]
        # the worker's step model; `reading`: of a key, in tokens computed
        self.fixed_s, self.floor_s, self.per_token_s = floats[0], floats[1], floats[2]
        self.per_context_s, self.per_attention_s, self.reading = floats[3], floats[4], floats[5]
        self.kv_tokens: Column = floats[6]
        self.bytes_s: Column = floats[7]  # bandwidth of its hand-offs
        self.work_s: Column = floats[8]  # prefill queued there, of prompts expected in time
        self.late_s: Column = floats[9]  # prefill queued there, of all others
        self.queued_load_s: Column = floats[10]  # what that work will add to each step as decode, there
        self.rows: Column = floats[11]  # decoding there, in every step
        self.context: Column = floats[12]
        self.coming_rows: Column = floats[13]  # placed there to decode, and not there yet
        self.coming_context: Column = floats[14]
        self.kv_used: Column = floats[15]  # tokens
        self.kv_promised: Column = floats[16]  # to what is placed there and holds nothing there yet
        self.last_placed: Column = floats[17]  # order of the latest placement there; 0: never
        self.yield_s: Column = floats[18]  # of a step with all rows that need not be in it, theirs
        self.late_rate: Column = floats[19]  # share of the time that late prompts got lately; 0: not measured
        self.on_time_share: Column = floats[20]  # of what decode leaves of a step, for prompts in time
        self.worth: Column = floats[21]  # of its seconds as prefill: the share of prompts it is in time with
        self.mixed_s: Column = floats[22]  # of the step model
        self.haste: Column = floats[23]  # of the best: share of prompts in time only if nobody decodes there
        self.far_load_s: Column = floats[24]  # what rows that are computed elsewhere will add to each step
        self.can_prefill: Flags = flags[0]
        self.can_decode: Flags = flags[1]
        self.can_send: Flags = flags[2]  # what it prefills may decode elsewhere

    def resize(self, num_rows: int) -> None:
        """More rows, of nobody. `edges` are the caller's."""
        old = self.num_workers
        assert num_rows >= old, (num_rows, old)
        self._bind(grown(self._floats, num_rows), grown(self._flags, num_rows), num_rows)
        for row in range(old, num_rows):
            self.clear(row)

    def clear(self, row: int) -> None:
        """Nobody's again."""
        self._floats[:, row] = 0.0
        self._flags[:, row] = False
        self.bytes_s[row] = self.rows[row] = self.on_time_share[row] = self.worth[row] = 1.0
        self.kv_tokens[row] = 1e18  # so a decision sees neither an idle worker nor a full one here
        self.set_model(row, NOBODY)
        self.reading[row] = NO_WORTH
        self.worth[row] = 1.0

    def set_model(self, row: int, model: StepModel) -> None:
        self.fixed_s[row], self.floor_s[row] = model.fixed_s, model.floor_s
        self.per_token_s[row] = per_token_s = max(model.per_token_s, 1e-12)
        self.per_context_s[row], self.per_attention_s[row] = model.per_context_s, model.per_attention_s
        self.mixed_s[row] = model.mixed_s
        self.reading[row] = model.per_context_s / per_token_s
        self._value(slice(row, row + 1))

    def set_prices(self, mixed_s: Column | float) -> None:
        """Of mixed steps, whatever the models say."""
        self.mixed_s[:] = mixed_s
        self._dearest = None

    def expect(self, lengths: Lengths, within_s: float, step_s: float) -> None:
        """Prompts are as long as these, each as likely, and want their first token `within_s`; streams bear
        steps of `step_s`."""
        self._prompts = lengths, within_s, step_s
        self._value(slice(None))

    def _value(self, rows: slice) -> None:
        self._least = self._dearest = None
        if self._prompts is None:
            return
        models = [
            column[rows] for column in (self.fixed_s, self.floor_s, self.per_token_s, self.per_attention_s)
        ]
        is_somebody = self.reading[rows] < NO_WORTH
        idle, busy = shares_in_time(models, *self._prompts)
        self.worth[rows] = np.where(is_somebody, idle, 1.0)
        if is_somebody.any() and len(idle) == self.num_workers:
            self._best_worth = float(idle[is_somebody].max())
        is_hasty = is_somebody & (idle - busy > HASTE_FROM) & (idle >= NEARLY * self._best_worth)
        self.haste[rows] = np.where(is_hasty, idle - busy, 0.0)

    def least(self) -> tuple[float, float]:
        """The least `reading` and the least `worth` of all, be it not of one worker."""
        if self._least is None:
            is_empty = not self.num_workers
            self._least = (0.0, 1.0) if is_empty else (float(self.reading.min()), float(self.worth.min()))
        return self._least

    def dearest(self) -> tuple[float, float]:
        """The largest `mixed_s` and the largest `haste` of all, be it not of one worker."""
        if self._dearest is None:
            is_empty = not self.num_workers
            self._dearest = (0.0, 0.0) if is_empty else (float(self.mixed_s.max()), float(self.haste.max()))
        return self._dearest

    def either(self, flags: Flags, value: float, other: float) -> Column:
        """One of two numbers each, `value` where the flag is set. Kept until something else is asked for."""
        asked = flags.tobytes(), value, other
        if self._either is None or self._either[0] != asked:
            self._either = asked, np.where(flags, value, other)
        return self._either[1]

    def exposed_s(self, prefill: int, num_bytes: Column | float, handoff_s: float) -> Column:
        """How long the stream stands still while `num_bytes` move from `prefill` to each worker."""
        edge = self.edges.get(prefill)
        if edge is None:
            exposed: Column = handoff_s + num_bytes * EXPOSED / self.bytes_s
        else:
            exposed = edge.base_s + num_bytes * edge.byte_s
        return exposed

    def worker(self, row: int) -> Worker:
        """As of now."""
        return Worker(*self._floats[:, row].tolist(), *self._flags[:, row].tolist())

    def workers(self) -> list[Worker]:
        """All rows, as of now."""
        floats, flags = self._floats[:, : self.num_workers], self._flags[:, : self.num_workers]
        rows = zip(floats.T.tolist(), flags.T.tolist(), strict=True)
        return [Worker(*floats, *flags) for floats, flags in rows]

    def copy(self) -> Fleet:
        """A recorded view: what it says does not change any more."""
        other = Fleet([], [], [])
        other._bind(self._floats.copy(), self._flags.copy(), self.num_workers)
        other.edges = {
            row: EdgeRow(edge.base_s.copy(), edge.byte_s.copy()) for row, edge in self.edges.items()
        }
        return other

    def take(self, whole: Fleet, rows: NDArray[np.intp]) -> None:
        """Become a copy of these rows of another fleet, as many as here; without its edges."""
        whole._floats.take(rows, axis=1, out=self._floats, mode="clip")
        whole._flags.take(rows, axis=1, out=self._flags, mode="clip")
        self._least = self._dearest = None

    def equals(self, other: Fleet) -> bool:
        """Every entry."""
        return (
            self.num_workers == other.num_workers
            and np.array_equal(self._floats[:, : self.num_workers], other._floats[:, : self.num_workers])
            and np.array_equal(self._flags[:, : self.num_workers], other._flags[:, : self.num_workers])
            and self.edges.keys() == other.edges.keys()
            and all(
                np.array_equal(edge.base_s, other.edges[row].base_s)
                and np.array_equal(edge.byte_s, other.edges[row].byte_s)
                for row, edge in self.edges.items()
            )
        )
