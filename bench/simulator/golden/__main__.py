"""DistServe's golden figure: `python -m bench.simulator.golden [--seeds 20] [--out FILE.json]`.

OPT-13B on A100s, ShareGPT-like lengths, 4 GPUs at most, TTFT 200 ms and TPOT 100 ms for 90 %: its simulator
prints 1.56 requests per second and GPU, for one prefill instance of TP2 and one decode instance of TP1.

1. Its system, restated, finds its placement and its figure, for lengths like its own.
2. Our simulator runs the same placement, with what it leaves out added step by step.
3. Elastic pools of the same GPUs.

Columns, in requests per second and GPU. `printed`: what its search would print, the median of the seeds;
`finer`: the same search to 0.02, and how far the seeds spread; `steady`: our search (the highest rate with
90 % within both targets, of the requests between warm-up and end, mean of the seeds).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.load.results.files import json_safe, write_atomically
from bench.simulator.golden.cases import CASES, PLACEMENTS, SLO, Case
from bench.simulator.golden.lengths import NAMES, sharegpt_like
from bench.simulator.golden.measure import HEADER, measure, text_line
from bench.simulator.golden.protocol import PUBLISHED

NUM_ROWS = 5_000


def compare(
    title: str, lengths: str, cases: Sequence[Case], num_seeds: int, num_steady: int
) -> dict[str, Any]:
    rows = sharegpt_like(lengths, NUM_ROWS)
    means = [fmean(row.input_tokens for row in rows), fmean(row.output_tokens for row in rows)]
    print(f"{title}; lengths `{lengths}` (means {means[0]:.0f} and {means[1]:.0f} tokens)", flush=True)
    print(HEADER)
    results = []
    for case in cases:
        results.append(measure(case, rows, num_seeds, num_steady))
        print(text_line(results[-1]), flush=True)
    print()
    return {"title": title, "lengths": lengths, "mean_tokens": means, "results": results}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="of DistServe's search")
    parser.add_argument("--steady-seeds", type=int, default=3, help="of our search; 0: none")
    parser.add_argument("--only", help="cases whose names have this text")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if given.seeds < 1 or given.steady_seeds < 0:
        parser.error("--seeds needs 1 or more, --steady-seeds 0 or more")
    started = time.perf_counter()
    cases = [case for case in CASES if given.only is None or given.only in case.name]
    print(
        f"Published: {PUBLISHED:.2f} requests per second and GPU, with TP2 for prefill and TP1 for decode.\n"
    )
    tables = [
        compare("Placements", "paper", PLACEMENTS, given.seeds, 0),
        compare("Systems", "paper", cases, given.seeds, given.steady_seeds),
    ]
    for lengths in NAMES[1:]:
        tables.append(compare("Other lengths", lengths, cases[:4], given.seeds, 0))
    if given.out is not None:
        result = {
            "kind": "golden-distserve",
            "published": PUBLISHED,
            "slo": SLO,
            "num_seeds": given.seeds,
            "tables": tables,
            "wall_s": time.perf_counter() - started,
        }
        write_atomically(given.out, [json.dumps(json_safe(result), indent=1).encode(), b"\n"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
