"""Which attempts a worker has taken on: older or repeated ones are stale, even after they ended."""

from __future__ import annotations

from cluster.ids import Attempt, RequestId

MAX_REMEMBERED = 8192


class AttemptFence:
    """Highest attempt per request, for the `MAX_REMEMBERED` requests that came last."""

    def __init__(self) -> None:
        self._highest: dict[RequestId, Attempt] = {}  # insertion order: last taken last

    def is_stale(self, request: RequestId, attempt: Attempt) -> bool:
        """This attempt, or a later one of its request, has been taken on before."""
        highest = self._highest.get(request)
        return highest is not None and attempt <= highest

    def take(self, request: RequestId, attempt: Attempt) -> None:
        """The worker takes this attempt on."""
        self._highest.pop(request, None)
        self._highest[request] = attempt
        if len(self._highest) > MAX_REMEMBERED:
            del self._highest[next(iter(self._highest))]
