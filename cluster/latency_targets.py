"""What a request is promised, and whether it was kept: the one definition that metrics and page share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Seconds, both inclusive. The defaults are those of `RouterConfig`."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1

    def ttft_met(self, ttft_s: float | None) -> bool:
        """Without a first token it was not."""
        return ttft_s is not None and ttft_s <= self.ttft_s

    def tpot_met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """An answer of one token has no time per further token: it cannot be too long."""
        return ttft_s is not None and (tpot_s is None or tpot_s <= self.tpot_s)

    def both_met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        return self.ttft_met(ttft_s) and self.tpot_met(ttft_s, tpot_s)
