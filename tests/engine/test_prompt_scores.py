"""Log-probabilities of a prompt: the model's own, whatever the chunks, and never with a part left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.engine.batch import Row, SampleSpec, StepPlan
from cluster.engine.runner import ModelRunner
from cluster.engine.sampler import with_logprobs
from cluster.engine.sequence import Sequence
from cluster.ids import Attempt, BlockId, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import PromptScore, SamplingParams, TokenOutput
from kernels.ops import row_size
from kernels.reference import ReferenceBackend
from tests.engine.tiny_models import BLOCK_SIZE, prompts

BLOCKS = [BlockId(block) for block in range(40)]


@pytest.fixture
def runner(checkpoint: Any, prepare: Any) -> ModelRunner:
    prepared = prepare(checkpoint("llama").directory)
    spec = prepared.spec
    size = row_size(spec.head_dim, torch.float32)
    pool = torch.zeros(64, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, size)
    return ModelRunner(prepared, pool, ReferenceBackend())


def params_of(num_best: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=num_best)


def scores_of(runner: ModelRunner, prompt: list[int], chunks: list[int], num_best: int) -> TokenOutput:
    """The first token of a prompt that is computed in chunks of these sizes."""
    spec = SampleSpec(params_of(num_best), prompt, [])
    start = 0
    for size in chunks:
        end = start + size
        row = Row(
            RequestId("r"),
            Attempt(1),
            prompt[start:end],
            start,
            BLOCKS,
            spec if end == len(prompt) else None,
            spec if start + 1 < len(prompt) else None,
        )
        [output] = runner.run(StepPlan(rows=(row,))).outputs
        start = end
    assert output is not None
    return output


def expected_scores(runner: ModelRunner, prompt: list[int], num_best: int) -> tuple[PromptScore, ...]:
    """One token at a time, by the definition."""
    scores: list[PromptScore] = []
    for position, following in enumerate(prompt[1:]):
        spec = SampleSpec(params_of(None), prompt, [])
        row = Row(RequestId("e"), Attempt(1), [prompt[position]], position, BLOCKS, spec)
        batch = runner._packer.pack([row])
        logits = runner.decoder.logits(runner.decoder.hidden(batch, runner._pool))
        output = with_logprobs(logits[0].numpy(), following, num_best)
        assert output.logprob is not None
        every = with_logprobs(logits[0].numpy(), following, logits.shape[1]).top_logprobs
        order = [token_id for token_id, _ in every]
        scores.append(PromptScore(output.logprob, output.top_logprobs, 1 + order.index(following)))
    return tuple(scores)


@pytest.mark.parametrize("num_best", [0, 3])
def test_scores_are_the_models_own_whatever_the_chunks(runner: ModelRunner, num_best: int) -> None:
    [prompt] = prompts(lengths=(70,))
    with torch.inference_mode():
        expected = expected_scores(runner, prompt, num_best)
    for chunks in ([70], [1] * 70, [33, 37], [69, 1], [32, 32, 6]):
        output = scores_of(runner, prompt, chunks, num_best)
        assert output.prompt_scores == expected, chunks
    plain = SampleSpec(params_of(None), prompt, [])
    row = Row(RequestId("p"), Attempt(1), prompt, 0, BLOCKS, plain)
    [without] = runner.run(StepPlan(rows=(row,))).outputs
    assert without is not None
    assert without.prompt_scores == ()
    assert without.token_id == output.token_id


def test_a_computation_that_starts_anew_leaves_no_trace(runner: ModelRunner) -> None:
    """Its blocks were taken away in the middle: the prompt is computed from its start again."""
    [prompt] = prompts(lengths=(40,))
    whole = scores_of(runner, prompt, [40], 1)
    spec = SampleSpec(params_of(1), prompt, [])
    for start, end in ((0, 16), (16, 24), (0, 40)):
        sample = spec if end == 40 else None
        row = Row(RequestId("r"), Attempt(1), prompt[start:end], start, BLOCKS, sample, spec)
        [output] = runner.run(StepPlan(rows=(row,))).outputs
    assert output == whole
    assert spec.notes.scores == []


def test_prompts_of_one_token_and_rows_beside_one_another(runner: ModelRunner) -> None:
    first, second = prompts(lengths=(20, 9))
    expected = [scores_of(runner, prompt, [len(prompt)], 2) for prompt in (first, second)]
    specs = [SampleSpec(params_of(2), prompt, []) for prompt in (first, second)]
    single = SampleSpec(params_of(2), [5], [])
    rows = (
        Row(RequestId("a"), Attempt(1), first, 0, BLOCKS[:10], specs[0], specs[0]),
        Row(RequestId("b"), Attempt(1), [5], 0, BLOCKS[10:12], single, None),
        Row(RequestId("c"), Attempt(1), second, 0, BLOCKS[12:20], specs[1], specs[1]),
    )
    outputs = runner.run(StepPlan(rows=rows)).outputs
    assert [outputs[0], outputs[2]] == expected
    assert outputs[1] is not None
    assert outputs[1].prompt_scores == ()


def sequence_of(prompt: list[int], num_best: int | None, *, delivered: int = 0) -> Sequence:
    return Sequence(
        RouterId("r"),
        RequestId("q"),
        Attempt(1),
        [*prompt, *range(delivered)],
        len(prompt),
        params_of(num_best),
        "",
        1,
        0.0,
    )


def test_a_prompt_that_is_scored_is_computed_whole() -> None:
    blocks = BlockManager(64, 4, "n")
    prompt = list(range(20))
    other = sequence_of(prompt, None)
    assert other.reserve(blocks, 5)
    other.advance(20)
    other.publish(blocks)
    other.release(blocks)
    for num_best, delivered, leave_last, cached in (
        (None, 0, True, 16),
        (0, 0, True, 0),
        (0, 0, False, 20),  # it only receives what another worker computes
        (0, 3, True, 20),  # a later attempt: the scores went out with the first token
    ):
        sequence = sequence_of(prompt, num_best, delivered=delivered)
        assert sequence.reserve(blocks, 6, leave_last=leave_last)
        assert sequence.num_computed == cached
        row = sequence.row(1)
        wanted = num_best is not None and not delivered and cached < 19
        assert (row.score is sequence.sample) == wanted
        sequence.release(blocks)
    blocks.check_integrity()


def test_the_last_token_of_a_prompt_scores_nothing() -> None:
    sequence = sequence_of([1, 2, 3], 0)
    assert sequence.reserve(BlockManager(8, 4, "n"), 1)
    assert sequence.row(2).score is not None
    sequence.advance(2)
    assert sequence.row(1).score is None
