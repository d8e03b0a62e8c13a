"""What the first Ctrl-C of `baton serve` says: how many requests it waits for, and how not to wait.

1. `count_open` asks every router for its open requests, within `ASK_WITHIN_S` in all: the drain waits for it.
2. `drain_notice` is the line.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from cluster.client import ClientError, get_json

ASK_WITHIN_S: Final = 0.5


def count_open(urls: Sequence[str]) -> int | None:
    """Requests that are open at all routers, each asked at its admin address; None: one did not say."""
    ends_at = time.monotonic() + ASK_WITHIN_S
    num_open = 0
    for url in urls:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            return None
        try:
            num_open += int(get_json(url, "/cluster", timeout_s=left_s)["in_flight"])
        except (ClientError, KeyError, TypeError, ValueError):
            return None
    return num_open


def drain_notice(num_open: int | None, grace_s: float) -> str:
    """One line. `num_open` None: not known."""
    if num_open == 0:
        return "Stopping: no request is open. Ctrl-C again stops at once."
    if num_open == 1:
        return f"Stopping: 1 open request has {grace_s:g} s to finish. Ctrl-C again cuts it at once."
    what = "open requests" if num_open is None else f"{num_open} open requests"
    return f"Stopping: {what} have {grace_s:g} s to finish. Ctrl-C again cuts them at once."
