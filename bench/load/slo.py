"""SLOs: `ttft=200ms,tpot=50ms,gap=150ms,itl=…,e2e=5s`: what they bound, and whether a request met them.

A request is good when it ended OK and met every bound. All offered requests count. `tpot` of a one-token answer
does not exist, so that answer meets any tpot bound; an answer without a token meets no ttft bound.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class SloMetric(Enum):
    TTFT = "ttft"  # scheduled time to first chunk with content
    TPOT = "tpot"  # (e2e - ttft) / (output tokens - 1)
    ITL = "itl"  # mean gap between chunks of the request
    GAP = "gap"  # worst gap between two chunks of the request
    E2E = "e2e"  # scheduled time to last byte


class Slo(msgspec.Struct, frozen=True):
    metric: SloMetric
    bound_s: float
