"""Which kind of edge joins two workers where the one they were started with cannot. Pure.

1. P dials with the kind that both were started with.
2. `cuda_ipc` needs P's GPU to use the memory of D's GPU in place. Where it cannot, P finds out when it maps
   the pool; it dials again at once with the next kind, which needs less (`FALLBACKS`), and one line says so.
3. A kind that was fallen back to and does not come up either is left behind, too; the last one stays.

It is remembered for as long as both processes live: a restarted worker may be on another GPU. D takes every
kind that its own may fall back to: all of them can reach its pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from cluster.errors import EdgeDeviceLost, EdgeError, EdgeUnfit
from cluster.kv.edge import EdgeName
from cluster.kv.edges import EdgeKind

FALLBACKS: Final[Mapping[EdgeKind, tuple[EdgeKind, ...]]] = MappingProxyType(
    {EdgeKind.CUDA_IPC: (EdgeKind.NCCL, EdgeKind.GLOO)}
)


def accepted(kind: EdgeKind) -> tuple[EdgeKind, ...]:
    """What a worker of this kind may speak, best first."""
    return (kind, *FALLBACKS.get(kind, ()))


class KindBook:
    """Owns which kind each edge of one prefill worker is to be."""

    def __init__(self, kinds: tuple[EdgeKind, ...]) -> None:
        """`kinds`: best first."""
        self._kinds = kinds
        self._tried: dict[EdgeName, int] = {}  # how many of them did not do

    def kind_of(self, name: EdgeName) -> EdgeKind:
        return self._kinds[self._tried.get(name, 0)]

    def failed(self, name: EdgeName, error: EdgeError) -> EdgeError:
        """What the failure to build the edge means: `EdgeUnfit` if it is to be dialled again at once, as
        another kind; otherwise it is lost."""
        if isinstance(error, EdgeDeviceLost):
            return error
        tried = self._tried.get(name, 0)
        may_fall_back = isinstance(error, EdgeUnfit) or tried > 0
        if not may_fall_back or tried + 1 >= len(self._kinds):
            return EdgeError(str(error))
        self._tried[name] = tried + 1
        return EdgeUnfit(f"{error}; KV goes by `{self._kinds[tried + 1].value}` between these two")
