"""What a worker's seconds are worth as prefill: the share of recent prompts that it could have in time."""

import numpy as np
import pytest

from cluster.step_model import StepModel
from router.fleet import Fleet
from router.prompt_lengths import EVERY, FIRST, LEAST_SHARE, MEMORY, PromptLengths

FAST = StepModel(0.0, 0.0, 1e-3, 0.0, 0.0)
SLOW = StepModel(0.0, 0.0, 4e-3, 0.0, 0.0)


def test_a_sample_comes_soon_then_now_and_then_and_forgets() -> None:
    prompts = PromptLengths()
    at = [index for index in range(1, 3 * EVERY + 1) if prompts.add(100) is not None]
    assert at == [FIRST, EVERY, 2 * EVERY, 3 * EVERY]
    samples = [prompts.add(9_000) for _ in range(MEMORY)]
    last = [sample for sample in samples if sample is not None][-1]
    assert last.min() == last.max() == 9_000


def test_worth_is_the_share_of_prompts_that_an_idle_worker_has_in_time() -> None:
    fleet = Fleet([FAST, SLOW], [1e6] * 2, [1e9] * 2)
    assert fleet.worth.tolist() == [1.0, 1.0]
    assert fleet.least() == (0.0, 1.0)
    fleet.expect(np.array([10.0, 20.0, 400.0, 500.0]), 0.1, 0.05)  # SLOW: 0.04, 0.08, 1.6 and 2 s
    assert fleet.worth.tolist() == pytest.approx([0.5, (1 + 0.8) / 4])
    assert fleet.least() == (0.0, fleet.worth[1])
    fleet.expect(np.array([1e6]), 0.1, 0.05)
    assert fleet.worth.tolist() == [LEAST_SHARE] * 2


def test_who_joins_and_who_leaves_is_worth_what_is_known() -> None:
    fleet = Fleet([FAST], [1e6], [1e9])
    fleet.expect(np.array([10.0, 1e6]), 0.1, 0.05)
    fleet.resize(3)
    assert fleet.worth.tolist() == [0.5, 1.0, 1.0]
    fleet.set_model(1, SLOW)
    assert fleet.worth[1] == 0.5
    fleet.clear(1)
    fleet.expect(np.array([1e6]), 0.1, 0.05)
    assert fleet.worth.tolist() == [LEAST_SHARE, 1.0, 1.0]


def test_haste_is_of_those_that_first_tokens_need() -> None:
    fleet = Fleet([FAST, FAST, SLOW], [1e6] * 3, [1e9] * 3)
    fleet.expect(np.array([40.0, 60.0]), 0.1, 0.05)  # FAST: 0.04 and 0.06 s, or twice as long and 25 ms
    busy = (2 - 1.5 * 1.05) / 2  # of the shorter ones a part, of the others none
    assert fleet.haste.tolist() == pytest.approx([1 - busy, 1 - busy, 0.0])
    fleet.expect(np.array([4.0, 6.0]), 0.1, 0.05)
    assert fleet.haste.tolist() == [0.0] * 3
