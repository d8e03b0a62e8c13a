"""Breaks one rule of the protocol at a time and lets the simulator find it: does it see what it is there to see?

Each mutation replaces methods of the live classes while its runs last. A mutation that no seed reveals means that
the simulator is blind there, and the command fails: `python -m bench.simulator.mutations [--seeds N]`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.simulator.scenario import draw
from bench.simulator.simulation import Simulation
from cluster.block_hash import root_hash
from cluster.engine.fence import AttemptFence
from cluster.engine.sequence import Sequence as TokenSequence
from cluster.kv import prefix
from cluster.wire.messages import KvClosed
from decode_worker.intake import Intake
from decode_worker.lease import Lease, LeaseState
from decode_worker.scheduler import DecodeScheduler
from prefill_worker.attempts import AttemptTable
from prefill_worker.handoff import Handoff, HandoffState
from router.attempt import AttemptRecord, LiveRequest, Order
from router.leases import LeaseKeeper
from router.legs import Legs

DEFAULT_SEEDS = 100
REQUESTS_PER_SEED = 150


@dataclass(frozen=True, slots=True)
class Mutation:
    """`patches`: (owner, attribute, replacement)."""

    name: str
    patches: Sequence[tuple[Any, str, Any]]


@dataclass(frozen=True, slots=True)
class Found:
    """The first seed that reveals a mutation, and how."""

    seed: int
    violation: str


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The classes are broken inside, and whole again after it."""
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in mutation.patches]
    try:
        for owner, name, replacement in mutation.patches:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def find(mutation: Mutation, seeds: Sequence[int]) -> Found | None:
    """Run seeds, with faults, until one shows a violation."""
    with applied(mutation):
        for seed in seeds:
            report = Simulation(draw(seed, num_requests=REQUESTS_PER_SEED, faults=True)).run()
            if report.violation is not None:
                return Found(seed, report.violation)
    return None


# ---- the broken rules ----------------------------------------------------------------------------


def _any_attempt(original: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: Legs, worker: Any, live: LiveRequest, message: Any, now: float) -> Any:
        attempt = live.attempt
        if attempt is None:
            return original(self, worker, live, message, now)
        number, attempt.number = attempt.number, message.attempt
        try:
            return original(self, worker, live, message, now)
        finally:
            attempt.number = number

    return take


def _restart_proves_death(original: Callable[..., Any]) -> Callable[..., Any]:
    def edge_up(self: Intake, peer: Any, in_place: bool) -> Any:
        for lease in list(self._leases.values()):
            if lease.writer is not None and lease.writer.worker == peer.worker:
                lease.writer_may_write = False
                self._settle(lease)
        return original(self, peer, in_place)

    return edge_up


def _broken_stream_proves_death(original: Callable[..., Any]) -> Callable[..., Any]:
    def edge_down(self: Intake, peer: Any) -> None:
        for lease in self._leases.values():
            if lease.writer == peer:
                lease.writer_may_write = False
        original(self, peer)

    return edge_down


def _release_before_sent(original: Callable[..., Any]) -> Callable[..., Any]:
    def settle(self: AttemptTable, attempt: Any) -> None:
        if attempt.over and attempt.handoff.state is HandoffState.CLOSING:
            attempt.handoff.edge_down()
        original(self, attempt)

    return settle


def _release_before_ack(self: Handoff, token: Any, now: float) -> Any:
    sequence = self._sequence
    actions = _SAMPLED(self, token, now)
    if self.state is HandoffState.STREAMING:
        kept, blocks = list(sequence.block_ids), _blocks_of(self)
        if blocks is not None:
            blocks.release(kept)
            blocks.fork([])
    return actions


def _start_early(original: Callable[..., Any]) -> Callable[..., Any]:
    def start_if_complete(self: Intake, lease: Lease, now: float) -> Any:
        missing, lease.num_missing = lease.num_missing, 0
        receives, lease.receives = lease.receives, {}
        try:
            return original(self, lease, now)
        finally:
            lease.num_missing, lease.receives = missing, receives

    return start_if_complete
