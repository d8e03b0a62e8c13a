"""What placement did and how well it predicted: counts and sums that only grow, read by metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# A prediction counts under the first bound that its relative error does not exceed.
ERROR_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(slots=True)
class PlacementStats:
    """Seconds are sums over `num_predictions` first tokens, from placement on."""

    placements: Counter[str] = field(default_factory=Counter)  # "local", "remote" |-> attempts
    rejections: Counter[str] = field(default_factory=Counter)  # reason |-> requests
    predicted_s: float = 0.0
    measured_s: float = 0.0
    error_s: float = 0.0  # |measured - predicted|
    errors: Counter[str] = field(default_factory=Counter)  # bound of the relative error |-> first tokens

    def placed(self, *, is_local: bool) -> None:
        self.placements["local" if is_local else "remote"] += 1

    def rejected(self, reason: str) -> None:
        self.rejections[reason] += 1

    def first_token(self, predicted_s: float, measured_s: float) -> None:
        """A first token came `measured_s` after its request was placed."""
        self.predicted_s += predicted_s
        self.measured_s += measured_s
        error_s = abs(measured_s - predicted_s)
        self.error_s += error_s
        relative = error_s / max(measured_s, 1e-9)
        bound = next((f"{bound:g}" for bound in ERROR_BOUNDS if relative <= bound), "inf")
        self.errors[bound] += 1

    @property
    def num_predictions(self) -> int:
        return self.errors.total()
