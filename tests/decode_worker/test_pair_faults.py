"""Random interleavings and faults over both cores; see `tests.support.simulated_pair` for what is checked."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support import chaos
from tests.support.simulated_pair import SimulatedPair


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "staged"])
@pytest.mark.parametrize("seed", range(15))
def test_random_faults(seed: int, in_place: bool) -> None:
    chaos.run(seed, in_place=in_place)


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "staged"])
@pytest.mark.parametrize("fault", chaos.FAULTS)
def test_one_kind_of_fault_alone(fault: str, in_place: bool) -> None:
    for seed in range(2):
        chaos.run(1000 + seed, in_place=in_place, faults=(fault,))


class PairMachine(RuleBasedStateMachine):
    """Hypothesis chooses what happens next; after each example everything must become quiet and exact."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)
        self.pair: SimulatedPair | None = None

    @initialize(seed=st.integers(0, 1000), in_place=st.booleans())
    def start(self, seed: int, in_place: bool) -> None:
        self.rng = random.Random(seed)
        self.pair = chaos.build(self.rng, in_place=in_place)

    @rule()
    def submit(self) -> None:
        assert self.pair is not None
        chaos.submit(self.pair, self.rng)

    @precondition(lambda self: self.pair is not None and self.pair.pending())
    @rule(choices=st.lists(st.integers(0, 30), min_size=1, max_size=15))
    def happen(self, choices: list[int]) -> None:
        assert self.pair is not None
        for choice in choices:
            if ops := self.pair.pending():
                self.pair.do(ops[choice % len(ops)])

    @rule(fault=st.sampled_from(chaos.FAULTS))
    def disturb(self, fault: str) -> None:
        assert self.pair is not None
        chaos.disturb(self.pair, self.rng, (fault,))
        self.pair.check()

    def teardown(self) -> None:
        if self.pair is not None:
            chaos.calm(self.pair, self.rng)


TestPairMachine = PairMachine.TestCase
TestPairMachine.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
