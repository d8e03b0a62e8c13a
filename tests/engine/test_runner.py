"""Steps end to end: plans in, sampled tokens out, KV in the pool, copies first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.engine.batch import Row, SampleSpec, StepPlan
from cluster.engine.model_spec import Dtype
from cluster.engine.runner import ModelRunner
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams
from kernels.ops import row_size
from kernels.reference import ReferenceBackend
from tests.engine.tiny_models import BLOCK_SIZE, prompts, transformers_greedy

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
LOGPROBS = SamplingParams(max_tokens=64, temperature=0.0, num_logprobs=3)


def make_row(
    name: str,
    tokens: list[int],
    start: int,
    blocks: list[int],
    *,
    history: tuple[list[int], list[int]] | None = None,
    params: SamplingParams = GREEDY,
) -> Row:
    sample = None if history is None else SampleSpec(params, *history)
    return Row(RequestId(name), Attempt(1), tokens, start, [BlockId(b) for b in blocks], sample)


@pytest.fixture
def made(checkpoint: Any) -> Any:
    return checkpoint("llama")


@pytest.fixture
def runner(made: Any, prepare: Any) -> ModelRunner:
    return make_runner(prepare(made.directory))


def make_runner(prepared: Any, dtype: torch.dtype = torch.float32, num_blocks: int = 64) -> ModelRunner:
    spec = prepared.spec
    size = row_size(spec.head_dim, dtype)
    pool = torch.zeros(num_blocks, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, size, dtype=dtype)
    return ModelRunner(prepared, pool, ReferenceBackend())


def generate(
    runner: ModelRunner, prompt: list[int], blocks: list[int], params: SamplingParams, num: int
) -> Any:
    """One request alone: prefill in one chunk, then decode; its outputs."""
    outputs: list[Any] = []
    ids: list[int] = []
    row = make_row("r", prompt, 0, blocks, history=(prompt, ids), params=params)
    for _ in range(num):
        (output,) = runner.run(StepPlan(rows=(row,))).outputs
        assert output is not None
        outputs.append(output)
        ids.append(output.token_id)
        row = make_row(
            "r", ids[-1:], len(prompt) + len(ids) - 1, blocks, history=(prompt, ids), params=params
        )
    return outputs


def test_mixed_step_samples_only_where_asked(runner: ModelRunner, made: Any) -> None:
    """A decode row, a chunk that does not end its prompt and a whole prompt ride in one step."""
    first, second, third = prompts(lengths=(20, 40, 9))
    expected = [transformers_greedy(made.model, prompt, 2) for prompt in (first, second, third)]
    one = runner.run(StepPlan(rows=(make_row("a", first, 0, [5, 2], history=(first, [])),)))
    assert [o.token_id for o in one.outputs if o] == expected[0][:1]
    assert one.compute_s > 0
    token = expected[0][0]
    mixed = StepPlan(
        rows=(
            make_row("b", second[:16], 0, [9, 7, 1]),
            make_row("a", [token], 20, [5, 2], history=(first, [token])),
            make_row("c", third, 0, [3], history=(third, [])),
        )
    )
    assert mixed.num_tokens == 16 + 1 + 9
    outputs = runner.run(mixed).outputs
    assert outputs[0] is None
    assert [o.token_id for o in outputs if o] == [expected[0][1], expected[2][0]]
    rest = runner.run(StepPlan(rows=(make_row("b", second[16:], 16, [9, 7, 1], history=(second, [])),)))
    assert [o.token_id for o in rest.outputs if o] == expected[1][:1]


def test_copies_come_before_the_step_and_in_order(runner: ModelRunner, made: Any) -> None:
    """A fork goes on in a copy of the shared last block; the original's block keeps its bits."""
    prompt = prompts(lengths=(20,))[0]
    runner.run(StepPlan(rows=(make_row("a", prompt, 0, [1, 2], history=(prompt, [])),)))
    pool = runner._pool
    before = pool[2].clone()
    plan = StepPlan(
        rows=(make_row("b", [9], 20, [1, 4], history=(prompt, [9])),),
        copies=((BlockId(2), BlockId(3)), (BlockId(3), BlockId(4))),
    )
    (output,) = runner.run(plan).outputs
    assert output is not None
    assert output.token_id == transformers_greedy(made.model, [*prompt, 9], 1)[0]
    assert torch.equal(pool[2], before)
    assert torch.equal(pool[3], before)
    assert torch.equal(pool[4][:, :, :4], before[:, :, :4])
    assert not torch.equal(pool[4], before)


def test_a_copied_int8_block_goes_on_as_the_original_would(made: Any, prepare: Any) -> None:
    """Copy-on-write takes the scales along."""
    runner = make_runner(prepare(made.directory), torch.int8)
    prompt = prompts(lengths=(20,))[0]
    runner.run(StepPlan(rows=(make_row("a", prompt, 0, [1, 2], history=(prompt, [])),)))
    fork = make_row("b", [9], 20, [1, 4], history=(prompt, [9]), params=LOGPROBS)
    (forked,) = runner.run(StepPlan(rows=(fork,), copies=((BlockId(2), BlockId(4)),))).outputs
    own = make_row("a", [9], 20, [1, 2], history=(prompt, [9]), params=LOGPROBS)
    assert tuple(runner.run(StepPlan(rows=(own,))).outputs) == (forked,)
    assert torch.equal(runner._pool[2], runner._pool[4])


def test_copies_without_rows(runner: ModelRunner) -> None:
    runner._pool[6] = 3.0
    assert runner.run(StepPlan(rows=(), copies=((BlockId(6), BlockId(8)),))).outputs == ()
    assert bool((runner._pool[8] == 3.0).all())


@pytest.mark.parametrize("dtype", list(Dtype), ids=lambda dtype: dtype.value)
def test_b064_seeded_rows_do_not_see_each_other(dtype: Dtype, made: Any, prepare: Any) -> None:
    """Tokens and log-probabilities of 12 different requests in a batch equal each one alone."""
    prepared = prepare(made.directory, dtype)
    torch_dtype = torch.bfloat16 if dtype is Dtype.BF16 else torch.float32
    num_requests, num_tokens = 12, 6
    prompt_list = prompts(lengths=[3 + 7 * i for i in range(num_requests)])
    params = [
        SamplingParams(
            max_tokens=num_tokens,
            seed=i,
            temperature=0.3 * (i % 4),
            top_k=(0, 5, 40)[i % 3],
            top_p=(1.0, 0.8)[i % 2],
            repetition_penalty=(1.0, 1.3)[i % 2],
            frequency_penalty=(0.0, 0.7)[i % 2],
            num_logprobs=i % 3,
        )
        for i in range(num_requests)
    ]
    alone = [
        generate(make_runner(prepared, torch_dtype), prompt, list(range(8)), p, num_tokens)
        for prompt, p in zip(prompt_list, params, strict=True)
    ]
    runner = make_runner(prepared, torch_dtype, num_blocks=8 * num_requests)
    blocks = [list(range(i, 8 * num_requests, num_requests)) for i in range(num_requests)]
    outputs: list[list[Any]] = [[] for _ in range(num_requests)]
    ids: list[list[int]] = [[] for _ in range(num_requests)]
    for step in range(num_tokens):
        rows = tuple(
            make_row(
                str(i),
                prompt if step == 0 else ids[i][-1:],
                0 if step == 0 else len(prompt) + step - 1,
                blocks[i],
                history=(prompt, ids[i]),
                params=params[i],
            )
            for i, prompt in enumerate(prompt_list)
        )
        for i, output in enumerate(runner.run(StepPlan(rows=rows)).outputs):
            assert output is not None
            outputs[i].append(output)
            ids[i].append(output.token_id)
    assert outputs == alone
    assert len({tuple(o.token_id for o in row) for row in alone}) > num_requests // 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (make_row("x", [], 0, [1]), "request x brings no tokens"),
        (make_row("x", [4] * 17, 0, [1]), "request x has 1 blocks for 17 tokens, needs 2"),
        (make_row("x", [4], 512, list(range(33))), "request x reaches 513 tokens of 512"),
    ],
)
def test_impossible_row_is_refused_before_anything_is_written(
    row: Row, message: str, runner: ModelRunner
) -> None:
    before = runner._pool.clone()
    plan = StepPlan(rows=(make_row("good", [5], 0, [2]), row), copies=((BlockId(0), BlockId(3)),))
    with pytest.raises(ValueError, match=message):
        runner.run(plan)
    assert torch.equal(runner._pool, before)


def test_pool_that_does_not_fit_is_refused(made: Any, prepare: Any) -> None:
    prepared = prepare(made.directory)
    for shape, dtype in (
        ((4, 3, 2, 16, 2, 16), torch.bfloat16),
        ((4, 2, 2, 16, 2, 16), torch.float32),
        ((4, 3, 2, 16, 4, 16), torch.float32),
        ((4, 3, 2, 16, 2, 16), torch.int8),
        ((4, 3, 2, 16, 2, 20), torch.uint8),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            ModelRunner(prepared, torch.zeros(shape, dtype=dtype), ReferenceBackend())


def test_warm_up_leaves_the_answers_alone(runner: ModelRunner, made: Any) -> None:
    assert runner.warm_up() > 0
    prompt = prompts(lengths=(30,))[0]
    outputs = generate(runner, prompt, [0, 1, 2], GREEDY, 5)
    assert [o.token_id for o in outputs] == transformers_greedy(made.model, prompt, 5)
