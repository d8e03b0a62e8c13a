"""Prometheus series about placement: where requests went, who was turned away, how true predictions are.

Counters grow by what the router's own totals gained since the last `observe`.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

REASONS = ("no_worker", "busy", "too_large", "backlog", "queue_full", "queue_too_slow")


class PlacementMetrics:
    """Part of one router's `Metrics`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=registry)

        self._placements = counter("placements", "Attempts placed, by who computes the prompt", ("where",))
        self._rejected = counter("placements_rejected", "Requests that no place was found for", ("reason",))
        self._predictions = counter(
            "ttft_predictions", "First tokens, by a bound of the prediction's relative error", ("error",)
        )
        self._predicted_s = counter("ttft_predicted_seconds", "Sum of predicted times to first token")
        self._measured_s = counter(
            "ttft_measured_seconds", "Sum of those times as measured, from placement on"
        )
        self._error_s = counter("ttft_prediction_error_seconds", "Sum of |measured - predicted|")
        self._seen: dict[str, float] = {}
        for where in ("local", "remote"):
            self._placements.labels(where)
        for reason in REASONS:
            self._rejected.labels(reason)

    def observe(
        self,
        placements: Mapping[str, int],
        rejections: Mapping[str, int],
        errors: Mapping[str, int],
        *,
        predicted_s: float,
        measured_s: float,
        error_s: float,
    ) -> None:
        """Totals so far, by label."""
        for name, counter, totals in (
            ("placements", self._placements, placements),
            ("rejections", self._rejected, rejections),
            ("errors", self._predictions, errors),
        ):
            for label, total in totals.items():
                counter.labels(label).inc(self._gain(f"{name}/{label}", total))
        self._predicted_s.inc(self._gain("predicted", predicted_s))
        self._measured_s.inc(self._gain("measured", measured_s))
        self._error_s.inc(self._gain("error", error_s))

    def _gain(self, key: str, total: float) -> float:
        gain = total - self._seen.get(key, 0.0)
        self._seen[key] = total
        return gain
