"""When a router may be given requests: a pure judgement over its picture of the cluster.

1. `waiting_for_workers`: no decode worker is here, or a prefill worker is expected and none is.
2. `loading_model`: they are here and not ready yet.
3. `warming_up`: a request can be placed; one generation of our own goes the whole way first.
4. `ready`: that succeeded once. From then on a missing prefill worker only degrades (decode workers prefill),
   while a missing decode worker is 1 or 2 again.
5. `draining`: the router stops; never ready again.
"""

from __future__ import annotations

from cluster.wire.messages import Role
from router.delivery import Readiness
from router.view import ClusterView


class ReadinessJudge:
    """Remembers only what happens once: the warm-up, and the stop."""

    def __init__(self, *, needs_prefill: bool) -> None:
        self._needs_prefill = needs_prefill
        self.is_warm = False
        self.is_draining = False

    @property
    def may_recover(self) -> bool:
        """It was ready once and is not to end: workers that are gone are expected back."""
        return self.is_warm and not self.is_draining

    def judge(self, view: ClusterView) -> Readiness:
        if self.is_draining:
            return Readiness(ready=False, phase="draining")
        needed = [Role.DECODE]
        if self._needs_prefill and not self.is_warm:
            needed.append(Role.PREFILL)
        if not all(map(view.has, needed)):
            return Readiness(ready=False, phase="waiting_for_workers")
        if not all(map(view.has_ready, needed)):
            return Readiness(ready=False, phase="loading_model")
        if not self.is_warm:
            return Readiness(ready=False, phase="warming_up")
        return Readiness(ready=True, phase="ready")
