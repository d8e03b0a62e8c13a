"""What prefill workers are told of the pools, so that they may dial decode workers beforehand. Pure.

A prefill worker that wants to know (`Register.warm_edges`) hears with its next heartbeat: however many
workers come at once, it is told of them once.
"""

from __future__ import annotations

from cluster.ids import WorkerId
from cluster.wire.messages import DecodePartner, Partners, Register, Role


class PartnerNews:
    """Owns who has not heard yet of what has changed."""

    def __init__(self) -> None:
        self._prefill: dict[WorkerId, None] = {}  # in the order in which they came
        self._decode: dict[WorkerId, DecodePartner] = {}
        self._wanting: set[WorkerId] = set()
        self._outdated: set[WorkerId] = set()

    def joined(self, register: Register) -> None:
        if register.role is Role.PREFILL:
            self._prefill[register.worker] = None
            if register.warm_edges > 0:
                self._wanting.add(register.worker)
        elif register.kv_address is not None:
            partner = DecodePartner(register.worker, register.epoch, register.kv_address)
            self._decode[register.worker] = partner
        self._changed()

    def left(self, worker: WorkerId) -> None:
        self._prefill.pop(worker, None)
        self._decode.pop(worker, None)
        self._wanting.discard(worker)
        self._changed()

    def take(self, worker: WorkerId) -> Partners | None:
        """What to tell this worker now; None: it knows."""
        if worker not in self._outdated:
            return None
        self._outdated.discard(worker)
        return Partners(prefill=list(self._prefill), decode=list(self._decode.values()))

    def _changed(self) -> None:
        self._outdated = set(self._wanting)
