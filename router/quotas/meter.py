"""One limit per minute: a leaky bucket, read as a meter.

`used` drains at `per_min / 60` a second, and a request is admitted while `used + cost` is at most `per_min`:
never more than `per_min` at once, and over any `t` seconds at most `per_min * (1 + t / 60)`.

    wait for a cost   (used + cost - per_min) / rate
    until all is back  used / rate

What is given back is taken off `used`, never below an empty meter; debts (more was used than was reserved)
are added, and drain like everything else.
"""

from __future__ import annotations

import msgspec

from router.quotas.limits import MINUTE_S

_ROUNDING = 1e-9  # of the limit: what a wait and a rate in floats may miss


class Meter(msgspec.Struct):
    """`at`: the moment that `used` is of."""

    used: float = 0.0
    at: float = 0.0

    def drain(self, per_min: float, now: float) -> float:
        """Bring it to `now`, and return `used`. The limit may be another one than before: what was used
        stays used."""
        if now > self.at:
            self.used = max(0.0, self.used - per_min / MINUTE_S * (now - self.at))
            self.at = now
        return self.used

    def wait_s(self, cost: float, per_min: float, now: float) -> float:
        """How long until it has room for `cost`, if nobody takes any; 0: it has."""
        missing = self.drain(per_min, now) + cost - per_min
        return 0.0 if missing <= _ROUNDING * per_min else missing / (per_min / MINUTE_S)

    def add(self, amount: float) -> None:
        """Use so much, or give back what is below 0. `drain` comes first."""
        self.used = max(0.0, self.used + amount)
