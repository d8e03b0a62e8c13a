"""Which kind of edge joins two workers. Pure.

1. A worker's setting says which kinds it takes, best first (`kinds_of`): the one asked for, and those that
   stand in for it (`FALLBACKS`). `auto` with KV on a GPU: `cuda_ipc`, then `nccl`, then `gloo`.
2. P's hello has those that it would speak with this D now (`KindBook.offer`), and where P is. D takes the
   first that is its own too and that the places allow (`possible`): in place only where both are on one
   host. Its welcome says which it is, and which are possible.
3. A kind that D can never have with this P, or that finds so (`EdgeUnfit`: P's GPU cannot use the memory of
   D's), is left out for as long as both processes live: a restarted worker may be on another GPU.
4. A stand-in that does not come up is left out for a while, which doubles; then it is offered again, and
   when it comes up all is forgotten. The last kind is always offered. The kind that was asked for is left
   out for no lost peer: that says nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from cluster.errors import EdgeCrowded, EdgeDeviceLost, EdgeError, EdgeUnfit
from cluster.kv.edge import EdgeName
from cluster.kv.edges import EdgeKind, check_memory, edge_kind

AUTO: Final = "auto"
FALLBACKS: Final[Mapping[EdgeKind, tuple[EdgeKind, ...]]] = MappingProxyType(
    {EdgeKind.CUDA_IPC: (EdgeKind.NCCL, EdgeKind.GLOO)}
)
CAPPED: Final = frozenset({EdgeKind.NCCL})  # of which a worker holds only so many
RETRY_S: Final = 30.0  # doubles with each failure
MAX_DOUBLINGS: Final = 6  # about half an hour


def accepted(kind: EdgeKind) -> tuple[EdgeKind, ...]:
    """What a worker of this kind may speak, best first."""
    return (kind, *FALLBACKS.get(kind, ()))


def kinds_of(asked: str, device_type: str, why_no_nccl: str | None) -> tuple[EdgeKind, ...]:
    """What a worker may speak whose KV lies on a device of this type, best first. `why_no_nccl`: see
    `cluster.kv.edge_backends`.

    Raises:
        ConfigError: see `check_memory`.
    """
    if asked != AUTO:
        first = edge_kind(asked)
        check_memory(first, device_type)
    else:
        first = EdgeKind.CUDA_IPC if device_type == "cuda" else EdgeKind.GLOO
    others = [kind for kind in FALLBACKS.get(first, ()) if kind is not EdgeKind.NCCL or not why_no_nccl]
    return (first, *others)


def possible(offered: Sequence[str], own: Sequence[EdgeKind], *, is_one_host: bool) -> list[EdgeKind]:
    """What two workers can speak, best first. `own`: D's; in place across hosts only where nothing else was
    asked for."""
    common = [kind for kind in own if kind.value in offered]
    if is_one_host:
        return common
    return [kind for kind in common if not kind.in_ds_pool] or common


@dataclass(slots=True)
class _Setback:
    num_doublings: int = 0
    next_s: float = 0.0


@dataclass(slots=True)
class _Pair:
    offered: list[EdgeKind] = field(default_factory=list)  # by the latest dial
    spoken: EdgeKind | None = None  # None: it was not welcomed
    never: set[EdgeKind] = field(default_factory=set)
    setbacks: dict[EdgeKind, _Setback] = field(default_factory=dict)

    def set_back(self, kind: EdgeKind, now: float) -> None:
        setback = self.setbacks.setdefault(kind, _Setback())
        setback.next_s = now + RETRY_S * 2**setback.num_doublings
        setback.num_doublings = min(setback.num_doublings + 1, MAX_DOUBLINGS)

    def waits_s(self, kind: EdgeKind, now: float) -> float:
        """Until it is offered again."""
        setback = self.setbacks.get(kind)
        return 0.0 if setback is None else max(0.0, setback.next_s - now)


class KindBook:
    """Owns which kind each edge of one prefill worker is to be."""

    def __init__(self, kinds: Sequence[EdgeKind]) -> None:
        """`kinds`: best first."""
        self._kinds = tuple(kinds)
        self._pairs: dict[EdgeName, _Pair] = {}

    def offer(self, name: EdgeName, now: float, *, uncapped: bool = False) -> list[EdgeKind]:
        """A dial begins: what its hello is to have, best first. Earlier epochs of that D are forgotten.
        `uncapped`: there is no room for a capped one now."""
        for other in [
            one for one in self._pairs if one.decode == name.decode and one.decode_epoch < name.decode_epoch
        ]:
            del self._pairs[other]
        pair = self._pairs.setdefault(name, _Pair())
        if uncapped:
            for kind in CAPPED.intersection(self._kinds[:-1]):
                pair.set_back(kind, now)
        pair.offered, pair.spoken = self._usable(pair, now), None
        return pair.offered

    def welcomed(self, name: EdgeName, kind: str, can: Sequence[str], now: float) -> EdgeKind:
        """What D has chosen, and what it said is possible between these two.

        Raises:
            EdgeError: it was not offered; or a later epoch of D was dialled meanwhile.
        """
        pair = self._pairs.get(name)
        if pair is None:
            raise EdgeError(f"`{name.decode}` was dialled in a later epoch than {name.decode_epoch}")
        spoken = next((one for one in pair.offered if one.value == kind), None)
        if spoken is None:
            raise EdgeError(f"the decode worker chose the KV edge `{kind}`, which was not offered")
        pair.spoken = spoken
        for better in pair.offered[: pair.offered.index(spoken)]:
            if better.value in can:  # it had no room for one now
                pair.set_back(better, now)
            else:
                pair.never.add(better)
        return spoken

    def up(self, name: EdgeName) -> None:
        """The edge came up as what it was welcomed."""
        pair = self._pairs.get(name)
        if pair is not None and pair.spoken is not None:
            pair.setbacks.pop(pair.spoken, None)

    def failed(self, name: EdgeName, error: EdgeError, now: float) -> EdgeError:
        """What the failure to build the edge means: `EdgeUnfit` if it is to be dialled again at once, as
        another kind; otherwise it is lost."""
        if isinstance(error, EdgeDeviceLost | EdgeCrowded):
            return error
        pair = self._pairs.get(name)
        if pair is None:  # forgotten for a later epoch
            return EdgeError(str(error))
        kind = pair.spoken
        is_for_good = isinstance(error, EdgeUnfit)
        if kind is None or kind is self._kinds[-1] or (kind is self._kinds[0] and not is_for_good):
            return EdgeError(str(error))
        if is_for_good:
            pair.never.add(kind)
        else:
            pair.set_back(kind, now)
        until = "" if is_for_good else f"; `{kind.value}` again in {pair.waits_s(kind, now):.0f} s or later"
        following = self._usable(pair, now)[0]
        return EdgeUnfit(f"{error}; KV goes by `{following.value}` between these two{until}")

    def better_after_s(self, name: EdgeName, now: float) -> float | None:
        """Seconds until a better kind may be tried than the one spoken; None: there is none."""
        pair = self._pairs.get(name)
        if pair is None:  # forgotten for a later epoch
            return None
        assert pair.spoken is not None, "it is not up"
        better = self._kinds[: self._kinds.index(pair.spoken)]
        return min((pair.waits_s(kind, now) for kind in better if kind not in pair.never), default=None)

    def _usable(self, pair: _Pair, now: float) -> list[EdgeKind]:
        """In order; the last one whatever it did."""
        *others, last = self._kinds
        return [kind for kind in others if kind not in pair.never and not pair.waits_s(kind, now)] + [last]
