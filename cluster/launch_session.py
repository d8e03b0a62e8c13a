"""What the launcher needs of whatever starts its processes: Ray (`cluster.launch_ray`) or this machine alone
(`cluster.launch_local`).

A process that was placed lives once: `load` → `run` → its end. Who is restarted, and when, is decided by
`cluster.launch_supervisor`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, Protocol

from cluster.launch_plan import RoleSpec

PLACE_TIMEOUT_S: Final = 120.0  # a busy machine takes its time to import torch


class Placed(Protocol):
    """One process of one role. No call blocks the loop; a dead process is an answer, not an exception."""

    async def load(self) -> str:
        """Until the process is up and has imported the role's code: "" or why it cannot."""
        ...

    def run(self, spec: RoleSpec) -> Awaitable[str]:
        """Start serving with the final configuration; the answer, when it ends, is why ("" after a stop)."""
        ...

    async def wait_ready(self, timeout_s: float) -> bool:
        """Whether the role serves within `timeout_s`."""
        ...

    async def responds(self, timeout_s: float) -> bool:
        """Whether the role's event loop gives a sign of life in time. A dead process does not hang."""
        ...

    async def next_wish(self, timeout_s: float) -> tuple[str, str] | None:
        """The next worker that a router wants in another role, and which; None: none within `timeout_s`."""
        ...

    async def stop(self) -> None:
        """Ask the service to drain and end."""
        ...

    async def end(self) -> None:
        """Its role is over: let the process end in order, within a deadline."""
        ...

    def kill(self) -> None:
        """End the process now. Does nothing when it is dead."""
        ...


class Session(Protocol):
    """Places processes; `close` leaves none."""

    def place(self, spec: RoleSpec) -> Placed:
        """Start a process for this role, or ask for one; returns at once."""
        ...

    def close(self) -> None: ...
