"""The command line of the comparison: `python -m bench.peers`, `make bench-peers`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from bench.load.figures.slo import parse_slos
from bench.machine import describe_machine
from bench.peers.catalogue import all_peers
from bench.peers.compare_peers import Comparison, Interrupted, compare
from bench.peers.load import TraceLoad
from bench.peers.peer import Peer, Places
from cluster.engine.model_source import resolve_model
from cluster.errors import BatonError, ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "bench" / "results"
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
LIBRARY_DIRECTORIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    cache = os.environ.get("BATON_CACHE_DIR") or "~/.cache/baton"
    made = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Measure Baton beside its peers."
    )
    made.add_argument("--model", default="demo", help="as `baton serve --model` takes it")
    made.add_argument("--cache", type=Path, default=Path(cache) / "peers", help="environments, models, logs")
    made.add_argument(
        "--peers", default="", help="names, separated by commas (default: the usual ones; see --list)"
    )
    made.add_argument("--list", action="store_true", help="say what would be measured, and stop")
    made.add_argument("--prepare-only", action="store_true", help="make environments and models, and stop")
    made.add_argument("--resume", type=Path, help="JSON file of an earlier comparison to add rounds to")
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument(
        "--concurrency", default="1:3,8:16,32:32", help="IN_FLIGHT:REQUESTS, separated by commas"
    )
    made.add_argument(
        "--max-loop-seconds", type=float, default=300.0, help="leave out a closed loop that would take longer"
    )
    made.add_argument("--trace", type=Path, help="trace file for max goodput (default: none, no search)")
    made.add_argument("--scale-lengths", type=float, default=16.0, help="divide the trace's lengths by this")
    made.add_argument("--slo", default="ttft=2s,tpot=100ms")
    made.add_argument("--probe-seconds", type=float, default=45.0)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--max-probes", type=int, default=7, help="per server")
    made.add_argument(
        "--tolerance", type=float, default=0.27, help="pass and fail may differ by this share in the end"
    )
    made.add_argument(
        "--goodput-peers", default="", help="names to search for max goodput (default: each family's fastest)"
    )
    made.add_argument(
        "--out", type=Path, help="result files, without suffix (default: bench/results/peers-ARCH-DATE)"
    )
    return made


def comparison_from(options: argparse.Namespace) -> tuple[Comparison, list[Peer]]:
    """
    Raises:
        BatonError: an option that cannot work.
    """
    source = resolve_model(options.model)
    found = (Path(directory) / name for directory in LIBRARY_DIRECTORIES for name in TCMALLOC)
    places = Places(
        cache=options.cache.expanduser().resolve(),
        repository=REPOSITORY,
        python=sys.executable,
        model=options.model if options.model == "demo" else str(source.path),
        gguf=source.path if source.is_gguf else None,
        tcmalloc=next((path for path in found if path.is_file()), None),
    )
    cores = tuple(sorted(os.sched_getaffinity(0)))
    peers = all_peers(places, cores)
    chosen = peers if options.list else _chosen("--peers", options.peers, peers)
    trace = None
    if options.trace is not None:
        if not options.trace.is_file():
            raise ConfigError(f"--trace {options.trace}: no such file")
        trace = TraceLoad(
            path=options.trace,
            scale=options.scale_lengths,
            slos=parse_slos(options.slo),
            probe_s=options.probe_seconds,
            seeds=tuple(range(options.seeds)),
            targets=(0.9, 0.99),
            max_probes=options.max_probes,
            tolerance=options.tolerance,
        )
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: at least one is needed")
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    comparison = Comparison(
        places=places,
        cores=cores,
        num_rounds=options.rounds,
        closed_loops=closed_loops(options.concurrency),
        trace=trace,
        no_trace_reason="no trace was given (--trace FILE)" if trace is None else None,
        goodput_names=frozenset(
            peer.name
            for peer in _chosen("--goodput-peers", options.goodput_peers, peers)
            if options.goodput_peers
        ),
        earlier=options.resume,
        max_loop_s=options.max_loop_seconds,
        out=options.out or RESULTS / f"peers-{platform.machine()}-{date}",
    )
    return comparison, chosen


def closed_loops(text: str) -> tuple[tuple[int, int], ...]:
    """`1:4,8:16` → ((1, 4), (8, 16)).

    Raises:
        ConfigError: not such a list.
    """
    pairs = [item.strip().partition(":") for item in text.split(",")]
    if not all(a.isdecimal() and b.isdecimal() and 0 < int(a) <= int(b) for a, _, b in pairs):
        raise ConfigError(
            f"--concurrency {text}: write IN_FLIGHT:REQUESTS, such as 1:4,8:16; "
            "there must be no fewer requests than are in flight"
        )
    return tuple((int(a), int(b)) for a, _, b in pairs)


def _chosen(flag: str, text: str, peers: Sequence[Peer]) -> list[Peer]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {peer.name for peer in peers}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{flag}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return [peer for peer in peers if (peer.name in names if names else peer.is_usual)]


def _stop(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    try:
        comparison, peers = comparison_from(options)
        if options.list:
            for peer in peers:
                usual = "" if peer.is_usual else " (only if named)"
                print(f"{peer.name}: {peer.title}; {peer.precision}{usual}")
            return 0
        if options.prepare_only:
            comparison = dataclasses.replace(comparison, num_rounds=0)
        compare(comparison, peers, describe_machine(), lambda line: print(line, flush=True))
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt):
        print("interrupted; what was measured is written", file=sys.stderr)
        return INTERRUPTED
    print(f"written: {comparison.out}.json and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
