"""`best_of`: of the candidates for each prompt, those with the highest mean log-probability per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from router.delivery import RequestSummary
from router.reply import Choice, finite


def pick_best(
    choices: Sequence[Choice], summaries: Sequence[RequestSummary], num_candidates: int, num_choices: int
) -> tuple[list[Choice], list[RequestSummary]]:
    """`num_choices` of each `num_candidates`, best first, numbered anew; the earlier one of equals."""
    kept: list[Choice] = []
    kept_summaries: list[RequestSummary] = []
    for start in range(0, len(choices), num_candidates):
        order = sorted(range(start, start + num_candidates), key=lambda at: -_score(choices[at]))
        for at in order[:num_choices]:
            plan = replace(choices[at].plan, index=len(kept))
            kept.append(replace(choices[at], plan=plan))
            kept_summaries.append(summaries[at])
    return kept, kept_summaries


def _score(choice: Choice) -> float:
    entries = choice.whole.entries
    return fmean(finite(entry.output.logprob) for entry in entries) if entries else finite(None)
