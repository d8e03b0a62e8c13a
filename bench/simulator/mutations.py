"""Breaks one rule of the protocol at a time: does the simulator find what it is there to find?

Each mutation replaces methods of the live classes while its runs last. A mutation that no seed reveals means
that the simulator is blind there, and the command fails:
`python -m bench.simulator.mutations [--seeds N] [--jobs N] [--out FILE]`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from bench.arguments import natural, positive
from bench.load.results.files import check_output_with_text
from bench.simulator.broken_routers import ROUTER_MUTATIONS
from bench.simulator.broken_workers import WORKER_MUTATIONS
from bench.simulator.mutation import Mutation
from bench.simulator.results import header, made, write
from bench.simulator.scenario import draw
from bench.simulator.simulation import Simulation
from cluster.errors import BatonError

MUTATIONS: Final = ROUTER_MUTATIONS + WORKER_MUTATIONS
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


def find_all(
    mutations: Sequence[Mutation], seeds: range, num_jobs: int
) -> Iterable[tuple[Mutation, Found | None]]:
    """Each in a process of its own, in the order given."""

    def find_one(mutation: Mutation) -> Found | None:
        given = msgspec.json.encode((mutation.name, seeds.start, seeds.stop)).decode()
        command = [sys.executable, "-m", "bench.simulator.mutations", "--one", given]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode != 0:
            raise BatonError(
                f"the search for `{mutation.name}` ended with status {done.returncode}; see above"
            )
        found: Found | None = msgspec.json.decode(done.stdout, type=Found | None)
        return found

    with ThreadPoolExecutor(num_jobs) as pool:
        yield from zip(mutations, pool.map(find_one, mutations), strict=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """A table of mutation → seeds needed → rule; 1 if one was not found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=positive, default=DEFAULT_SEEDS, help="at most so many per mutation")
    parser.add_argument("--first-seed", type=natural, default=0)
    parser.add_argument("--only", help="mutations whose name has this text")
    parser.add_argument("--jobs", type=positive, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="write the result there as JSON, and as text beside it")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one is not None:
        name, first, end = msgspec.json.decode(given.one, type=tuple[str, int, int])
        (mutation,) = [mutation for mutation in MUTATIONS if mutation.name == name]
        sys.stdout.buffer.write(msgspec.json.encode(find(mutation, range(first, end))))
        return 0
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    wanted = [mutation for mutation in MUTATIONS if not given.only or given.only in mutation.name]
    if not wanted:
        parser.error(f"no mutation has `{given.only}` in its name")
    if given.out is not None:
        try:
            check_output_with_text(given.out)
        except BatonError as error:
            parser.error(str(error))
    started = time.perf_counter()
    lines = [f"{'rule broken':<46} {'seeds':>5}  found as"]
    rows = []
    print(lines[0])
    for mutation, found in find_all(wanted, seeds, given.jobs):
        lines.append(_line(mutation, found))
        print(lines[-1], flush=True)
        rows.append({"rule": mutation.name, "found": None if found is None else asdict(found)})
    num_found = sum(row["found"] is not None for row in rows)
    lines.append(f"{num_found} of {len(rows)} found.")
    print(lines[-1])
    if given.out is not None:
        command = f"python -m bench.simulator.mutations --seeds {given.seeds} --first-seed {given.first_seed}"
        command += f" --only '{given.only}'" if given.only else ""
        content = header(command, time.perf_counter() - started, given.jobs) | {
            "seeds": {"first": seeds.start, "most": len(seeds)},
            "requests_per_seed": REQUESTS_PER_SEED,
            "mutations": rows,
        }
        write(given.out, content, "\n".join([f"$ {command}", "", *lines, "", made(content)]))
    return 0 if num_found == len(rows) else 1


def _line(mutation: Mutation, found: Found | None) -> str:
    seeds, how = ("-", "NOT FOUND") if found is None else (str(found.num_seeds), found.violation)
    return f"{mutation.name:<46} {seeds:>5}  {how[:140]}"


if __name__ == "__main__":
    sys.exit(main())
