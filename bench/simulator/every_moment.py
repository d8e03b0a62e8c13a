"""One fault at every moment there is: a small run, struck once before each of its events, in every way.

1. `num_moments` counts the events of the undisturbed run: each delivery, step, write, timer.
2. `strikes` names every (moment, kind, target); `run` simulates one of them.
3. One fault among two workers of each role loses nothing: each request ends with exactly its tokens, unless
   its router crashed or its client left.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.simulator.scenario import BLOCK_BYTES, Scenario
from bench.simulator.simulation import LONGEST_S, Report, Simulation
from bench.simulator.verdict import Outcome
from bench.simulator.violation import Violation
from decode_worker.core import DecodeConfig
from prefill_worker.core import PrefillConfig
from router.config import ConductorConfig, PolicyConfig

# Kinds that change what happens at a moment; the others only change how long things take.
KINDS = (
    "crash prefill",
    "crash decode",
    "crash router",
    "hang prefill",
    "cut off prefill",
    "hang decode",
    "hang router",
    "hang, then kill",
    "hang, replaced",
    "drain and restart",
    "cut control stream",
    "cut KV stream",
    "delay KV stream",
    "duplicate",
    "failed step",
    "clock jump",
    "client abort",
)
_ALLOWED = {Outcome.EXACT.value, Outcome.STOPPED.value, Outcome.LEFT.value, Outcome.ROUTER_CRASHED.value}


@dataclass(frozen=True, slots=True)
class Strike:
    """`choice`: which of the targets there are at that moment."""

    in_place: bool
    moment: int
    kind: str
    choice: int

    def __str__(self) -> str:
        edge = "in place" if self.in_place else "staged"
        return f"{self.kind} at event {self.moment}, target {self.choice}, {edge}"


def small(in_place: bool) -> Scenario:
    """Two workers of each role, three clients, prompts of several pieces."""
    return Scenario(
        seed=7,
        num_requests=5,
        num_clients=3,
        think_s=0.0,
        num_routers=1,
        num_prefill=2,
        num_decode=2,
        in_place=in_place,
        block_size=4,
        prefill_blocks=16,
        decode_blocks=16,
        max_prompt_tokens=16,
        max_new_tokens=6,
        prefill=PrefillConfig(block_bytes=BLOCK_BYTES, max_step_tokens=8, max_piece_bytes=BLOCK_BYTES),
        decode=DecodeConfig(block_bytes=BLOCK_BYTES, max_num_seqs=4, max_chunk_tokens=4),
        conductor=ConductorConfig(
            lease_ttl_s=2.0,
            reserve_timeout_s=1.0,
            prefill_timeout_s=6.0,
            policy=PolicyConfig(growth_tokens=2),
        ),
    )


def num_moments(in_place: bool) -> int:
    """Events of the undisturbed run until its last request has ended."""
    simulation = Simulation(small(in_place))
    simulation.run()
    assert simulation.num_events_at_end is not None
    return simulation.num_events_at_end


def strikes(in_place: bool, kinds: Sequence[str] = KINDS) -> Iterator[Strike]:
    """All there are, moment by moment."""
    for moment in range(num_moments(in_place)):
        targets = _count_targets(in_place, moment, kinds)
        for kind in kinds:
            for choice in range(targets[kind]):
                yield Strike(in_place, moment, kind, choice)


def run(strike: Strike) -> Report:
    """One struck run; what a single fault may not lose is a violation."""
    simulation = Simulation(small(strike.in_place), fault_rng=random.Random(str(strike)))
    simulation.injector.strike_at(strike.moment, strike.kind, strike.choice)
    report = replace(simulation.run(), label=str(strike))
    lost = {outcome: count for outcome, count in report.outcomes.items() if count and outcome not in _ALLOWED}
    if report.violation is None and lost:
        return replace(report, violation=str(Violation("end", f"a single fault lost requests: {lost}")))
    return report


def _count_targets(in_place: bool, moment: int, kinds: Sequence[str]) -> dict[str, int]:
    simulation = Simulation(small(in_place))
    counts: dict[str, int] = {}

    def count() -> None:
        counts.update({kind: simulation.injector.num_targets(kind) for kind in kinds})
        simulation.site.queue.stop()

    simulation.site.queue.alarm(moment, count)
    simulation.begin()
    simulation.site.queue.run(LONGEST_S)
    return counts
