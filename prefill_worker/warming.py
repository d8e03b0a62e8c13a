"""Edges made before a request needs them: the first request of a pair then finds its edge up. Pure.

1. Each router tells who is in both pools (`Partners`), again whenever that changes.
2. `chosen` says which decode workers this prefill worker has an edge to without being asked: all, if no
   worker would come to hold more than it may (`--max-kv-edges`); otherwise so many that half of what each may
   hold is left to what requests want. All prefill workers choose by the same rule.
3. While nothing is computed or waited for here, `next_dial` gives one at a time. A decode worker that is busy
   refuses. One that did not come up, or broke, is tried again after a delay that doubles until one is up.

An attempt that comes meanwhile dials what it needs itself, or waits for the dial that is under way: for no
longer than for its own (`prefill_worker.transfers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.ids import RouterId, WorkerId
from cluster.wire.messages import DecodePartner, Partners
from cluster.worker_io import Peer

RETRY_S = 1.0  # doubles with each failure
MAX_DOUBLINGS = 6  # a worker that is always busy is asked about once a minute, for as long as it lives


@dataclass(slots=True)
class _Tries:
    num_doublings: int = 0
    next_s: float = 0.0


class Warming:
    """Owns what routers say of the pools, and when a dial may be tried again."""

    def __init__(self, me: WorkerId, max_edges: int) -> None:
        """`max_edges` 0: none is made beforehand."""
        self._me = me
        self._max_edges = max_edges
        self._told: dict[RouterId, Partners] = {}
        self._wanted: list[tuple[Peer, str]] = []
        self._tries: dict[Peer, _Tries] = {}

    def told(self, router: RouterId, partners: Partners) -> None:
        self._told[router] = partners
        self._choose()

    def router_lost(self, router: RouterId) -> None:
        if self._told.pop(router, None) is not None:
            self._choose()

    def next_dial(self, now: float, has_edge: Callable[[Peer], bool]) -> tuple[Peer, str] | None:
        """The next decode worker to dial, and where; None: there is none now. `has_edge`: or a dial."""
        for peer, address in self._wanted:
            tries = self._tries.get(peer)
            if not has_edge(peer) and (tries is None or tries.next_s <= now):
                return peer, address
        return None

    def next_try(self, has_edge: Callable[[Peer], bool]) -> float | None:
        """When one that failed may be dialled again."""
        waiting = (peer for peer, _ in self._wanted if not has_edge(peer))
        return min((self._tries[peer].next_s for peer in waiting if peer in self._tries), default=None)

    def up(self, peer: Peer) -> None:
        """An edge is there: should it break, it is tried again as soon as one that never failed."""
        self._tries.pop(peer, None)

    def down(self, peer: Peer, now: float) -> None:
        """An edge broke or did not come up."""
        if any(peer == wanted for wanted, _ in self._wanted):
            tries = self._tries.setdefault(peer, _Tries())
            tries.next_s = now + RETRY_S * 2**tries.num_doublings
            tries.num_doublings = min(tries.num_doublings + 1, MAX_DOUBLINGS)

    def _choose(self) -> None:
        """From what all routers say: of a worker's epochs the latest is the one that lives."""
        prefill = {name for told in self._told.values() for name in told.prefill}
        decode: dict[WorkerId, DecodePartner] = {}
        for partner in (partner for told in self._told.values() for partner in told.decode):
            known = decode.get(partner.worker)
            if known is None or partner.epoch > known.epoch:
                decode[partner.worker] = partner
        names = chosen(self._me, sorted(prefill), sorted(decode), self._max_edges)
        partners = [decode[name] for name in names]
        self._wanted = [(Peer(one.worker, one.epoch), one.kv_address) for one in partners]
        self._tries = {peer: self._tries[peer] for peer, _ in self._wanted if peer in self._tries}


def chosen(
    me: WorkerId, prefill: Sequence[WorkerId], decode: Sequence[WorkerId], max_edges: int
) -> list[WorkerId]:
    """Decode workers that `me` dials beforehand, in order. Both pools as prefill workers see them, sorted.

    Each begins at another one, so that they do not all dial the same at once. No prefill worker dials more,
    and no decode worker is dialled by more, than `max_edges` if everybody fits, else than half of it.
    """
    if me not in prefill or not decode:
        return []
    if max(len(prefill), len(decode)) <= max_edges:
        count = len(decode)
    else:
        per_decode = -(-len(prefill) // len(decode))  # of the prefill workers that begin at it
        count = min(len(decode), max_edges // 2 // per_decode)
    first = prefill.index(me)
    return [decode[(first + number) % len(decode)] for number in range(count)]
