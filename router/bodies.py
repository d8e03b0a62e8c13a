"""How many bytes of request bodies one router holds at a time, before they are requests.

A body has its limit; a thousand connections that send one each have a thousand times as much. Small bodies
(`FREE_BYTES`) are bounded by the connections that there may be; what is beyond that counts, from when it
arrives until a job was made of it. Where there is no room, the request is refused: it may come again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cluster.errors import Overloaded

FREE_BYTES: Final = 64 * 2**10
RETRY_AFTER_S: Final = 1.0


class Bodies:
    """Belongs to one event loop."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """One body, until it is read and understood."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            self.num_bytes -= held.num_counted

    def take(self, num_bytes: int) -> None:
        """Raises `Overloaded`."""
        if self.num_bytes + num_bytes > self._most_bytes:
            raise Overloaded(
                "The server holds as many large requests as it can; send this one again.",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_bytes += num_bytes


class HeldBody:
    """`num_counted`: what of it has been taken."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0
        self.num_counted = 0

    def add(self, num_bytes: int) -> None:
        """The next part. Raises `Overloaded`: there is no room for it."""
        self._num_bytes += num_bytes
        new = max(0, self._num_bytes - FREE_BYTES) - self.num_counted
        if new > 0:
            self._bodies.take(new)
            self.num_counted += new
