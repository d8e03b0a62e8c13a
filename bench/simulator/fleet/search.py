"""The highest rate at which a policy keeps 90 % of all requests within the SLO, per seed: the search of
`baton bench max-goodput` over simulated runs.

`find_best` finds the best of many policies without searching each: a policy is searched only if it passes at
a rate above what the best so far reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bench.load.goodput.search import GoodputSearch, to_dict
from bench.load.goodput.values import ProbeOutcome, SearchSettings
from bench.simulator.fleet.policies import PolicySpec
from bench.simulator.fleet.trial import Outcome, Setup, run_trial

OnOutcome = Callable[[Outcome], object]
OnProgress = Callable[[float, int, float], None]  # rate, seed, share
GOAL = 0.9
TOLERANCE = 0.03
MIN_RATE, MAX_RATE = 0.01, 1e6  # requests per second


def start_rate(setup: Setup) -> float:
    """What the pool would do if all steps were full: a rate to begin with, not a bound."""
    rows = setup.rows[:: max(1, len(setup.rows) // 500)]
    targets = setup.targets
    rate = 0.0
    for kind in setup.pool:
        model = kind.model
        cost_s = sum(
            row.input_tokens * (model.per_token_s + model.per_attention_s * row.input_tokens / 2)
            + row.output_tokens * (model.per_token_s + model.per_context_s * row.input_tokens)
            for row in rows
        ) / len(rows)
        rate += max(0.05, 1 - model.fixed_s / targets.tpot_s) / cost_s
    return min(max(0.6 * rate, 2 * MIN_RATE), MAX_RATE)


def new_search(setup: Setup, seeds: Sequence[int], start: float | None = None) -> GoodputSearch:
    return GoodputSearch(
        SearchSettings(
            start_rate=start if start is not None else start_rate(setup),
            targets=(GOAL,),
            seeds=tuple(seeds),
            growth=1.4,
            tolerance=TOLERANCE,
            max_probes=24 * len(seeds),
            min_rate=MIN_RATE,
            max_rate=MAX_RATE,
        )
    )


def probes(search: GoodputSearch, setup: Setup, on_progress: OnProgress | None = None) -> Iterator[Outcome]:
    """Each run as it ends, told to the search before it is yielded, until the search is over."""
    while (probe := search.next()) is not None:
        told = None if on_progress is None else partial(on_progress, probe.rate, probe.seed)
        outcome = run_trial(setup, probe.rate, probe.seed, told)
        search.report(
            probe, ProbeOutcome(attainment=outcome.attainment, num_offered=outcome.num_offered, valid=True)
        )
        yield outcome


def max_goodput(
    setup: Setup, seeds: Sequence[int], start: float | None = None, on_outcome: OnOutcome | None = None
) -> tuple[dict[str, Any], list[Outcome]]:
    """The search as a dict (answers, probes), and every run."""
    search = new_search(setup, seeds, start)
    outcomes: list[Outcome] = []
    for outcome in probes(search, setup):
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)
    return to_dict(search), outcomes


def rates(found: dict[str, Any]) -> list[float]:
    """Per seed."""
    return [seed["rate"] or 0.0 for seed in found["answers"][0]["seeds"]]


def find_best(
    setup: Setup, policies: Sequence[PolicySpec], seed: int, on_outcome: OnOutcome | None = None
) -> tuple[PolicySpec, float]:
    """(the policy, its rate) at one seed. Policies are tried in the order given: likely ones first."""
    best, best_rate = policies[0], 0.0
    for policy in policies:
        tried = replace(setup, policy=policy)
        if best_rate > 0:
            outcome = run_trial(tried, best_rate * (1 + TOLERANCE), seed)
            if on_outcome is not None:
                on_outcome(outcome)
            if outcome.attainment < GOAL:
                continue
        found, _ = max_goodput(tried, (seed,), best_rate * (1 + TOLERANCE) or None, on_outcome)
        rate = rates(found)[0]
        if rate > best_rate:
            best, best_rate = policy, rate
    return best, best_rate
