"""How long the live router takes to decide: `python -m bench.placement [--workers 1000] [--blocks 1000000]`.

The policy is the live one: above some number of workers it decides in cells (`router.cells`).

1. A router's book is filled: workers of both roles under load, and an index of as many cached blocks. Every
   worker has a system prompt's blocks, each conversation is on one to three of them.
2. Requests come: new ones behind a system prompt, and next turns of conversations. Each decision is timed
   alone (`decide`), and so is what it writes: claims on both workers, and their end (`claim`, `release`).
   Heartbeats and cache reports come between them, as they would (`heartbeat`, `report`).
3. The percentiles are printed, and written with `--out`. Exit code 1: a decision's p99 is above `--limit-us`.

One process, nothing else measured. Garbage is collected as in the live router, which freezes what it has
loaded. On a busy machine the slowest calls are those in which the kernel gave the core to somebody else: they
are counted (`lost`), and the p99 of the others is told beside the p99 of all, by which it is judged.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.machine import cpu_facts
from cluster.ids import BlockHash, Epoch, RequestId, WorkerId
from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from cluster.wire.kv_events import KvEvents
from cluster.wire.messages import KVGeometry, Register, Role, WorkerLoad, WorkerState
from router.cell_policy import InCells
from router.claims import Claim, Phase
from router.config import PolicyConfig
from router.policy import Elastic, Placement, PlacementRequest
from router.worker_book import WorkerBook

BLOCK_TOKENS = 32
SYSTEM_BLOCKS = 32  # of each system prompt
NUM_SYSTEMS = 8
CHAT_BLOCKS = 64  # of a conversation, beyond its system prompt
NUM_BLOCKS = 20_000  # of each worker
TARGETS = Targets(2.0, 0.1)
GAP_S = 1e-3  # between requests, as the policy is told
MODELS = (
    StepModel(0.9e-3, 5.0e-3, 19.1e-6, 46.8e-9, 1.05e-9),
    StepModel(0.9e-3, 4.2e-3, 128e-6, 39.2e-9, 7e-9),
)

T = TypeVar("T")


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}
        self._kept: dict[str, list[bool]] = {}  # the core, all the time

    def timed(self, name: str, call: Callable[..., T], *arguments: Any) -> T:
        lost = _cores_lost()
        started = time.perf_counter()
        result = call(*arguments)
        self.samples.setdefault(name, []).append(time.perf_counter() - started)
        self._kept.setdefault(name, []).append(_cores_lost() == lost)
        return result

    def summary(self) -> dict[str, dict[str, float]]:
        """Microseconds."""
        table = {}
        for name, seconds in self.samples.items():
            p50, p90, p99 = np.percentile(seconds, (50, 90, 99)) * 1e6
            kept = np.array(seconds)[self._kept[name]]
            table[name] = {
                "num": len(seconds),
                "mean_us": float(np.mean(seconds) * 1e6),
                "p50_us": float(p50),
                "p90_us": float(p90),
                "p99_us": float(p99),
                "max_us": max(seconds) * 1e6,
                "lost": len(seconds) - len(kept),
                "p99_kept_us": float(np.percentile(kept, 99) * 1e6) if len(kept) else 0.0,
            }
        return table


def _cores_lost() -> int:
    """How often this thread's core was taken from it."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class Site:
    """A router's book in the middle of a busy day."""

    def __init__(self, num_workers: int, num_blocks: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self._kinds: dict[WorkerId, int] = {}  # which model
        self.book = WorkerBook(stall_timeout_s=1e9)
        self.workers = [self._join(index, index < num_workers // 4) for index in range(num_workers)]
        self.systems = [self._chain(SYSTEM_BLOCKS) for _ in range(NUM_SYSTEMS)]
        self.chats: list[tuple[BlockHash, ...]] = []
        self._sequences = dict.fromkeys(self.workers, 0)
        cached: dict[WorkerId, list[BlockHash]] = {worker: [] for worker in self.workers}
        for system in self.systems:
            for worker in self.workers:
                cached[worker] += system
        for _ in range(max(1, (num_blocks - NUM_SYSTEMS * SYSTEM_BLOCKS) // CHAT_BLOCKS)):
            chat = (*self.rng.choice(self.systems), *self._chain(CHAT_BLOCKS))
            self.chats.append(chat)
            for worker in self.rng.sample(self.workers, self.rng.choice((1, 1, 2, 3))):
                cached[worker] += chat[SYSTEM_BLOCKS:]
        for worker, hashes in cached.items():
            self.book.cache_changed(worker, self._events(worker, hashes, begins=True))
        for worker in self.workers:
            self.heartbeat(worker)

    def _chain(self, length: int) -> tuple[BlockHash, ...]:
        return tuple(BlockHash(self.rng.randbytes(16)) for _ in range(length))

    def _join(self, index: int, is_prefill: bool) -> WorkerId:
        role = Role.PREFILL if is_prefill else Role.DECODE
        worker = WorkerId(f"{role.value}-{index}")
        geometry = KVGeometry(
            first_layer=0,
            num_layers=32,
            first_head=0,
            num_heads=8,
            head_dim=128,
            block_size=BLOCK_TOKENS,
            num_blocks=NUM_BLOCKS,
            dtype="bfloat16",
        )
        register = Register(
            worker=worker,
            role=role,
            epoch=Epoch(1),
            pid=1,
            model="bench",
            fingerprint="bench/1",
            max_model_len=200_000,
            max_num_seqs=256,
            geometry=geometry,
            kv_address=None if is_prefill else "tcp:127.0.0.1:1",
        )
        self.book.join(register, 0.0)
        self._kinds[worker] = index % len(MODELS)
        return worker

    def heartbeat(self, worker: WorkerId) -> None:
        rng = self.rng
        load = WorkerLoad(
            running=rng.randrange(100),
            queued_prefill_tokens=rng.randrange(20_000),
            blocks_used=rng.randrange(NUM_BLOCKS // 2),
            steps=rng.randrange(10**6),
            step_model=MODELS[self._kinds[worker]],
            on_time_prefill_s=rng.random() * 0.5,
            late_prefill_s=rng.random() * 0.1,
            queued_load_s=rng.random() * 2e-3,
            decode_rows=rng.randrange(100),
            decode_context=rng.randrange(150_000),
            coming_rows=rng.randrange(5),
            coming_context=rng.randrange(5_000),
            row_life_s=10.0,
        )
        self.book.heartbeat(worker, WorkerState.READY, load, 0.0)

    def _events(self, worker: WorkerId, hashes: Sequence[BlockHash], *, begins: bool) -> KvEvents:
        events = KvEvents(sequence=self._sequences[worker], begins=begins, stored=list(hashes), removed=[])
        self._sequences[worker] += 1
        return events

    def report(self, worker: WorkerId) -> None:
        """A conversation's blocks enter a cache."""
        self.book.cache_changed(worker, self._events(worker, self.rng.choice(self.chats), begins=False))

    def request(self) -> PlacementRequest:
        """A new conversation, or the next turn of one."""
        if self.rng.random() < 0.5:
            hashes = (*self.rng.choice(self.systems), *self._chain(self.rng.randrange(1, 100)))
        else:
            hashes = (*self.rng.choice(self.chats), *self._chain(self.rng.randrange(1, 20)))
        num_tokens = len(hashes) * BLOCK_TOKENS + self.rng.randrange(BLOCK_TOKENS)
        return PlacementRequest(
            num_tokens=num_tokens,
            num_prompt_tokens=num_tokens,
            max_tokens=500,
            hashes=hashes,
            targets=TARGETS,
            expected_output=200.0,
            max_wait_s=30.0,
        )

    def claim(self, name: str, request: PlacementRequest, placement: Placement) -> None:
        """As the conductor enters an attempt."""
        prompt = Claim(
            Phase.PREFILL,
            request.num_tokens,
            new_tokens=placement.prefill_tokens,
            num_blocks=placement.prefill_blocks or placement.decode_blocks,
            stays=placement.prefill is None,
            hashes=tuple(request.hashes),
            sent_at=0.0,
        )
        self.book.place(placement.prefill or placement.decode, RequestId(name), prompt)
        if placement.prefill is not None:
            claim = Claim(
                Phase.COMING,
                request.num_tokens,
                num_blocks=placement.decode_blocks,
                hashes=tuple(request.hashes),
            )
            self.book.place(placement.decode, RequestId(name), claim)

    def release(self, name: str, placement: Placement) -> None:
        for worker in {placement.prefill or placement.decode, placement.decode}:
            self.book.remove(worker, RequestId(name))


def measure(num_workers: int, num_blocks: int, num_decisions: int, seed: int) -> dict[str, Any]:
    started = time.perf_counter()
    site = Site(num_workers, num_blocks, seed)
    config = PolicyConfig()
    policy = InCells(Elastic(config, TARGETS), config.cells)
    view, watch = site.book.view(), Stopwatch()
    built_s = time.perf_counter() - started
    running: list[tuple[str, Placement]] = []
    kinds = {"local": 0, "remote": 0, "rejected": 0}
    for index in range(num_decisions):
        request = site.request()
        decision = watch.timed("decide", policy.place, view, request, index * GAP_S)
        if isinstance(decision, Placement):
            kinds["local" if decision.prefill is None else "remote"] += 1
            name = f"r{index}"
            watch.timed("claim", site.claim, name, request, decision)
            running.append((name, decision))
        else:
            kinds["rejected"] += 1
        if len(running) > 10 * num_workers:
            ended = running.pop(site.rng.randrange(len(running)))
            watch.timed("release", site.release, *ended)
        worker = site.rng.choice(site.workers)
        watch.timed("heartbeat", site.heartbeat, worker)
        if index % 4 == 0:
            watch.timed("report", site.report, worker)
    return {
        "workers": num_workers,
        "cells": policy.num_cells,
        "indexed_blocks": len(view.prefix),
        "decisions": num_decisions,
        "seed": seed,
        "built_s": built_s,
        "placed": kinds,
        "times": watch.summary(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="distinct cached blocks in the index")
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-us", type=float, default=200.0, help="p99 of a decision, at most")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    gc.collect()
    gc.freeze()  # as `router.service` does when it has started
    result = measure(given.workers, given.blocks, given.decisions, given.seed)
    gc.unfreeze()
    print(
        f"{result['workers']} workers in {result['cells']} cells, {result['indexed_blocks']} indexed blocks, "
        f"{result['placed']}"
    )
    keys = ("mean", "p50", "p90", "p99", "max", "p99_kept")
    print(f"{'':<10}{'num':>8}" + "".join(f"{key:>10}" for key in keys) + f"{'lost':>8}  microseconds")
    for name, row in result["times"].items():
        figures = "".join(f"{row[f'{key}_us']:>10.1f}" for key in keys)
        print(f"{name:<10}{row['num']:>8}{figures}{row['lost']:>8}")
    if given.out is not None:
        result["cpu"], result["isa"] = cpu_facts()
        given.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(result["times"]["decide"]["p99_us"] > given.limit_us)


if __name__ == "__main__":
    sys.exit(main())
