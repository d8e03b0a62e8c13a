"""The router's picture of its workers as a decision reads it: columns, a row per worker.

`router.worker_book` owns it and keeps it up to date; a decision reads it at once and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from cluster.ids import WorkerId
from cluster.wire.messages import KVGeometry, Role
from router.choosing import highest
from router.fleet import Column, Fleet, grown
from router.prefix_index import PrefixIndex

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}
NO_REFUSAL = np.inf
_COLUMNS = (
    "capacity",
    "model_len",
    "slots",
    "blocks",
    "refused",
    "life_s",
    "decode_capacity",
    "send_capacity",
    "open_blocks",
)


@dataclass(slots=True)
class ClusterView:
    """`fleet` says how workers are loaded, the columns here what they can hold. Row |-> worker is `ids`."""

    fleet: Fleet = field(default_factory=lambda: Fleet([], [], []))
    prefix: PrefixIndex = field(default_factory=PrefixIndex)
    ids: list[WorkerId | None] = field(default_factory=list)
    rows: dict[WorkerId, int] = field(default_factory=dict)
    present: Counter[Role] = field(default_factory=Counter)
    block_size: int = 1
    kv_bytes_per_token: float = 1.0
    capacity: Column = field(default_factory=lambda: np.zeros(0))  # tokens of KV one request may have
    model_len: Column = field(default_factory=lambda: np.zeros(0))  # of decode workers; 0: another role
    slots: Column = field(default_factory=lambda: np.zeros(0))  # free ones
    blocks: Column = field(default_factory=lambda: np.zeros(0))  # free or evictable ones
    refused: Column = field(default_factory=lambda: np.zeros(0))  # a request of so many blocks was refused
    life_s: Column = field(default_factory=lambda: np.zeros(0))  # mean time a row decodes; 0: not measured
    guessed: set[int] = field(default_factory=set)  # rows of workers whose step model is not measured
    abilities: int = 0  # grows with every change of what some worker may do, or of who is here
    num_lives: int = 0  # rows with a life
    _table: Column = field(
        default_factory=lambda: np.zeros((len(_COLUMNS), 0))
    )  # the columns, and room for more
    _sum_of_lives_s: float | None = None  # None: a life has changed since
    # what a decision asks of several of these at once, so that it need not put them together each time
    decode_capacity: Column = field(default_factory=lambda: np.zeros(0))  # 0: it may not decode
    send_capacity: Column = field(default_factory=lambda: np.zeros(0))  # 0: it may not compute for others
    open_blocks: Column = field(default_factory=lambda: np.zeros(0))  # where one more may decode; -1: none

    def take_row(self, worker: WorkerId) -> int:
        """A row for a worker that joins; it says nothing yet."""
        row = self.ids.index(None) if None in self.ids else self._grow()
        self.ids[row] = worker
        self.rows[worker] = row
        self.refused[row] = NO_REFUSAL
        self.abilities += 1
        return row

    def free_row(self, worker: WorkerId) -> None:
        row = self.rows.pop(worker)
        self.ids[row] = None
        self.fleet.clear(row)
        self.prefix.leave(row)
        self.set_life(row, 0.0)
        self.guessed.discard(row)
        self.abilities += 1
        for name in _COLUMNS:
            getattr(self, name)[row] = 0.0

    def set_life(self, row: int, life_s: float) -> None:
        before_s = self.life_s.item(row)
        if life_s != before_s:
            self.num_lives += (life_s > 0) - (before_s > 0)
            self.life_s[row] = life_s
            self._sum_of_lives_s = None

    def mean_life_s(self) -> float | None:
        """How long a row decodes, over the workers that have measured it; None: nobody has."""
        if not self.num_lives:
            return None
        if self._sum_of_lives_s is None:
            self._sum_of_lives_s = float(self.life_s.sum())
        return self._sum_of_lives_s / self.num_lives

    def write_ability(self, row: int, *, can_prefill: bool, can_decode: bool, can_send: bool) -> None:
        """What this row's worker may do now, and how long a request may be for it."""
        fleet, capacity = self.fleet, self.capacity.item(row)
        before = fleet.can_prefill.item(row), fleet.can_decode.item(row), fleet.can_send.item(row)
        if before != (can_prefill, can_decode, can_send):
            self.abilities += 1
        fleet.can_prefill[row], fleet.can_decode[row], fleet.can_send[row] = can_prefill, can_decode, can_send
        self.decode_capacity[row] = capacity if can_decode else 0.0
        self.send_capacity[row] = capacity if can_prefill and can_send else 0.0

    def write_room(self, row: int, slots: int, blocks: int, refused: float) -> None:
        """How many more requests this row's worker could take, and how large one; after its ability."""
        self.slots[row], self.blocks[row], self.refused[row] = slots, blocks, refused
        is_open = slots > 0 and self.fleet.can_decode[row]
        self.open_blocks[row] = min(blocks, refused - 1) if is_open else -1.0

    def _grow(self) -> int:
        row = len(self.ids)
        self.ids.append(None)
        self.fleet.resize(row + 1)
        self._table = grown(self._table, row + 1)
        for name, column in zip(_COLUMNS, self._table, strict=True):
            setattr(self, name, column[: row + 1])
        return row

    # ---- what more than placement asks

    @property
    def is_full(self) -> bool:
        """No worker takes one more request now, however small."""
        return highest(self.open_blocks) < 1

    def has(self, role: Role) -> bool:
        """Somebody of this role is here, ready or not."""
        return self.present[role] > 0

    def has_ready(self, role: Role) -> bool:
        return bool((self.fleet.can_prefill & (self.fleet.can_send == (role is Role.PREFILL))).any())

    def max_model_len(self) -> int | None:
        """Most prompt + output tokens on a decode worker that is here: its context, or what its KV holds."""
        return int(self.model_len.max()) if self.present[Role.DECODE] else None

    def is_ready(self, worker: WorkerId) -> bool:
        row = self.rows.get(worker)
        return row is not None and bool(self.fleet.can_prefill[row])


def kv_bytes_per_token(geometry: KVGeometry) -> float:
    """Of all layers and heads that the worker holds; scales of quantized KV are not counted."""
    elements = 2 * geometry.num_layers * geometry.num_heads * geometry.head_dim
    return float(elements * _ELEMENT_BYTES.get(geometry.dtype, 2))
