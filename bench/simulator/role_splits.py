"""What every split of a pool into prefill and decode workers serves, predicted and simulated:
`python -m bench.simulator.role_splits --trace azure_2023_conv.csv [--out FILE.md]`.

The pools are like the live one: prefill workers only send, decode workers prefill for themselves, too.
Predicted by `router.planner`, which is behind the wishes of `--roles planned`; simulated is the highest rate
with 90 % of all requests within both targets, placed by the router's own policy. `*`: the planner's choice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.load.figures.slo import parse_slos
from bench.load.plans.trace_formats import TraceRow
from bench.load.results.files import write_atomically
from bench.simulator.fleet.elastic import ElasticPolicy
from bench.simulator.fleet.planner import kinds_of
from bench.simulator.fleet.policies import PolicySpec
from bench.simulator.fleet.search import max_goodput, rates
from bench.simulator.fleet.trial import Setup
from bench.simulator.fleet.workload import read_rows
from bench.simulator.hardware import parse_pool
from cluster.slo_classes import Targets
from cluster.wire.messages import Role
from router.planner import Roles, best_roles, predicted_rate, work_of

NUM_ROWS, SAMPLE = 4_000, 16
POOLS = (
    ("h100-llama3-8b:4", "ttft=0.5s,tpot=25ms"),
    ("h100-llama3-8b:4", "ttft=0.3s,tpot=10ms"),
    ("h100-llama3-8b:2,h20-llama3-8b:2", "ttft=0.5s,tpot=25ms"),
)


@dataclass(frozen=True, slots=True)
class Fixed(PolicySpec):
    """The elastic policy among workers of these roles."""

    roles: tuple[Role, ...]

    def make(self, targets: Targets, use_prefix_cache: bool) -> ElasticPolicy:
        return ElasticPolicy(targets, use_prefix_cache=use_prefix_cache, roles=self.roles)


@dataclass(frozen=True, slots=True)
class Line:
    split: tuple[Roles, ...]
    is_chosen: bool
    predicted: float
    simulated: float


def compare(
    rows: Sequence[TraceRow], pool_text: str, slo_text: str, seed: int = 0, length_s: float = 40.0
) -> Iterator[Line]:
    """Every split with a worker that decodes, the one with the fewest prefill workers first."""
    pool, slos = parse_pool(pool_text, None), parse_slos(slo_text)
    setup = Setup(rows, pool, PolicySpec("elastic", None), slos, length_s=length_s)
    kinds, targets = kinds_of(pool), setup.targets
    requests = [(row.input_tokens, row.output_tokens) for row in rows[::SAMPLE]]
    best, _ = best_roles(kinds, requests, targets, may_only_decode=False)
    works = work_of(requests, kinds, targets)
    for numbers in product(*(range(kind.count + 1) for kind in kinds)):
        split = tuple(
            Roles(number, 0, kind.count - number) for number, kind in zip(numbers, kinds, strict=True)
        )
        if not any(roles.num_both for roles in split):
            continue
        predicted = predicted_rate(kinds, split, works, targets)
        tried = Setup(rows, pool, Fixed("", None, _each(split)), slos, length_s=length_s)
        found, _ = max_goodput(tried, (seed,), start=max(1.0, 0.7 * predicted))
        yield Line(split, split == best.roles, predicted, rates(found)[0])


def _each(split: Sequence[Roles]) -> tuple[Role, ...]:
    """By worker, in the pool's order."""
    return tuple(
        role
        for roles in split
        for role in [Role.PREFILL] * roles.num_prefill + [Role.DECODE] * roles.num_both
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulator.role_splits", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="a trace of Azure's or Mooncake's format")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    trace, _ = read_rows(options.trace)
    text = f"`python -m bench.simulator.role_splits --trace {options.trace.name}`, requests per second\n"
    for pool, slo in POOLS:
        text += f"\n{pool}, {slo}\n\n| prefill + decode, by kind | predicted | simulated |\n|---|---|---|\n"
        for line in compare(trace.rows[:NUM_ROWS], pool, slo):
            split = ", ".join(f"{roles.num_prefill} + {roles.num_both}" for roles in line.split)
            star = " *" if line.is_chosen else ""
            text += f"| {split}{star} | {line.predicted:.1f} | {line.simulated:.1f} |\n"
    sys.stdout.write(text)
    if options.out is not None:
        write_atomically(options.out, [text.encode()])


if __name__ == "__main__":
    main()
