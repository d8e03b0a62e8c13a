"""Where a key's limits stand, as OpenAI's clients read it: `x-ratelimit-{limit,remaining,reset}-{what}`.

`reset` is the time until all of the limit is back, as `20ms`, `8.64s` or `6m0s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from router.quotas.book import Standing
from router.quotas.limits import Limit

Headers = tuple[tuple[bytes, bytes], ...]


def limit_headers(standings: Mapping[Limit, Standing]) -> Headers:
    return tuple(
        (f"x-ratelimit-{what}-{limit.value}".encode(), value.encode())
        for limit, standing in standings.items()
        for what, value in (
            ("limit", str(standing.limit)),
            ("remaining", str(standing.remaining)),
            ("reset", duration(standing.reset_s)),
        )
    )


def duration(seconds: float) -> str:
    """Rounded up to milliseconds."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if minutes == 0:
        return text
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"
