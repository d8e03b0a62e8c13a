"""How many edges of a costly kind a worker holds at once.

An NCCL edge keeps a communicator with buffers of some 50 to 100 MB of GPU memory, staging, and kernels that
may spin. A worker of a large cluster could meet every worker of the other pool; what it can hold is a
setting. One too many is refused with a clear sentence before anything is allocated: a prefill worker then
lets go of one that nobody uses, or the edge becomes another kind. Pure.
"""

from __future__ import annotations

from cluster.errors import EdgeCrowded, EdgeError
from cluster.kv.edge import EdgeName


class EdgeLimit:
    """Owns the count of open edges of one worker."""

    def __init__(self, max_edges: int) -> None:
        self._max_edges = max_edges
        self._open: set[EdgeName] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def holds(self, name: EdgeName) -> bool:
        """Whether this edge is one of those counted."""
        return name in self._open

    def open(self, name: EdgeName) -> None:
        """
        Raises:
            EdgeCrowded: there are as many as may be.
            EdgeError: this one is open already: close it first.
        """
        if name in self._open:
            raise EdgeError(f"KV edge {name}: it is open already; close it before it is built again")
        if len(self._open) >= self._max_edges:
            raise EdgeCrowded(
                f"KV edge {name}: this worker holds {len(self._open)} edges, as many as it may: raise "
                "--max-kv-edges, use fewer workers per pool, or `--kv-edge cuda_ipc` within a host"
            )
        self._open.add(name)

    def close(self, name: EdgeName) -> None:
        """Idempotent."""
        self._open.discard(name)
