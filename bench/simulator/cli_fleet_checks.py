"""What can be known to be wrong with `baton simulate --trace` and `baton plan` before a trace is read:
numbers out of range, a result that would take the place of what it is made from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bench.load.results.files import check_output
from bench.simulator.fleet.search import MIN_RATE
from cluster.errors import ConfigError


def check_run(
    rate: float | None, is_search: bool, num_seeds: int, duration_s: float | None, arrivals: str
) -> None:
    """
    Raises:
        ConfigError: nothing to do, or a number that cannot be.
    """
    if rate is None and not is_search:
        raise ConfigError("Nothing to do: give --rate R for runs at one rate, or --max-goodput")
    if rate is not None and not 0 < rate <= 1e6:
        raise ConfigError(f"--rate {rate:g}: give requests per second above 0, up to 1e6")
    if rate is not None and is_search and rate < MIN_RATE:
        raise ConfigError(f"--rate {rate:g}: a search begins there, and at {MIN_RATE:g} at least")
    if num_seeds < 1:
        raise ConfigError(f"--seeds {num_seeds}: give 1 or more")
    if duration_s is not None and not 0 < duration_s <= 1e6:
        raise ConfigError(f"--duration {duration_s:g}: give seconds above 0, up to 1e6")
    if arrivals not in ("poisson", "trace"):
        raise ConfigError(f"--arrivals `{arrivals}` is unknown: use poisson or trace")


def check_out(out: Path | None, inputs: Sequence[Path]) -> None:
    """
    Raises:
        ConfigError: it names no file, or one of the inputs.
        BatonError: it cannot be written.
    """
    if out is None:
        return
    for path in inputs:
        if os.path.realpath(path) == os.path.realpath(out):
            raise ConfigError(
                f"--out {out}: the result would replace {path}, which it is made from; give another file"
            )
    check_output(out)
