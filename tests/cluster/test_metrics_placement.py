"""The series about placement grow by what the router's totals gained."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from cluster.metrics_placement import REASONS, PlacementMetrics


def test_counters_follow_the_totals() -> None:
    registry = CollectorRegistry()
    metrics = PlacementMetrics(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"baton_{name}_total", labels)

    assert all(value("placements_rejected", reason=reason) == 0 for reason in REASONS)
    for round_ in (1, 2):
        metrics.observe(
            {"local": 2 * round_, "remote": 3 * round_},
            {"backlog": round_},
            {"0.05": round_, "inf": 1},
            predicted_s=0.5 * round_,
            measured_s=0.75 * round_,
            error_s=0.25 * round_,
        )
        assert value("placements", where="local") == 2 * round_
        assert value("placements", where="remote") == 3 * round_
        assert value("placements_rejected", reason="backlog") == round_
        assert value("ttft_predictions", error="inf") == 1
        assert value("ttft_predicted_seconds") == 0.5 * round_
        assert value("ttft_measured_seconds") == 0.75 * round_
        assert value("ttft_prediction_error_seconds") == 0.25 * round_
