"""What a search's own account says, as figures of the table. Pure; the account may be an earlier file's.

The rule is the search's (`bench.load.goodput.values.figure_of`), so the table says what the account says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.load.goodput.values import DONE, End, TargetAnswer, figure_of
from bench.peers.outcome import Goodput, SeedBracket

_OF_THE_TABLE = "an interval needs"  # its text says for all rows why most have none


def goodput_of(account: Mapping[str, Any]) -> list[Goodput]:
    """Max goodput per target share."""
    answers = msgspec.convert(account["answers"], list[TargetAnswer])
    max_probes = account.get("settings", {}).get("max_probes")
    return [_goodput(answer, account["notes"], max_probes) for answer in answers]


def _goodput(answer: TargetAnswer, notes: Sequence[str], max_probes: int | None) -> Goodput:
    figure = figure_of(answer.seeds)
    counted = [one for one in answer.seeds if one.seed in figure.seeds]
    begun = [one for one in answer.seeds if one.end is not End.NOT_SEARCHED]
    highs = [one.failing_rate for one in counted if one.failing_rate is not None]
    return Goodput(
        target=answer.target,
        requests_per_s=figure.rate,
        is_lower_bound=figure.is_lower_bound,
        ci_low=answer.ci_low,
        ci_high=answer.ci_high,
        is_converged=answer.is_converged,
        notes=[*answer.notes, *(note for note in notes if _OF_THE_TABLE not in note)],
        passed=min((one.rate or 0.0 for one in counted), default=None),
        failed=max(highs) if highs and len(highs) == len(counted) else None,
        num_seeds=len(counted),
        seeds=[
            SeedBracket(
                seed=one.seed,
                passed=one.rate or None,
                failed=one.failing_rate,
                end=one.end.value,
                is_converged=one.end in DONE,
                is_counted=one in counted,
            )
            for one in begun
        ],
        is_out_of_reach=bool(counted) and all(one.end is End.OUT_OF_REACH for one in counted),
        max_probes=max_probes,
    )
