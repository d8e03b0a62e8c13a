"""Whose turn it is among those who wait: start-time fair queueing between tenants. Pure, without a clock.

Everybody who waits stands in the line of its tenant. Each line has a *start*, the virtual time at which its
first one is due; the line with the least is next:

    start(line) = max(virtual time, finish(line))
    served:       virtual time := start,  finish(line) := start + work / share

So tenants that wait get work in proportion to their shares, however many requests each has: between two of
them, while both wait, work / share differs by at most one request of each. Leaving a line unserved costs
nothing. When nobody waits any more, everything is forgotten: what a tenant got from an idle cluster is not
held against it.

Within a line: by `order`. Source: Goyal, Vin, Cheng, "Start-time fair queueing" (SIGCOMM 1996).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort

import msgspec

from cluster.ids import RequestId


class Turn(msgspec.Struct, frozen=True):
    """What a request takes of its tenant's share: `work` is predicted, in tokens; 0 for one that has had its
    turn before."""

    tenant: str = ""
    share: float = 1.0
    work: float = 1.0


class Claimant(msgspec.Struct, frozen=True):
    """One request in a line. `order` is unique; `since`, when it joined, decides between lines that start
    together."""

    request: RequestId
    order: int
    turn: Turn
    since: float


class _Line(msgspec.Struct):
    share: float
    waiting: list[tuple[int, Claimant]] = msgspec.field(default_factory=list)  # by order
    work: float = 0.0  # of all of them


class FairLines:
    """Owns the lines and the virtual time."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}  # of those that wait
        self._claimants: dict[RequestId, Claimant] = {}
        self._finish: dict[str, float] = {}  # of tenants served since somebody waits
        self._virtual = 0.0

    def __len__(self) -> int:
        return len(self._claimants)

    def get(self, request: RequestId) -> Claimant | None:
        return self._claimants.get(request)

    def join(self, claimant: Claimant) -> None:
        assert claimant.request not in self._claimants, claimant.request
        line = self._lines.setdefault(claimant.turn.tenant, _Line(claimant.turn.share))
        line.share = claimant.turn.share
        insort(line.waiting, (claimant.order, claimant))
        line.work += claimant.turn.work
        self._claimants[claimant.request] = claimant

    def leave(self, request: RequestId) -> None:
        """Unserved, or after `served`. Fine for one that is in no line."""
        claimant = self._claimants.pop(request, None)
        if claimant is None:
            return
        line = self._lines[claimant.turn.tenant]
        del line.waiting[bisect_left(line.waiting, claimant.order, key=_order)]
        line.work -= claimant.turn.work
        if not line.waiting:
            del self._lines[claimant.turn.tenant]
        if not self._claimants:
            self._finish.clear()
            self._virtual = 0.0

    def served(self, turn: Turn) -> None:
        """A request gets its place, out of its line or past all of them."""
        if self._claimants:
            self._virtual = start = self._start(turn.tenant)
            self._finish[turn.tenant] = start + turn.work / turn.share

    def first(self) -> Claimant | None:
        if not self._lines:
            return None
        return min(map(self._head, self._lines))[3]

    def in_turn(self, limit: int) -> list[RequestId]:
        """Who is next, at most `limit`: as they would be served if each had its place at once."""
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            return [claimant.request for _, claimant in line.waiting[:limit]]
        heads = [(start, since, tenant, 0) for start, since, tenant, _ in map(self._head, self._lines)]
        heapq.heapify(heads)
        turns: list[RequestId] = []
        while heads and len(turns) < limit:
            start, _, tenant, index = heapq.heappop(heads)
            line = self._lines[tenant]
            claimant = line.waiting[index][1]
            turns.append(claimant.request)
            if index + 1 < len(line.waiting):
                following = line.waiting[index + 1][1]
                heapq.heappush(
                    heads, (start + claimant.turn.work / line.share, following.since, tenant, index + 1)
                )
        return turns

    def num_before(self, tenant: str) -> int:
        """About how many are served before one who joins this tenant's line now."""
        own = self._lines.get(tenant)
        start = self._start(tenant) + (0.0 if own is None else own.work / own.share)
        num = 0 if own is None else len(own.waiting)
        for other, line in self._lines.items():
            if other == tenant:
                continue
            room, step = start - self._start(other), line.work / line.share / len(line.waiting)
            if room >= 0:
                num += len(line.waiting) if step <= 0 else min(len(line.waiting), math.floor(room / step) + 1)
        return num

    def overlong(self, tenant: str, share: float) -> RequestId | None:
        """Who gives its place up to one of `tenant`, when no more may wait: the last of the line that is the
        longest for its share; None if the newcomer's own would be."""
        own = self._lines.get(tenant)
        length = ((0 if own is None else len(own.waiting)) + 1) / share
        longest = max(self._lines.values(), key=lambda line: len(line.waiting) / line.share)
        if len(longest.waiting) / longest.share <= length:
            return None
        return next((last.request for _, last in reversed(longest.waiting) if last.turn.work > 0), None)

    def _start(self, tenant: str) -> float:
        return max(self._virtual, self._finish.get(tenant, 0.0))

    def _head(self, tenant: str) -> tuple[float, float, str, Claimant]:
        claimant = self._lines[tenant].waiting[0][1]
        return self._start(tenant), claimant.since, tenant, claimant


def _order(item: tuple[int, Claimant]) -> int:
    return item[0]
