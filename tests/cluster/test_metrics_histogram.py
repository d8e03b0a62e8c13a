"""The cheap histogram says what prometheus_client's own would."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cluster.metrics import LATENCY_BUCKETS_S
from cluster.metrics_histogram import CheapHistogram


def lines(registry: CollectorRegistry) -> list[str]:
    """Without the moment of creation, which it does not tell."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_the_same_page() -> None:
    own, other = CollectorRegistry(), CollectorRegistry()
    cheap = CheapHistogram("some_seconds", "Some times", LATENCY_BUCKETS_S, own)
    plain = Histogram("some_seconds", "Some times", buckets=LATENCY_BUCKETS_S, registry=other)
    assert lines(own) == lines(other)
    rng = random.Random(0)
    for value in (0.0, 100.0, *LATENCY_BUCKETS_S, *(rng.expovariate(5) for _ in range(500))):
        cheap.observe(value)
        plain.observe(value)
    assert lines(own) == lines(other)
