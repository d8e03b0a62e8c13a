"""Breaks one rule of the protocol at a time and lets the simulator find it: does it see what it is there to see?

Each mutation replaces methods of the live classes while its runs last. A mutation that no seed reveals means that
the simulator is blind there, and the command fails: `python -m bench.simulator.mutations [--seeds N]`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.simulator.broken_rules import MUTATIONS, Mutation
from bench.simulator.scenario import draw
from bench.simulator.simulation import Simulation

DEFAULT_SEEDS = 200
REQUESTS_PER_SEED = 150


@dataclass(frozen=True, slots=True)
class Found:
    """The first seed that reveals a mutation, and how."""

    seed: int
    num_seeds: int
    violation: str


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The classes are broken inside, and whole again after it."""
    originals = [(patch.owner, patch.name, vars(patch.owner)[patch.name]) for patch in mutation.patches]
    try:
        for patch, (_, _, original) in zip(mutation.patches, originals, strict=True):
            setattr(patch.owner, patch.name, patch.broken(original))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def find(mutation: Mutation, seeds: Sequence[int]) -> Found | None:
    """Run seeds, with faults, until one shows a violation."""
    with applied(mutation):
        for number, seed in enumerate(seeds, 1):
            report = Simulation(draw(seed, num_requests=REQUESTS_PER_SEED, faults=True)).run()
            if report.violation is not None:
                return Found(seed, number, report.violation)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """A table of mutation → seeds needed → rule; 1 if one was not found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=DEFAULT_SEEDS, help="at most so many per mutation")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", help="mutations whose name has this text")
    given = parser.parse_args(arguments)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    blind = 0
    print(f"{'rule broken':<46} {'seeds':>5}  found as")
    for mutation in MUTATIONS:
        if given.only and given.only not in mutation.name:
            continue
        found = find(mutation, seeds)
        blind += found is None
        seeds_text, how = ("-", "NOT FOUND") if found is None else (str(found.num_seeds), found.violation)
        print(f"{mutation.name:<46} {seeds_text:>5}  {how[:140]}", flush=True)
    return 1 if blind else 0


if __name__ == "__main__":
    sys.exit(main())
