import random

import pytest

from cluster.sampling import SamplingParams
from tests.support.simulated_pair import SimulatedPair


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("seed", range(200))
def test_smoke(in_place, seed):
    rng = random.Random(seed)
    pair = SimulatedPair(in_place=in_place)
    for i in range(8):
        pair.router.submit(
            [rng.randrange(50) for _ in range(rng.randrange(1, 40))],
            SamplingParams(max_tokens=rng.randrange(1, 12), seed=i, eos_token_ids=(0,)),
            local=rng.random() < 0.3,
        )
    pair.settle(rng.randrange)
    pair.check_quiet()
    assert all(t.outcome == "done" for t in pair.router.requests.values())
