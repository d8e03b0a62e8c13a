"""The router's picture of its workers as a decision reads it: columns, a row per worker.

`router.worker_book` owns it and keeps it up to date; a decision reads it at once and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from cluster.ids import WorkerId
from cluster.wire.messages import KVGeometry, Role
from router.fleet import Column, Flags, Fleet
from router.prefix_index import PrefixIndex

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}
NO_REFUSAL = np.inf


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
    is_measured: Flags = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))  # it has a step model

    def take_row(self, worker: WorkerId) -> int:
        """A row for a worker that joins; it says nothing yet."""
        row = self.ids.index(None) if None in self.ids else self._grow()
        self.ids[row] = worker
        self.rows[worker] = row
        self.refused[row] = NO_REFUSAL
        return row

    def free_row(self, worker: WorkerId) -> None:
        row = self.rows.pop(worker)
        self.ids[row] = None
        self.fleet.clear(row)
        self.prefix.leave(row)
        for column in (self.capacity, self.model_len, self.slots, self.blocks, self.refused, self.life_s):
            column[row] = 0.0
        self.is_measured[row] = False

    def _grow(self) -> int:
        row = len(self.ids)
        num_rows = max(4, 2 * row)
        self.ids += [None] * (num_rows - row)
        self.fleet.resize(num_rows)
        more = num_rows - row
        self.capacity, self.model_len, self.slots, self.blocks, self.refused, self.life_s = (
            np.append(column, np.zeros(more))
            for column in (self.capacity, self.model_len, self.slots, self.blocks, self.refused, self.life_s)
        )
        self.is_measured = np.append(self.is_measured, np.zeros(more, dtype=np.bool_))
        return row

    # ---- what more than placement asks

    def has(self, role: Role) -> bool:
        """Somebody of this role is here, ready or not."""
        return self.present[role] > 0

    def has_ready(self, role: Role) -> bool:
        return bool((self.fleet.can_prefill & (self.fleet.can_send == (role is Role.PREFILL))).any())

    def max_model_len(self) -> int | None:
        """Most prompt + output tokens on a decode worker that is here."""
        return int(self.model_len.max()) if self.present[Role.DECODE] else None

    def is_ready(self, worker: WorkerId) -> bool:
        row = self.rows.get(worker)
        return row is not None and bool(self.fleet.can_prefill[row])


def kv_bytes_per_token(geometry: KVGeometry) -> float:
    """Of all layers and heads that the worker holds; scales of quantized KV are not counted."""
    elements = 2 * geometry.num_layers * geometry.num_heads * geometry.head_dim
    return float(elements * _ELEMENT_BYTES.get(geometry.dtype, 2))
