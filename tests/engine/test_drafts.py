"""The real engine under the decode scheduler: whatever is guessed, tokens and log-probabilities stay."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from bench.simulator.guesses import Guesses
from cluster.engine.batch import Row, Runner, SampleSpec, StepOutput, StepPlan
from cluster.engine.drafts import asked_of, sort_out, with_drafts
from cluster.engine.following import following_plan
from cluster.engine.model_spec import Dtype
from cluster.engine.runner import ModelRunner
from cluster.engine.sequence import Sequence, num_blocks_for
from cluster.engine.speculation import SpeculatingRunner
from cluster.ids import Attempt, BlockId, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import FinishReason, SamplingParams, TokenOutput
from decode_worker.scheduler import DecodeScheduler, DecodeSchedulerConfig
from kernels.cpu.backend import CpuBackend
from kernels.ops import row_size
from kernels.quantization import Quantization
from tests.engine.tiny_models import BLOCK_SIZE, VOCAB_SIZE, prompts

NUM_BLOCKS, MOST_TOKENS = 64, 24
LENGTHS = (70, 9, 120, 33, 1, 64, 20, 50)
Answers = dict[str, tuple[list[TokenOutput], FinishReason | None]]
PARAMS = [
    SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0),
    SamplingParams(max_tokens=MOST_TOKENS, temperature=0.9, seed=1, num_logprobs=3),
    SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0, repetition_penalty=1.3, num_logprobs=0),
    SamplingParams(
        max_tokens=MOST_TOKENS, temperature=0.7, seed=3, presence_penalty=0.7, frequency_penalty=0.4
    ),
    SamplingParams(max_tokens=MOST_TOKENS, temperature=0.3, seed=4, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(
        max_tokens=MOST_TOKENS,
        temperature=0.0,
        min_tokens=9,
        eos_token_ids=tuple(range(0, VOCAB_SIZE, 5)),
        bad_words_ids=((9,), (20, 30)),
    ),
    SamplingParams(max_tokens=7, temperature=1.0, seed=6, stop_token_ids=tuple(range(0, VOCAB_SIZE, 9))),
    SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0, logit_bias=((17, 30.0),), num_logprobs=1),
]


def serve(
    runner: Runner, *, speculates: bool, pause: int, num_blocks: int = NUM_BLOCKS
) -> tuple[Answers, int]:
    """Eight requests, `pause` steps apart, with steps that go on by themselves where they may; and how often
    one was preempted."""
    blocks = BlockManager(num_blocks, BLOCK_SIZE, "m")
    config = DecodeSchedulerConfig(max_chunk_tokens=40, speculates=speculates)
    scheduler = DecodeScheduler(config, blocks)
    answers: Answers = {}
    now = 0.0

    def book(output: Any, went_on: bool) -> None:
        nonlocal now
        now += 0.01
        for new in scheduler.account(output, now, went_on=went_on):
            outputs, reason = answers[new.sequence.request]
            assert reason is None, "a token after the last one"
            assert new.token_index == len(outputs), "a token twice, or one left out"
            answers[new.sequence.request] = [*outputs, *new.outputs], new.finish_reason

    def steps(most: int) -> None:
        """Up to `most` that were planned, and those that followed at once."""
        for _ in range(most):
            plan, tell = scheduler.plan(now), None
            while plan is not None:
                output = runner.run(plan, tell)
                plan = following_plan(plan, output) if scheduler.may_go_on() else None
                tell = partial(book, output, True)
                if plan is None:
                    book(output, False)

    for index, (prompt, params) in enumerate(zip(prompts(lengths=LENGTHS), PARAMS, strict=True)):
        sequence = Sequence(
            RouterId("r"), RequestId(f"q{index}"), Attempt(1), prompt, len(prompt), params, "", index, now
        )
        while not sequence.reserve(blocks, num_blocks_for(len(prompt) + 1, BLOCK_SIZE)):
            steps(1)
        answers[sequence.request] = [], None
        scheduler.add(sequence)
        steps(pause)
    steps(4 * MOST_TOKENS * len(LENGTHS))
    assert scheduler.num_sequences == 0
    blocks.check_integrity()
    assert blocks.counts().used == 0
    return answers, scheduler.num_preemptions


@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_dtype"),
    [
        (Dtype.FP32, Quantization.NONE, torch.float32),
        (Dtype.BF16, Quantization.NONE, torch.bfloat16),
        (Dtype.BF16, Quantization.INT8, torch.int8),
    ],
    ids=["fp32", "bf16", "int8"],
)
def test_tokens_are_equal_whatever_is_guessed(
    dtype: Dtype, quantization: Quantization, kv_dtype: torch.dtype, checkpoint: Any, prepare: Any
) -> None:
    backend = CpuBackend(2, quantization)
    prepared = prepare(checkpoint("llama").directory, dtype, backend)
    spec = prepared.spec

    def runner() -> ModelRunner:
        size = row_size(spec.head_dim, kv_dtype)
        pool = torch.full((NUM_BLOCKS, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, size), 80)
        return ModelRunner(prepared, pool.to(kv_dtype), backend)

    alone, _ = serve(runner(), speculates=False, pause=MOST_TOKENS + 5)  # each is done before the next comes
    assert {reason for _, reason in alone.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    texts = {
        f"q{index}": [*prompt, *(one.token_id for one in alone[f"q{index}"][0])]
        for index, prompt in enumerate(prompts(lengths=LENGTHS))
    }
    num_preemptions = 0
    tight = ((seed, 3, num_blocks) for seed, num_blocks in enumerate(range(10, 14)))
    for seed, pause, num_blocks in ((7, 0, NUM_BLOCKS), *tight, (8, MOST_TOKENS + 5, NUM_BLOCKS)):
        guesses = Guesses(random.Random(seed), lambda row: texts[row.request], VOCAB_SIZE)
        found, preempted = serve(
            SpeculatingRunner(runner(), guesses), speculates=True, pause=pause, num_blocks=num_blocks
        )
        assert found == alone
        assert 0 < guesses.num_right < guesses.num_drafted
        num_preemptions += preempted
    assert num_preemptions > 0


def test_what_holds_ends_at_the_first_wrong_guess_and_with_the_request() -> None:
    params = SamplingParams(max_tokens=9, eos_token_ids=(2,))
    row = Row(RequestId("a"), Attempt(1), (5,), 3, [BlockId(1)], SampleSpec(params, [1, 1], [4, 5]), end=16)
    chunk = Row(RequestId("b"), Attempt(1), (8, 8), 0, [BlockId(2)], None)

    def held(drafts: list[int], sampled: list[int]) -> list[int]:
        drafted = with_drafts(row, drafts)
        specs, positions = asked_of([chunk, drafted])
        assert positions == list(range(4, 5 + len(drafts)))
        assert [list(spec.output_ids) for spec in specs] == [
            [4, 5, *drafts[:count]] for count in range(len(drafts) + 1)
        ]
        outputs, further = sort_out([chunk, drafted], [TokenOutput(token) for token in sampled])
        assert outputs[0] is None
        assert outputs[1] is not None
        return [outputs[1].token_id, *(one.token_id for one in further.get(1, ()))]

    assert held([6, 7, 8], [6, 7, 8, 9]) == [6, 7, 8, 9]
    assert held([6, 7, 8], [6, 9, 8, 9]) == [6, 9]
    assert held([6, 7, 8], [9, 7, 8, 9]) == [9]
    assert held([6, 2, 8], [6, 2, 8, 9]) == [6, 2]  # ends there, though the guess was right
    assert held([6] * 8, [6] * 9) == [6] * 7  # with the ninth of nine


def test_drafts_are_not_part_of_what_a_step_is_followed_by() -> None:
    params = SamplingParams(max_tokens=9)
    row = Row(RequestId("a"), Attempt(1), (5,), 3, [BlockId(1)], SampleSpec(params, [1, 1], [4, 5]), end=8)
    plan = StepPlan((row,), longest_s=1.0)
    drafted = with_drafts(row, [6, 7, 8])
    for sampled, start in (([9, 0, 0, 0], 4), ([6, 7, 9, 0], 6), ([6, 7, 8, 9], 7)):
        outputs, further = sort_out([drafted], [TokenOutput(token) for token in sampled])
        following = following_plan(plan, StepOutput(outputs, 0.0, further=further))
        assert following is not None
        (next_row,) = following.rows
        assert (next_row.start, next_row.token_ids, next_row.end) == (start, (9,), 8)
        assert following.longest_s == 1.0
