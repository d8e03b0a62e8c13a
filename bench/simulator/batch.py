"""Many runs on several cores: one process per core, results as JSON lines, in any order.

1. Runs have numbers. They lie in one pipe from which every worker process (`python -m bench.simulator.batch`)
   takes the next when it is done with one: a core that something else needs gets fewer, and all end together.
2. A worker prints one `Report` per run as it ends; the parent yields them.
3. A worker that fails ends the batch with its words: a violation is a report, everything else is a bug here.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import msgspec

from bench.simulator import every_moment
from bench.simulator.scenario import draw
from bench.simulator.simulation import Report, Simulation
from cluster.errors import BatonError

_COLLECT_EVERY = 10  # runs
_NUMBER_BYTES = 4  # of a run, in the pipe: few enough to be written and read as one


@dataclass(frozen=True, slots=True)
class Batch:
    """Which runs: seeds, or one fault at every moment (`every_moment`)."""

    first_seed: int
    num_seeds: int
    num_requests: int
    faults: bool
    every_moment: bool = False

    def runs(self, numbers: Iterator[int]) -> Iterator[Report]:
        """Those with these numbers, which rise, as far as there are so many; run here."""
        if self.every_moment:
            all_strikes = (strike for in_place in (True, False) for strike in every_moment.strikes(in_place))
            wanted = next(numbers, None)
            for number, strike in enumerate(all_strikes):
                if number == wanted:
                    yield every_moment.run(strike)
                    wanted = next(numbers, None)
            return
        for number in itertools.takewhile(lambda number: number < self.num_seeds, numbers):
            scenario = draw(self.first_seed + number, num_requests=self.num_requests, faults=self.faults)
            yield Simulation(scenario).run()


def run(batch: Batch, num_workers: int) -> Iterator[Report]:
    """Every run's report, as they end.

    Raises:
        BatonError: a worker process failed.
    """
    if num_workers == 1:
        yield from batch.runs(itertools.count())
        return
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    numbers, into = os.pipe()
    workers = [_start(batch, numbers) for _ in range(num_workers)]
    os.close(numbers)
    threading.Thread(target=_write_numbers, args=(into,), daemon=True).start()
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


def _start(batch: Batch, numbers: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.simulator.batch", msgspec.json.encode(batch).decode()],
        stdin=numbers,
        stdout=subprocess.PIPE,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a process per core: its threads would take others'
    )


def _write_numbers(into: int) -> None:
    """One after the other, until no worker is left to read them."""
    with suppress(BrokenPipeError), open(into, "wb", buffering=0) as pipe:
        for number in itertools.count():
            pipe.write(number.to_bytes(_NUMBER_BYTES, "big"))


def _read_numbers(pipe: int) -> Iterator[int]:
    while number := os.read(pipe, _NUMBER_BYTES):
        yield int.from_bytes(number, "big")


def _read(stream: IO[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def main() -> None:
    """A worker process. Garbage is collected between runs: within one there is little, in modules none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("given")
    batch = msgspec.json.decode(parser.parse_args().given, type=Batch)
    gc.disable()
    gc.freeze()
    for number, report in enumerate(batch.runs(_read_numbers(sys.stdin.fileno())), 1):
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()
        if number % _COLLECT_EVERY == 0:
            gc.collect()


if __name__ == "__main__":
    main()
