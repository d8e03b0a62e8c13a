"""A long run on several cores: `run` starts a process per share and gathers what each has to say.

1. Each pair of processes gets a socket pair; each process `python -m bench.simulator.large.processes`, told
   its share, and its ends of them.
2. A process prints a line of JSON now and then (`Progress`) and one at the end (`Report`).
3. One that fails ends the run: its words are on stderr. One process alone runs here.
"""

from __future__ import annotations

import gc
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import IO

import msgspec

from bench.simulator.large.links import Link
from bench.simulator.large.plan import Plan
from bench.simulator.large.shard import Shard
from bench.simulator.large.tally import Tallied
from cluster.errors import BatonError

_SAID_EVERY = 0.02  # of the run


class Progress(msgspec.Struct, tag=True):
    """`virtual_s` of arrivals are done after `wall_s`."""

    process: int
    virtual_s: float
    wall_s: float


class Report(msgspec.Struct, tag=True):
    process: int
    tallied: Tallied
    marks: list[tuple[float, float]]  # (virtual, wall) seconds as the run went on
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    num_cells: int
    num_steps: int
    busy_s: float  # of all workers
    num_preemptions: int
    num_local: int
    num_moved: int
    cached_tokens: int
    transferred_bytes: float


class _Share(msgspec.Struct):
    """What a process is told; `ends` are file descriptors, to all other processes in order."""

    plan: Plan
    process: int
    ends: list[int]


OnProgress = Callable[[Progress], object]


def run(plan: Plan, num_processes: int, on_progress: OnProgress) -> list[Report]:
    """In order of the processes.

    Raises:
        BatonError: a process failed.
    """
    if num_processes == 1:
        return [_run(_Share(plan, 0, []), on_progress)]
    ends: list[list[socket.socket]] = [[] for _ in range(num_processes)]
    for left, right in combinations(range(num_processes), 2):
        one, other = socket.socketpair()
        ends[left].append(one)
        ends[right].append(other)
    children = []
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    try:
        for process, own in enumerate(ends):
            children.append(_start(_Share(plan, process, [end.fileno() for end in own])))
            for end in own:
                end.close()
        for child in children:
            assert child.stdout is not None
            threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
        return _gathered(children, lines, on_progress)
    finally:
        for own in ends:
            for end in own:
                end.close()
        for child in children:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _start(share: _Share) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.simulator.large.processes", msgspec.json.encode(share).decode()],
        stdout=subprocess.PIPE,
        pass_fds=share.ends,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a process per core: its threads would take others'
    )


def _read(stream: IO[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _gathered(
    children: Sequence[subprocess.Popen[bytes]],
    lines: queue.SimpleQueue[bytes | None],
    on_progress: OnProgress,
) -> list[Report]:
    reports: list[Report] = []
    num_open = len(children)
    while num_open:
        line = lines.get()
        if line is None:
            num_open -= 1
            continue
        said = msgspec.json.decode(line, type=Progress | Report)
        if isinstance(said, Progress):
            on_progress(said)
        else:
            reports.append(said)
    for process, child in enumerate(children):
        if child.wait() != 0:
            raise BatonError(
                f"process {process} of the simulation ended with status {child.returncode}; see above"
            )
    return sorted(reports, key=lambda report: report.process)


def _run(share: _Share, on_progress: OnProgress) -> Report:
    started, cpu_s = time.perf_counter(), time.process_time()
    marks: list[tuple[float, float]] = []

    def on_window(virtual_s: float) -> None:
        if virtual_s - (marks[-1][0] if marks else 0.0) >= _SAID_EVERY * share.plan.seconds:
            marks.append((virtual_s, time.perf_counter() - started))
            on_progress(Progress(share.process, *marks[-1]))

    links = [Link(socket.socket(fileno=end)) for end in share.ends]
    shard = Shard(share.plan, share.process, links, on_window=on_window)
    gc.collect()
    gc.disable()  # requests make no cycles, and passes over a fleet's objects would take a tenth of the time
    shard.run()
    gc.enable()
    for link in links:
        link.close()
    simulations = [cell.simulation for cell in shard.cells.values()]
    facts = [cell.facts() for cell in shard.cells.values()]
    return Report(
        process=share.process,
        tallied=shard.tally.tallied(),
        marks=marks,
        wall_s=time.perf_counter() - started,
        cpu_s=time.process_time() - cpu_s,
        peak_rss_bytes=_peak_rss_bytes(),
        num_cells=len(simulations),
        num_steps=sum(one.num_steps for one in simulations),
        busy_s=sum(worker.busy_s for one in simulations for worker in one.workers),
        num_preemptions=sum(one.num_preemptions for one in simulations),
        num_local=sum(one["num_local"] for one in facts),
        num_moved=sum(one["num_moved"] for one in facts),
        cached_tokens=sum(one.num_cached_tokens for one in simulations),
        transferred_bytes=sum(one.transferred_bytes for one in simulations),
    )


def _peak_rss_bytes() -> int:
    """Of this program; `ru_maxrss` outlives `exec` on Linux, so it would be the starter's if larger."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """A process of its own."""

    def say(what: Progress | Report) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
        sys.stdout.buffer.flush()

    try:
        say(_run(msgspec.json.decode(sys.argv[1], type=_Share), say))
    except BatonError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
