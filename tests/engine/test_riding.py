"""The real engine under the decode scheduler: how prompts are cut, and beside what, changes no bit."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.engine.pace import Pace
from cluster.engine.sequence import Sequence, num_blocks_for
from cluster.ids import Attempt, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import SamplingParams, TokenOutput
from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from decode_worker.scheduler import DecodeScheduler, DecodeSchedulerConfig
from tests.engine.test_runner import make_runner
from tests.engine.tiny_models import BLOCK_SIZE, prompts

NUM_BLOCKS = 64
LENGTHS = (70, 9, 120, 33, 1, 64)
FAST = StepModel(1e-4, 1e-4, 1e-6, 0.0, 0.0)  # whole prompts fit
SLOW = StepModel(1e-3, 5e-3, 2e-3, 1e-6, 1e-7)  # a handful of tokens do


def serve(
    prepared: Any, machine: StepModel, most: int, pause: int
) -> tuple[dict[str, list[TokenOutput]], set[int]]:
    """Six requests, `pause` steps apart: what each got, and the lengths of the chunks that were computed."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, "m")
    scheduler = DecodeScheduler(DecodeSchedulerConfig(max_chunk_tokens=most), blocks)
    scheduler.book.pacer.calibrated(machine)
    runner = make_runner(prepared, num_blocks=NUM_BLOCKS)
    outputs: dict[str, list[TokenOutput]] = {}
    chunks: set[int] = set()
    now = 0.0

    def step() -> bool:
        nonlocal now
        plan = scheduler.plan(now)
        if plan is None:
            return False
        chunks.update(len(row.token_ids) for row in plan.rows)
        output = runner.run(plan)
        now += 0.02
        for new in scheduler.account(output, now):
            outputs[new.sequence.request] += new.outputs
        return True

    for index, prompt in enumerate(prompts(lengths=LENGTHS)):
        params = SamplingParams(max_tokens=12, seed=index, temperature=0.5 * (index % 3), num_logprobs=1)
        pace = Pace(Targets(2.0, 0.03), now + 2.0, is_batch=index == 3)
        sequence = Sequence(
            RouterId("r"),
            RequestId(f"q{index}"),
            Attempt(1),
            prompt,
            len(prompt),
            params,
            "",
            index,
            now,
            pace,
        )
        assert sequence.reserve(blocks, num_blocks_for(len(prompt) + 12, BLOCK_SIZE))
        outputs[sequence.request] = []
        scheduler.add(sequence)
        for _ in range(pause):
            step()
    while step():
        pass
    assert blocks.counts().used == 0
    return outputs, chunks


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_are_equal_with_and_without_riding_chunks(family: str, checkpoint: Any, prepare: Any) -> None:
    prepared = prepare(checkpoint(family).directory)
    alone, whole = serve(prepared, FAST, 512, 40)  # each is done before the next comes
    assert {70, 120} <= whole
    for machine, most, pause in ((SLOW, 512, 3), (FAST, 512, 0), (FAST, 5, 1), (SLOW, 7, 0)):
        outputs, chunks = serve(prepared, machine, most, pause)
        assert outputs == alone
        assert 120 not in chunks or machine is FAST
