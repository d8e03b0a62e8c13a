"""The prefill worker's edges to decode workers, as its core sees them: dialling, up, or waiting to redial.

1. The first attempt for a decode worker dials it; attempts that come meanwhile wait for the same dial.
2. When an in-place edge breaks while attempts could write, or with a `KvClosed` that may be lost in it, D
   cannot know that the writes have stopped and keeps the blocks out of use. The edge is dialled again even
   without new work, so that D can ask (`KvAbort`) and be told (`KvClosed`). Delays double from
   `REDIAL_DELAY_S`, at most `MAX_REDIALS` times: a decode worker that cannot be reached for so long is dead,
   and its successor is another peer.
3. An edge that no request needs yet may be dialled *warm* (`prefill_worker.warming`). Attempts that come
   meanwhile wait for it; if it does not come up it is dialled again, for them, in what is left of their time.
4. An edge that nobody uses is *let go* when there is reason to: its kind was a stand-in, and a better one may
   be tried; or a worker holds as many of its kind as it may, and an attempt needs another, its *heir*: then
   it is the one whose last use is longest ago; a decode worker asks for the same (`KvMakeRoom`). Attempts
   that come before it is down wait, and it is dialled for them as soon as it is. Where every edge is in
   use, the one needed is dialled as another kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from cluster.worker_io import Action, CloseEdge, EdgeUp, OpenEdge, Peer

REDIAL_DELAY_S = 0.25
MAX_REDIALS = 6
LOOK_AGAIN_S = 1.0  # whether an edge in use is idle by now


class _State(Enum):
    DIALING = auto()
    UP = auto()
    WAITING = auto()  # for the time to redial
    LETTING_GO = auto()  # until it is down


@dataclass(slots=True)
class _Edge:
    address: str
    state: _State = _State.DIALING
    in_place: bool = False
    owes_closed: bool = False  # D may hold blocks until it hears from us
    has_told_closed: bool = False  # over this connection; D does not answer it
    is_warm: bool = False  # being dialled for nobody yet
    num_redials: int = 0
    redial_s: float = 0.0
    better_s: float | None = None  # when a better kind may be tried
    is_capped: bool = False
    used_s: float = 0.0
    heir: Peer | None = None  # who is dialled when it is down
    was_uncapped: bool = False  # what its latest dial was to be


class EdgeBook:
    """Owns the state of every edge."""

    def __init__(self) -> None:
        self._edges: dict[Peer, _Edge] = {}

    def in_place(self, peer: Peer) -> bool | None:
        """Whether the edge works in place; None if it is not up."""
        edge = self._edges.get(peer)
        return edge.in_place if edge is not None and edge.state is _State.UP else None

    def has(self, peer: Peer) -> bool:
        """Whether it is up, being dialled or waiting for that."""
        return peer in self._edges

    @property
    def is_warming(self) -> bool:
        return any(edge.is_warm for edge in self._edges.values())

    def warm(self, peer: Peer, address: str) -> list[Action]:
        """Dial one that is not there, for nobody yet."""
        assert peer not in self._edges
        self._edges[peer] = _Edge(address, is_warm=True)
        return [OpenEdge(peer, address, warm=True)]

    def dial_for_waiting(self, peer: Peer, timeout_s: float) -> list[Action]:
        """A warm dial failed and attempts wait, for `timeout_s` yet: dial for them. Empty: it was none."""
        edge = self._edges.get(peer)
        if edge is None or not edge.is_warm:
            return []
        edge.is_warm = False
        return [OpenEdge(peer, edge.address, timeout_s=timeout_s)]

    def dial(self, peer: Peer, address: str, timeout_s: float | None = None) -> list[Action]:
        """Make sure that a dial is under way, or will be; the edge is not up."""
        edge = self._edges.get(peer)
        if edge is None:
            edge = self._edges[peer] = _Edge(address)
        elif edge.state in (_State.DIALING, _State.LETTING_GO):
            return []
        edge.state = _State.DIALING
        edge.address = address
        return [OpenEdge(peer, address, timeout_s=timeout_s)]

    def up(self, event: EdgeUp, now: float) -> None:
        peer, in_place, after_s = event.peer, event.in_place, event.better_after_s
        edge = self._edges.get(peer)
        assert edge is not None, "an edge came up that was not dialled"
        edge.state = _State.UP
        edge.is_warm = False
        edge.in_place = in_place
        edge.better_s = (
            None if in_place or after_s is None else now + after_s
        )  # in place is the best there is
        edge.is_capped, edge.used_s, edge.was_uncapped = event.is_capped, now, False
        edge.owes_closed = edge.has_told_closed = False
        edge.num_redials = 0

    def told_closed(self, peer: Peer) -> None:
        """`KvClosed` was sent. If the edge breaks later, nobody knows whether it arrived."""
        edge = self._edges.get(peer)
        if edge is not None:
            edge.has_told_closed = edge.in_place

    def down(self, peer: Peer, now: float, *, redial: bool) -> None:
        """The edge broke or the dial failed. `redial`: attempts could write when it broke."""
        edge = self._edges.get(peer)
        if edge is None:
            return
        edge.owes_closed = edge.owes_closed or redial or edge.has_told_closed
        if not edge.owes_closed or edge.num_redials >= MAX_REDIALS:
            del self._edges[peer]
            return
        edge.state = _State.WAITING
        edge.redial_s = now + REDIAL_DELAY_S * 2**edge.num_redials
        edge.num_redials += 1

    def redial(self, now: float) -> list[Action]:
        """Dial the edges whose time has come."""
        actions: list[Action] = []
        for peer, edge in self._edges.items():
            if edge.state is _State.WAITING and now >= edge.redial_s:
                edge.state = _State.DIALING
                actions.append(OpenEdge(peer, edge.address))
        return actions

    def next_redial(self) -> float | None:
        times = [edge.redial_s for edge in self._edges.values() if edge.state is _State.WAITING]
        return min(times) if times else None

    # ---- edges that are let go

    def make_better(self, now: float, in_use: Callable[[Peer], bool]) -> list[Action]:
        """Let go of what may be better by now, unless it is in use."""
        actions: list[Action] = []
        for peer, edge in self._edges.items():
            if edge.state is _State.UP and edge.better_s is not None and now >= edge.better_s:
                if in_use(peer):
                    edge.better_s = now + LOOK_AGAIN_S
                else:
                    actions += self._let_go(peer, edge, "a better kind of edge is tried again")
        return actions

    def next_better(self) -> float | None:
        edges = [edge for edge in self._edges.values() if edge.state is _State.UP]
        return min((edge.better_s for edge in edges if edge.better_s is not None), default=None)

    def used(self, peer: Peer, now: float) -> None:
        edge = self._edges.get(peer)
        if edge is not None:
            edge.used_s = now

    def make_room(self, peer: Peer, timeout_s: float, in_use: Callable[[Peer], bool]) -> list[Action]:
        """This worker holds as many edges as it may, and attempts wait for this one, `timeout_s` yet. Empty:
        nothing is to be done about it."""
        edge = self._edges[peer]
        edge.is_warm = False
        idle = [
            (other.used_s, name)
            for name, other in self._edges.items()
            if other.state is _State.UP and other.is_capped and not in_use(name)
        ]
        if idle:
            _, oldest = min(idle)
            self._edges[oldest].heir = peer
            return self._let_go(oldest, self._edges[oldest], f"it makes room for one to `{peer.worker}`")
        if edge.was_uncapped:
            return []
        edge.was_uncapped = True
        return [OpenEdge(peer, edge.address, timeout_s=timeout_s, uncapped=True)]

    def give_way(self, peer: Peer) -> list[Action]:
        """Let go of an edge that is up and idle: its decode worker has no room for another."""
        edge = self._edges.get(peer)
        if edge is None or edge.state is not _State.UP or edge.in_place:
            return []
        return self._let_go(peer, edge, "the decode worker needs room for another")

    def let_go(self, peer: Peer) -> tuple[str, Peer | None] | None:
        """The address and the heir of an edge that is down because it was to be; it is forgotten."""
        edge = self._edges.get(peer)
        if edge is None or edge.state is not _State.LETTING_GO:
            return None
        del self._edges[peer]
        return edge.address, edge.heir

    def inherit(self, heir: Peer, timeout_s: float) -> list[Action]:
        """There is room now. `timeout_s` 0: nobody waits for it any more."""
        if timeout_s <= 0:
            del self._edges[heir]
            return []
        return [OpenEdge(heir, self._edges[heir].address, timeout_s=timeout_s)]

    def _let_go(self, peer: Peer, edge: _Edge, reason: str) -> list[Action]:
        assert not edge.in_place, "the decode worker could not know that writing has stopped"
        edge.state = _State.LETTING_GO
        return [CloseEdge(peer, reason)]
