"""The command line of the comparison: `python -m bench.peers`, `make bench-peers`."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from bench.load.figures.slo import parse_slos
from bench.load.plans.traces import read_trace
from bench.load.results.files import check_output
from bench.machine import describe_machine
from bench.peers.catalogue import all_peers
from bench.peers.compare_peers import compare, ready
from bench.peers.comparison import Comparison, Interrupted
from bench.peers.load import TraceLoad
from bench.peers.peer import Peer, Places
from bench.peers.record import read_written, write_files
from cluster.engine.model_source import ModelSource, resolve_model
from cluster.errors import BatonError, ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "bench" / "results"
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
LIBRARY_DIRECTORIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
INTERRUPTED = 130
MAX_SEEDS = 100


def parser() -> argparse.ArgumentParser:
    cache = os.environ.get("BATON_CACHE_DIR") or "~/.cache/baton"
    made = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Measure Baton beside its peers."
    )
    made.add_argument("--model", default="demo", help="as `baton serve --model` takes it (demo)")
    made.add_argument("--cache", type=Path, default=Path(cache) / "peers", help="environments, models, logs")
    made.add_argument("--peers", help="names, separated by commas (default: the usual ones; see --list)")
    made.add_argument("--list", action="store_true", help="say what would be measured, and stop")
    made.add_argument("--prepare-only", action="store_true", help="make environments and models, and stop")
    made.add_argument(
        "--from",
        dest="source",
        type=Path,
        help="measure nothing: write the table of this comparison's JSON file anew, and the JSON, too: "
        "over this file, unless --out says where",
    )
    made.add_argument("--resume", type=Path, help="JSON file of an earlier comparison to add rounds to")
    made.add_argument(
        "--rounds", type=int, default=2, help="of closed loops (2); 0 with --resume and --trace: search alone"
    )
    made.add_argument(
        "--together",
        action="store_true",
        help="start all servers first, and take turns at every load (all must fit into memory)",
    )
    made.add_argument(
        "--concurrency",
        default="1:3,8:16,32:32",
        help="IN_FLIGHT:REQUESTS, separated by commas (1:3,8:16,32:32)",
    )
    made.add_argument(
        "--max-loop-seconds",
        type=float,
        default=120.0,
        help="leave out a closed loop that would take longer (120)",
    )
    made.add_argument("--trace", type=Path, help="trace file for max goodput (default: none, no search)")
    made.add_argument(
        "--scale-lengths", type=float, default=16.0, help="divide the trace's lengths by this (16)"
    )
    made.add_argument("--slo", default="ttft=2s,tpot=100ms", help="of the search (ttft=2s,tpot=100ms)")
    made.add_argument("--probe-seconds", type=float, default=40.0, help="arrivals of one probe (40)")
    made.add_argument("--seeds", type=int, default=3, help="of the search, as far as the time goes (3)")
    made.add_argument("--max-probes", type=int, default=20, help="per server, if there is time (20)")
    made.add_argument(
        "--tolerance",
        type=float,
        default=0.20,
        help="pass and fail may differ by this share in the end (0.2)",
    )
    made.add_argument(
        "--budget-minutes",
        type=float,
        default=80.0,
        help="for all of it (80): the searches share what the closed loops leave",
    )
    made.add_argument(
        "--goodput-peers", help="names to search for max goodput (default: each family's fastest)"
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
    chosen = _chosen("--peers", options.peers, peers)
    goodput_names = frozenset[str]()
    if options.goodput_peers is not None:
        goodput_names = frozenset(
            peer.name for peer in _chosen("--goodput-peers", options.goodput_peers, peers)
        )
        if strange := sorted(goodput_names - {peer.name for peer in chosen}):
            raise ConfigError(
                f"--goodput-peers: {', '.join(strange)} would not be measured; add it to --peers"
            )
    trace = trace_load(options)
    if options.rounds < 1 and not (options.rounds == 0 and options.resume and trace):
        raise ConfigError(f"--rounds {options.rounds}: give 1 or more, or 0 with --resume and --trace")
    if options.together and options.rounds < 1:
        raise ConfigError("--together: needs a round of closed loops: give --rounds 1 or more")
    for flag, value in (
        ("--max-loop-seconds", options.max_loop_seconds),
        ("--budget-minutes", options.budget_minutes),
    ):
        _above_zero(flag, value)
    if options.resume is not None:
        read_written(options.resume)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    comparison = Comparison(
        places=places,
        cores=cores,
        num_rounds=options.rounds,
        is_together=options.together,
        closed_loops=closed_loops(options.concurrency),
        trace=trace,
        no_trace_reason="no trace was given (--trace FILE)" if trace is None else None,
        goodput_names=goodput_names,
        budget_s=options.budget_minutes * 60,
        model_title=model_title(options.model, source),
        not_chosen={
            peer.title: peer.why_unusual or "not among the servers named (--peers)"
            for peer in peers
            if peer not in chosen
        },
        earlier=options.resume,
        max_loop_s=options.max_loop_seconds,
        out=_out(options.out, RESULTS / f"peers-{platform.machine()}-{date}"),
    )
    return comparison, peers if options.list else chosen


def trace_load(options: argparse.Namespace) -> TraceLoad | None:
    """The search's load, checked also where no trace is given.

    Raises:
        BatonError: an option that cannot work, or a trace that cannot be read.
    """
    slos = parse_slos(options.slo)
    for flag, value in (
        ("--scale-lengths", options.scale_lengths),
        ("--probe-seconds", options.probe_seconds),
        ("--seeds", options.seeds),
        ("--max-probes", options.max_probes),
        ("--tolerance", options.tolerance),
    ):
        _above_zero(flag, value)
    if options.seeds > MAX_SEEDS:
        raise ConfigError(f"--seeds {options.seeds}: give {MAX_SEEDS} or fewer")
    if not options.tolerance < 1:
        raise ConfigError(f"--tolerance {options.tolerance:g}: give a share below 1, such as 0.1")
    if options.trace is None:
        return None
    read_trace(options.trace)
    return TraceLoad(
        path=options.trace,
        scale=options.scale_lengths,
        slos=slos,
        probe_s=options.probe_seconds,
        seeds=tuple(range(options.seeds)),
        targets=(0.9, 0.99),
        max_probes=options.max_probes,
        tolerance=options.tolerance,
    )


def model_title(given: str, source: ModelSource) -> str:
    """`demo: smollm2-135m-instruct (SmolLM2.gguf, 97 MB)`."""
    size = sum(size for _, size, _ in source.identity())
    name = source.name if given == source.name else f"{given}: {source.name}"
    return f"{name} ({source.path.name}, {size / 1e6:.0f} MB)"


def _above_zero(flag: str, value: float) -> None:
    if not 0 < value < math.inf:  # NaN too
        raise ConfigError(f"{flag} {value:g}: give a number above 0")


def _out(given: Path | None, default: Path) -> Path:
    """Without suffix; both files can be written."""
    out = default if given is None else given
    if not out.name or out.suffix in (".json", ".md"):
        raise ConfigError(f"--out {out}: give a name without suffix, to which .json and .md are added")
    for suffix in (".json", ".md"):
        check_output(out.with_name(out.name + suffix))
    return out


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
    loops = tuple((int(a), int(b)) for a, _, b in pairs)
    if len(dict(loops)) < len(loops):
        raise ConfigError(f"--concurrency {text}: give each number in flight once")
    return loops


def _chosen(flag: str, text: str | None, peers: Sequence[Peer]) -> list[Peer]:
    """`text` None: the usual ones."""
    if text is None:
        return [peer for peer in peers if peer.is_usual]
    names = [name.strip() for name in text.split(",")]
    known = {peer.name for peer in peers}
    if not all(names):
        raise ConfigError(f"{flag} `{text}`: a name is empty; known are {', '.join(sorted(known))}")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{flag}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{flag} `{text}`: give each name once")
    return [peer for peer in peers if peer.name in names]


def _stop(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        if options.source is not None:
            return _write_anew(options.source, options.out)
        comparison, peers = comparison_from(options)
        if options.list:
            for peer in peers:
                unusual = "" if peer.why_unusual is None else f" ({peer.why_unusual})"
                _tell(f"{peer.name}: {peer.title}; {peer.precision}{unusual}")
            return 0
        if options.prepare_only:
            return _prepare(comparison, peers)
        outcomes = compare(comparison, peers, describe_machine(), _tell)
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt) as error:
        print(str(error) or "interrupted before anything was measured; nothing is written", file=sys.stderr)
        return INTERRUPTED
    nothing = "" if any(outcome.rounds for outcome in outcomes) else "; no server could be measured"
    _tell(f"written: {comparison.out}.json and .md{nothing}")
    return 1 if nothing else 0


def _write_anew(source: Path, given: Path | None) -> int:
    """
    Raises:
        BatonError: it cannot be read, or its table cannot be written.
    """
    written = read_written(source)
    out = _out(given, source.with_suffix(""))
    write_files(out, written)
    _tell(f"written: {out}.json and .md")
    return 0


def _prepare(comparison: Comparison, peers: Sequence[Peer]) -> int:
    outcomes = ready(comparison, peers, _tell).values()
    names = [one.name for one in outcomes if one.cannot_run is None]
    others = [one.name for one in outcomes if one.cannot_run is not None]
    told = [f"ready: {', '.join(names)}"] if names else []
    told += [f"not ready: {', '.join(others)}"] if others else []
    _tell("; ".join(told))
    return 0 if names else 1


def _tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
