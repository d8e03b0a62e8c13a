"""A decode scheduler with a scripted runner and a clock.

Every request's KV and tokens are checked against its oracle; a step takes what a given machine takes for it.
"""

from __future__ import annotations

from typing import Any

from cluster.engine.batch import StepOutput, StepPlan
from cluster.engine.pace import Pace
from cluster.engine.sequence import Sequence, num_blocks_for
from cluster.ids import Attempt, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import SamplingParams
from cluster.slo_classes import DEFAULT_TARGETS, Targets
from cluster.step_model import StepModel, StepWork, chunk_attention
from decode_worker.decode_step import Generated
from decode_worker.scheduler import DecodeScheduler, DecodeSchedulerConfig
from tests.support.scripted_model import EOS, Oracle, ScriptedRunner, TagPool


class DecodeBench:
    """`machine`: how long steps really take; None: no time passes."""

    def __init__(
        self, num_blocks: int, block_size: int = 4, *, machine: StepModel | None = None, **config: Any
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size, "m")
        self.scheduler = DecodeScheduler(DecodeSchedulerConfig(**config), self.blocks)
        self.machine = machine
        self.now = 0.0
        self.oracles: dict[RequestId, Oracle] = {}
        self.runner = ScriptedRunner(TagPool(num_blocks, block_size), self.oracles)
        self.tokens: dict[str, list[int]] = {}
        self.times: dict[str, list[float]] = {}  # when each token came
        self.work: StepWork = StepWork(0)  # of the latest step
        self.order = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        growth: int = 1,
        ready: bool = True,
        targets: Targets = DEFAULT_TARGETS,
        is_batch: bool = False,
    ) -> Sequence | None:
        """`ready`: its KV came from elsewhere, token 0 with it. None: there are no blocks for it."""
        self.order += 1
        params = SamplingParams(
            max_tokens=max_tokens, seed=self.order, eos_token_ids=(EOS,), min_tokens=max_tokens
        )
        request = RequestId(f"q{self.order}")
        oracle = Oracle(tuple(prompt), params)
        pace = Pace(targets, self.now + targets.ttft_s, is_batch=is_batch)
        sequence = Sequence(
            RouterId("r"), request, Attempt(1), prompt, len(prompt), params, "", self.order, self.now, pace
        )
        size = self.blocks.block_size
        if not sequence.reserve(
            self.blocks, num_blocks_for(len(prompt), size) + growth, leave_last=not ready
        ):
            return None
        self.oracles[request] = oracle
        self.tokens[request], self.times[request] = [], []
        if ready:
            for position in range(len(prompt)):
                self.runner.pool.write(sequence.block_ids, position, oracle.tags[position])
            sequence.num_computed = len(prompt)
            sequence.publish(self.blocks)
            sequence.append(oracle.outputs[0].token_id)
            pace.first_token(self.now)
            self._note(request, oracle.outputs[0].token_id)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Generated] | None:
        """The next step, from its plan to its tokens; None: there is nothing to compute."""
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return None
        self.runner.begin(plan)
        self.work = work_of(plan)
        output = self.runner.finish(plan)
        if self.machine is not None:
            seconds = self.machine.step_s(self.work)
            self.now += seconds
            output = StepOutput(output.outputs, seconds)
        new = self.scheduler.account(output, self.now)
        for one in new:
            assert one.token_index == len(self.tokens[one.sequence.request]), "a token twice, or one left out"
            for output in one.outputs:
                self._note(one.sequence.request, output.token_id)
        self.blocks.check_integrity()
        return new

    def run(self, most_steps: int = 3000) -> None:
        """Until nothing is left; every token is as it should be."""
        for _ in range(most_steps):
            if self.step() is None:
                break
        assert self.scheduler.num_sequences == 0, "locked up"
        for request, oracle in self.oracles.items():
            assert self.tokens[request] == [output.token_id for output in oracle.outputs]
        assert self.blocks.counts().used == 0

    def tpot_s(self, request: str) -> float:
        """Mean time per token after the first."""
        times = self.times[request]
        return (times[-1] - times[0]) / max(1, len(times) - 1)

    def _note(self, request: RequestId, token: int) -> None:
        self.tokens[request].append(token)
        self.times[request].append(self.now)


def work_of(plan: StepPlan) -> StepWork:
    """As a machine sees it: rows of one token decode."""
    context = sum(row.start + 1 for row in plan.rows if len(row.token_ids) == 1)
    pairs = sum(chunk_attention(row.start, len(row.token_ids)) for row in plan.rows if len(row.token_ids) > 1)
    return StepWork(plan.num_tokens, context, pairs)
