"""The command line of the comparison: `python -m bench.peers`, `make bench-peers`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from bench.machine import describe_machine
from bench.peers.compare_peers import compare, ready
from bench.peers.comparison import Comparison, Interrupted
from bench.peers.options import comparison_from, files_without_suffix, parser
from bench.peers.peer import Peer
from bench.peers.record import read_written, write_files
from cluster.errors import BatonError

INTERRUPTED = 130


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
    out = files_without_suffix(given, source.with_suffix(""))
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
