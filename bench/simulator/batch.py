"""Many runs on several cores: one process per core, results as JSON lines, in any order.

1. `runs_of` deals the runs out; each worker process is `python -m bench.simulator.batch`, told its share.
2. A worker prints one `Report` per run as it ends; the parent yields them.
3. A worker that fails ends the batch with its words: a violation is a report, everything else is a bug here.
"""

from __future__ import annotations

import argparse
import gc
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import msgspec

from bench.simulator import every_moment
from bench.simulator.scenario import draw
from bench.simulator.simulation import Report, Simulation
from cluster.errors import BatonError

_COLLECT_EVERY = 10  # runs


@dataclass(frozen=True, slots=True)
class Batch:
    """Which runs: seeds, or one fault at every moment (`every_moment`)."""

    first_seed: int
    num_seeds: int
    num_requests: int
    faults: bool
    every_moment: bool = False

    def runs_of(self, worker: int, num_workers: int) -> Iterator[Report]:
        """The share of one worker, run here."""
        if self.every_moment:
            all_strikes = (strike for in_place in (True, False) for strike in every_moment.strikes(in_place))
            for number, strike in enumerate(all_strikes):
                if number % num_workers == worker:
                    yield every_moment.run(strike)
            return
        for seed in range(self.first_seed + worker, self.first_seed + self.num_seeds, num_workers):
            yield Simulation(draw(seed, num_requests=self.num_requests, faults=self.faults)).run()


def run(batch: Batch, num_workers: int) -> Iterator[Report]:
    """Every run's report, as they end.

    Raises:
        BatonError: a worker process failed.
    """
    if num_workers == 1:
        yield from batch.runs_of(0, 1)
        return
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    workers = [_start(batch, worker, num_workers) for worker in range(num_workers)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            threading.Thread(target=_read, args=(worker.stdout, lines), daemon=True).start()
        num_open = len(workers)
        while num_open:
            line = lines.get()
            if line is None:
                num_open -= 1
            else:
                yield msgspec.json.decode(line, type=Report)
        for worker in workers:
            if worker.wait() != 0:
                raise BatonError(f"a simulation process ended with status {worker.returncode}; see above")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()


def _start(batch: Batch, worker: int, num_workers: int) -> subprocess.Popen[bytes]:
    given = msgspec.json.encode((batch, worker, num_workers)).decode()
    return subprocess.Popen(
        [sys.executable, "-m", "bench.simulator.batch", given],
        stdout=subprocess.PIPE,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a process per core: its threads would take others'
    )


def _read(stream: IO[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def main() -> None:
    """A worker process. Garbage is collected between runs: within one there is little."""
    parser = argparse.ArgumentParser()
    parser.add_argument("given")
    text = parser.parse_args().given
    batch, worker, num_workers = msgspec.json.decode(text, type=tuple[Batch, int, int])
    gc.disable()
    for number, report in enumerate(batch.runs_of(worker, num_workers), 1):
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()
        if number % _COLLECT_EVERY == 0:
            gc.collect()


if __name__ == "__main__":
    main()
