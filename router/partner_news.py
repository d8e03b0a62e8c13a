"""What prefill workers are told of the pools, so that they may dial decode workers beforehand. Pure.

1. A prefill worker that wants to know (`Register.warm_edges`) hears of everybody with its first heartbeat.
2. From then on it hears, with a heartbeat after a change, who has come or gone since it last heard: however
   many that are, in one message, each as it is by now. A stream keeps order and loses nothing; a worker that
   comes again, on another stream or in another epoch, has joined anew.
3. Those gone are remembered until there are more of them than workers. Then all are forgotten, and who had
   not heard of each is told everybody again.

Bounds: O(1) for a change, amortized; O(what has changed) for a message. So n workers that come one by one
cost O(n) words for each that listens, not O(n) messages of O(n) words.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.ids import WorkerId
from cluster.wire.messages import DecodePartner, Partners, Register, Role

FEW_GONE = 64  # so many are remembered in any case
_NOTHING = -1  # heard yet


class PartnerNews:
    """Owns who is here, in what order that changed, and how far each listener has heard."""

    def __init__(self) -> None:
        self._here: dict[WorkerId, DecodePartner | None] = {}  # None: a prefill worker
        self._latest: dict[WorkerId, int] = {}  # of those here or gone: the number of its last change, rising
        self._num_changes = 0
        self._num_forgotten = 0  # up to this change, `_latest` may lack some who are gone
        self._heard: dict[WorkerId, int] = {}  # listener |-> changes it has heard of

    def joined(self, register: Register) -> None:
        worker = register.worker
        if register.role is Role.PREFILL:
            self._here[worker] = None
            if register.warm_edges > 0:
                self._heard[worker] = _NOTHING
        elif register.kv_address is not None:
            self._here[worker] = DecodePartner(worker, register.epoch, register.kv_address)
        else:
            return
        self._changed(worker)

    def left(self, worker: WorkerId) -> None:
        self._heard.pop(worker, None)
        if worker in self._here:
            del self._here[worker]
            self._changed(worker)

    def take(self, worker: WorkerId) -> Partners | None:
        """What to tell this worker now; None: it knows."""
        heard = self._heard.get(worker)
        if heard is None or heard == self._num_changes:
            return None
        self._heard[worker] = self._num_changes
        if heard < self._num_forgotten:  # or has heard nothing
            return self._partners(self._here, begins=True)
        return self._partners(self._since(heard), begins=False)

    def _partners(self, names: Iterable[WorkerId], *, begins: bool) -> Partners:
        news = Partners(begins=begins, prefill=[], decode=[], gone=[])
        for name in names:
            if name not in self._here:
                news.gone.append(name)
            elif (partner := self._here[name]) is None:
                news.prefill.append(name)
            else:
                news.decode.append(partner)
        return news

    def _since(self, heard: int) -> list[WorkerId]:
        """Whoever has changed after so many changes, in that order."""
        names = []
        for name in reversed(self._latest):
            if self._latest[name] <= heard:
                break
            names.append(name)
        return names[::-1]

    def _changed(self, worker: WorkerId) -> None:
        self._num_changes += 1
        self._latest.pop(worker, None)
        self._latest[worker] = self._num_changes
        if len(self._latest) - len(self._here) > max(FEW_GONE, len(self._here)):
            self._latest = {name: number for name, number in self._latest.items() if name in self._here}
            self._num_forgotten = self._num_changes
