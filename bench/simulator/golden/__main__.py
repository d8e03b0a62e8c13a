"""DistServe's golden figure: `python -m bench.simulator.golden [--out FILE.json [--resume]]`.

OPT-13B on A100s, ShareGPT-like lengths, 4 GPUs at most, TTFT 200 ms and TPOT 100 ms for 90 %: its simulator
prints 1.56 requests per second and GPU, for one prefill instance of TP2 and one decode instance of TP1.

1. Its system, restated, finds its placement and its figure, for lengths like its own.
2. Our simulator runs the same placement, with what it leaves out added step by step.
3. Elastic pools of the same GPUs, for lengths like its own and for others.

Columns, in requests per second and GPU. `printed`: what its search would print, the median of the seeds;
`finer`: the same search to 0.02, and how far the seeds spread; `steady`: our search (the highest rate with
90 % within both targets, of the requests between warm-up and end, mean of the seeds).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.load.results.files import write_atomically
from bench.simulator.golden.cases import CASES, PLACEMENTS, SLO, Case
from bench.simulator.golden.lengths import NAMES, sharegpt_like
from bench.simulator.golden.measure import HEADER, measure, text_line
from bench.simulator.golden.protocol import PUBLISHED

NUM_ROWS = 5_000

Done = dict[tuple[str, str, str], dict[str, Any]]  # by title, lengths, case


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    lengths: str
    cases: tuple[Case, ...]
    is_steady: bool = False


TABLES = (
    Table("Placements", "paper", PLACEMENTS),
    Table("Systems", "paper", CASES, is_steady=True),
    *(Table("Other lengths", lengths, CASES[:7]) for lengths in NAMES[1:]),
)


def fill(table: Table, num_seeds: int, num_steady: int, done: Done, save: Callable[[], None]) -> None:
    """Measure what is not done, and print all of it."""
    rows = sharegpt_like(table.lengths, NUM_ROWS)
    means = [fmean(row.input_tokens for row in rows), fmean(row.output_tokens for row in rows)]
    print(f"{table.title}; lengths `{table.lengths}` (means {means[0]:.0f} and {means[1]:.0f} tokens)")
    print(HEADER)
    for case in table.cases:
        key = (table.title, table.lengths, case.name)
        if key not in done:
            done[key] = measure(case, rows, num_seeds, num_steady if table.is_steady else 0)
            save()
        print(text_line(done[key]), flush=True)
    print()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="of DistServe's search")
    parser.add_argument("--steady-seeds", type=int, default=3, help="of our search; 0: none")
    parser.add_argument("--out", type=Path, help="written after each case")
    parser.add_argument("--resume", action="store_true", help="keep what --out has")
    given = parser.parse_args(arguments)
    if given.seeds < 1 or given.steady_seeds < 0:
        parser.error("--seeds needs 1 or more, --steady-seeds 0 or more")
    if given.resume and given.out is None:
        parser.error("--resume needs --out")
    done: Done = {}
    if given.resume and given.out.exists():
        done = {
            (one["title"], one["lengths"], one["case"]): one
            for one in json.loads(given.out.read_bytes())["results"]
        }

    def save() -> None:
        if given.out is not None:
            write_atomically(given.out, [json.dumps(_result(done), indent=1).encode(), b"\n"])

    print(
        f"Published: {PUBLISHED:.2f} requests per second and GPU, with TP2 for prefill and TP1 for decode.\n"
    )
    for table in TABLES:
        fill(table, given.seeds, given.steady_seeds, done, save)
    return 0


def _result(done: Done) -> dict[str, Any]:
    return {
        "kind": "golden-distserve",
        "published": PUBLISHED,
        "slo": SLO,
        "results": [
            {"title": title, "lengths": lengths} | result for (title, lengths, _), result in done.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
