"""When a worker tells its routers what is in its prefix cache.

1. A router is there: `joined`. Its first report begins anew, with all that is cached.
2. `due` gives the reports that are to go out now: before each heartbeat (`force`), and after other events at
   most every `interval_s`, so that a cache that changes with every step costs a message now and then.
3. A router that missed one asks (`resync`) and is told everything again; so is everybody when too much has
   changed to be kept.

Pure; the driver owns the streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.ids import BlockHash, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.wire.kv_events import KvEvents

MAX_HASHES = 1 << 16  # in one report: about a megabyte


@dataclass(slots=True)
class _Audience:
    sequence: int = 0
    knows_nothing: bool = True


class CacheReports:
    """Owns how far each router has been told."""

    def __init__(self, blocks: BlockManager, interval_s: float = 0.1) -> None:
        self._blocks = blocks
        self._interval_s = interval_s
        self._routers: dict[RouterId, _Audience] = {}
        self._last_at = 0.0

    def joined(self, router: RouterId) -> None:
        """On a new stream, so it has heard nothing."""
        self._routers[router] = _Audience()

    def lost(self, router: RouterId) -> None:
        self._routers.pop(router, None)

    def resync(self, router: RouterId) -> None:
        """Fine for one that is gone."""
        if (audience := self._routers.get(router)) is not None:
            audience.knows_nothing = True

    def is_due(self, now: float) -> bool:
        """Whether `due` would look, without `force`: cheap enough for every event."""
        return now - self._last_at >= self._interval_s

    def due(self, now: float, *, force: bool = False) -> list[tuple[RouterId, KvEvents]]:
        if not (force or self.is_due(now)):
            return []
        self._last_at = now
        changes = self._blocks.take_cache_changes()
        reports = []
        for router, audience in self._routers.items():
            if audience.knows_nothing or changes is None:
                audience.knows_nothing = False
                parts = self._everything()
            elif changes.stored or changes.removed:
                parts = iter([(False, changes.stored, changes.removed)])
            else:
                continue
            for begins, stored, removed in parts:
                report = KvEvents(sequence=audience.sequence, begins=begins, stored=stored, removed=removed)
                audience.sequence += 1
                reports.append((router, report))
        return reports

    def _everything(self) -> Iterator[tuple[bool, list[BlockHash], list[BlockHash]]]:
        hashes = self._blocks.cached_hashes()
        for start in range(0, max(1, len(hashes)), MAX_HASHES):
            yield start == 0, hashes[start : start + MAX_HASHES], []
