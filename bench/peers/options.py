"""The options of `python -m bench.peers`: from the command line to a `Comparison`, checked before anything is
prepared.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.load.figures.slo import parse_slos
from bench.load.plans.traces import read_trace
from bench.load.results.files import check_output
from bench.peers.catalogue import all_peers
from bench.peers.chats import Chats, ChatTemplate
from bench.peers.comparison import Comparison
from bench.peers.facts import cpu_flags
from bench.peers.load import INPUT_TOKENS, TraceLoad
from bench.peers.peer import Peer, Places
from bench.peers.record import RANDOM, TEXT, read_written
from cluster.engine.model_source import ModelSource, resolve_model
from cluster.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "bench" / "results"
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
LIBRARY_DIRECTORIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
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
        default="1:4,8:24,32:96",
        help="IN_FLIGHT:REQUESTS, separated by commas (1:4,8:24,32:96); with two or three times as many "
        "requests as are in flight, the table shows what comes after the first burst, too",
    )
    made.add_argument(
        "--prompts",
        choices=(RANDOM, TEXT),
        default=RANDOM,
        help="of the closed loops: random token ids, with Baton's speculation off; or chats of real text, "
        "with every server as it comes (random)",
    )
    made.add_argument(
        "--max-loop-seconds",
        type=float,
        default=180.0,
        help="leave out a closed loop that would take longer (180)",
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
        help="for all of it (80): the searches share what the closed loops leave; with --together further "
        "rounds are left out where there is no time for them",
    )
    made.add_argument(
        "--goodput-peers", help="names to search for max goodput (default: each family's fastest)"
    )
    made.add_argument(
        "--out", type=Path, help="result files, without suffix (default: bench/results/peers-ARCH-DATE)"
    )
    return made


def _coded_bits(source: ModelSource) -> float | None:
    if not source.is_gguf or "avx512_bf16" not in cpu_flags():
        return None
    from cluster.engine.gguf_codes import kept_bits  # loads torch

    return kept_bits(source.path)


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
        coded_bits=_coded_bits(source),
    )
    cores = tuple(sorted(os.sched_getaffinity(0)))
    is_text = options.prompts == TEXT
    trace = trace_load(options)
    peers = all_peers(places, cores, is_text=is_text, slos=() if trace is None else trace.slos)
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
    if options.rounds < 1 and not (options.rounds == 0 and options.resume and trace):
        raise ConfigError(f"--rounds {options.rounds}: give 1 or more, or 0 with --resume and --trace")
    if options.together and options.rounds < 1:
        raise ConfigError("--together: needs a round of closed loops: give --rounds 1 or more")
    for flag, value in (
        ("--max-loop-seconds", options.max_loop_seconds),
        ("--budget-minutes", options.budget_minutes),
    ):
        _above_zero(flag, value)
    if is_text and trace is not None:
        raise ConfigError("--prompts text: a trace's prompts are random ids; search with --prompts random")
    if (
        options.resume is not None
        and (earlier := read_written(options.resume).kind_of_prompts) != options.prompts
    ):
        raise ConfigError(
            f"--resume {options.resume}: its prompts are {earlier}; add rounds with --prompts {earlier}"
        )
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    comparison = Comparison(
        places=places,
        cores=cores,
        num_rounds=options.rounds,
        is_together=options.together,
        closed_loops=closed_loops(options.concurrency),
        chats=Chats(ChatTemplate(places.model_directory("bf16")), INPUT_TOKENS) if is_text else None,
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
        out=files_without_suffix(
            options.out, RESULTS / f"peers-{'text-' if is_text else ''}{platform.machine()}-{date}"
        ),
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


def files_without_suffix(given: Path | None, default: Path) -> Path:
    """Where `.json` and `.md` can be written; `default` if none is given.

    Raises:
        BatonError: they cannot.
    """
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
