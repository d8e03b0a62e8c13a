"""`make chaos`: at least 200 streams over at least 20 faults on a live cluster, every stream compared."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
from pathlib import Path

from bench.arguments import natural, positive
from bench.chaos.faults import Kind
from bench.chaos.report import to_json, to_table
from bench.chaos.run import TWO_AND_TWO, ChaosSettings, run_chaos
from bench.load.results.files import check_output_with_text, write_atomically
from bench.machine import cpu_facts
from cluster.errors import BatonError

RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--streams", type=positive, default=200, help="streams to complete, at least")
    parser.add_argument("--faults", type=natural, default=24, help="signals to send")
    names = [kind.value for kind in Kind]
    parser.add_argument("--signals", nargs="+", choices=names, default=names, help="which, in turn (all)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests and the victims")
    parser.add_argument("--concurrency", type=positive, default=8, help="streams at a time")
    parser.add_argument("--max-tokens", type=positive, default=48, help="longest answer")
    parser.add_argument("--no-rolling", action="store_true", help="leave the rolling restart out")
    parser.add_argument("--out", type=Path, default=RESULTS / f"chaos-{platform.machine()}.json")
    parser.add_argument("serve", nargs="*", help="options of `baton serve`, after --")
    given = parser.parse_args()
    try:
        check_output_with_text(given.out)  # not only when the run is over
    except BatonError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the cluster is stopped on the way out
    settings = ChaosSettings(
        num_streams=given.streams,
        num_faults=given.faults,
        kinds=tuple(map(Kind, given.signals)),
        seed=given.seed,
        concurrency=given.concurrency,
        max_tokens=given.max_tokens,
        rolling=not given.no_rolling,
        arguments=tuple(given.serve) or TWO_AND_TWO,
    )
    outcome = run_chaos(settings, lambda text: print(text, file=sys.stderr, flush=True))
    cpu, _ = cpu_facts()
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench.chaos", *sys.argv[1:]]),
        "machine": {"cpu": cpu, "num_cores": len(os.sched_getaffinity(0))},
        "seed": settings.seed,
        "concurrency": settings.concurrency,
        "serve": list(settings.arguments),
    } | to_json(outcome)
    table = to_table(result)
    print(table)
    write_atomically(given.out, [json.dumps(result, indent=1, ensure_ascii=False).encode(), b"\n"])
    heading = f"$ {result['command']}\n{result['date']}, {os.cpu_count()} cores of {cpu}\n\n"
    write_atomically(given.out.with_suffix(".txt"), [f"{heading}{table}\n".encode()])
    print(f"\nwritten: {given.out}, and as text {given.out.with_suffix('.txt').name}")
    if outcome.num_equal < outcome.num_streams or not outcome.is_quiet:
        sys.exit(1)


if __name__ == "__main__":
    main()
