"""Steps that go on in one call against the same steps operation by operation: nobody can tell them apart."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.engine.batch import Row, SampleSpec, StepOutput, StepPlan
from cluster.engine.decoder import Decoder
from cluster.engine.drafts import with_drafts
from cluster.engine.following import FollowingRows, following_plan
from cluster.engine.grammar_masks import MaskedRows
from cluster.engine.model_spec import Dtype
from cluster.engine.runner import ModelRunner
from cluster.engine.weights import TORCH_DTYPES
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams, looks_back
from kernels.cpu.backend import CpuBackend
from kernels.ops import row_size
from kernels.quantization import Quantization
from tests.engine.tiny_models import BLOCK_SIZE, same_bits

NUM_BLOCKS = 400
PLAIN = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0},
    {"temperature": 0.0, "logit_bias": ((7, 3.0), (8, -2.0)), "allowed_token_ids": tuple(range(200))},
)
OTHERS = (
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "frequency_penalty": 0.5},
    {"temperature": 0.7, "min_tokens": 9, "eos_token_ids": (3, 4)},
    {"temperature": 0.7, "bad_words_ids": ((5,), (6, 7))},
    {"temperature": 0.0, "num_logprobs": 2},
)


@dataclass
class Sequence:
    prompt: list[int]
    params: SamplingParams
    blocks: list[BlockId]
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = SampleSpec(self.params, self.prompt, self.ids)

    def row(self, name: str) -> Row:
        tokens = [*self.prompt, *self.ids]
        start = 0 if not self.ids else len(tokens) - 1
        return Row(RequestId(name), Attempt(1), tokens[start:], start, self.blocks, self.spec)

    def make_room(self, num_tokens: int, fresh: Any) -> None:
        while len(self.blocks) * BLOCK_SIZE < len(self.prompt) + len(self.ids) + num_tokens:
            self.blocks.append(BlockId(next(fresh)))


class Twins:
    """Two runners of one model. The second never takes a step in one call."""

    def __init__(
        self,
        prepared: Any,
        backend: CpuBackend,
        kv_dtype: torch.dtype,
        max_model_len: int,
        decoder: Decoder | None = None,
    ) -> None:
        """`decoder`: of the first; None: one of its own."""
        spec = prepared.spec
        size = row_size(spec.head_dim, kv_dtype)
        shape = (NUM_BLOCKS, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, size)
        self.pools = [torch.zeros(shape, dtype=kv_dtype) for _ in range(2)]
        self.one, self.other = [
            ModelRunner(prepared, pool, backend, max_model_len, decoder=one)
            for pool, one in zip(self.pools, (decoder, None), strict=True)
        ]
        self.other._may_follow = None
        self.again = lambda: Twins(prepared, backend, kv_dtype, max_model_len, self.one.decoder)
        self.num_calls = 0
        step_on = self.one._step_on
        assert step_on is not None

        def counted() -> tuple[list[int], int]:
            self.num_calls += 1
            return step_on()

        self.one._step_on = counted

    def run(self, plan: StepPlan) -> StepOutput:
        told: list[ModelRunner] = []
        output, same = [one.run(plan, partial(told.append, one)) for one in (self.one, self.other)]
        assert told == [self.one, self.other], "each says once that histories are needed"
        assert list(output.outputs) == list(same.outputs)
        assert output.further == same.further
        return output

    def assert_same_memory(self) -> None:
        assert same_bits(*self.pools)


@pytest.fixture(
    params=[
        (Dtype.FP32, "auto", Quantization.NONE),
        (Dtype.BF16, "auto", Quantization.NONE),
        (Dtype.BF16, "int8", Quantization.INT8),
    ],
    ids=lambda param: f"{param[0].value}-{param[1]}-{param[2].value}",
)
def twins(request: Any, checkpoint: Any, prepare: Any) -> Twins:
    dtype, kv_dtype, quantization = request.param
    backend = CpuBackend(1, quantization)
    prepared = prepare(checkpoint("qwen3").directory, dtype, backend)
    return Twins(prepared, backend, torch.int8 if kv_dtype == "int8" else TORCH_DTYPES[dtype], 96)


def go_on(twins: Twins, sequences: list[Sequence], plan: StepPlan, output: StepOutput, most: int) -> int:
    """As an engine's thread does, histories one step behind, for up to `most` steps; how many it were."""
    for num_on in range(most):
        following = following_plan(plan, output)
        for sequence, one in zip(sequences, output.outputs, strict=True):
            assert one is not None
            sequence.ids.append(one.token_id)
        if following is None or not isinstance(following.rows, FollowingRows):
            return num_on
        plan, output = following, twins.run(following)
    for sequence, one in zip(sequences, output.outputs, strict=True):
        assert one is not None
        sequence.ids.append(one.token_id)
    return most


def start(rng: random.Random, fresh: Any, choices: tuple[dict[str, Any], ...], most: int = 60) -> Sequence:
    params = SamplingParams(max_tokens=most, seed=rng.randrange(99), **rng.choice(choices))
    return Sequence([rng.randrange(250) for _ in range(rng.randint(1, 12))], params, [BlockId(next(fresh))])


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6))
def test_any_run_of_steps_is_what_it_is_step_by_step(twins: Twins, seed: int) -> None:
    """Requests come, leave, sit out, run out of blocks and of tokens; some look back at their history."""
    rng = random.Random(seed)
    ids = list(range(NUM_BLOCKS))
    rng.shuffle(ids)
    fresh = iter(ids)
    choices = PLAIN if rng.random() < 0.6 else PLAIN + OTHERS
    running: list[Sequence] = []
    for _ in range(14):
        running = [one for one in running if rng.random() < 0.95 and len(one.ids) < one.params.max_tokens]
        while not running or rng.random() < 0.2:
            running.append(start(rng, fresh, choices, rng.choice([6, 40, 60])))
        stepping = [one for one in running if rng.random() < 0.95] or running
        room = rng.choice([0, 0, 3, 9])
        for one in stepping:
            one.make_room(room, fresh)
        plan = StepPlan(tuple(one.row(str(id(one))) for one in stepping))
        output = twins.run(plan)
        is_prompt = any(not one.ids for one in stepping)
        num_calls = twins.num_calls
        num_on = go_on(twins, stepping, plan, output, 0 if is_prompt else room)
        num_calls = twins.num_calls - num_calls
        assert num_calls <= num_on
        if choices is PLAIN:  # one may be where the tables ended before, and is laid out anew
            assert num_calls >= num_on - 1
        running = [one for one in running if len(one.prompt) + len(one.ids) < 80]
    twins.assert_same_memory()


def prompted(
    twins: Twins, choices: list[dict[str, Any]], room: int
) -> tuple[list[Sequence], StepPlan, StepOutput]:
    """Sequences past their prompts, in a step with a token each."""
    fresh = iter(range(NUM_BLOCKS))
    sequences = [
        Sequence([5 + i, 9, 11], SamplingParams(max_tokens=60, seed=i, **choice), [])
        for i, choice in enumerate(choices)
    ]
    for sequence in sequences:
        sequence.make_room(room + 2, fresh)
    for _ in range(2):
        plan = StepPlan(tuple(one.row(str(i)) for i, one in enumerate(sequences)))
        output = twins.run(plan)
        if not sequences[0].ids:
            for sequence, one in zip(sequences, output.outputs, strict=True):
                assert one is not None
                sequence.ids.append(one.token_id)
    return sequences, plan, output


@pytest.mark.parametrize("choice", [*PLAIN, *OTHERS], ids=str)
def test_who_asks_for_no_more_than_a_token_goes_on_in_one_call(twins: Twins, choice: dict[str, Any]) -> None:
    plain = {"temperature": 0.0}
    params = SamplingParams(max_tokens=60, **choice)
    sequences, plan, output = prompted(twins, [plain, choice, plain], 20)
    assert go_on(twins, sequences, plan, output, 12) == 12
    is_plain = not looks_back(params) and params.num_logprobs is None
    assert twins.num_calls == (12 if is_plain else 0)
    twins.assert_same_memory()


class AnyToken:
    """A grammar that allows everything, and no row may go on without it."""

    num_asked = 0

    def prepare(self, spec: SampleSpec) -> None:
        pass

    def apply(self, result: Any, specs: list[SampleSpec]) -> MaskedRows:
        self.num_asked += 1
        return MaskedRows({}, [])


def test_who_follows_a_grammar_is_asked_each_time(twins: Twins) -> None:
    twins.one._chooser._grammars = twins.other._chooser._grammars = grammar = AnyToken()  # type: ignore
    plain = {"temperature": 0.0}
    sequences, plan, output = prompted(twins, [plain, {**plain, "grammar": "any"}, plain], 20)
    grammar.num_asked = 0
    assert go_on(twins, sequences, plan, output, 5) == 5
    assert (twins.num_calls, grammar.num_asked) == (0, 2 * 5)


def test_drafts_in_a_step_of_a_run_end_it(twins: Twins) -> None:
    """They are the engine's own: what follows a step knows nothing of those that were wrong."""
    sequences, plan, output = prompted(twins, [{"temperature": 0.0}] * 2, 20)
    following = following_plan(plan, output)
    assert following is not None
    right = twins.run(following).outputs
    assert right[0] is not None
    first, second = following.rows
    output = twins.run(StepPlan((with_drafts(first, [right[0].token_id ^ 1]), second)))
    assert (list(output.outputs), output.further) == (list(right), {})
    for sequence, row in zip(sequences, following.rows, strict=True):  # `go_on` adds the later tokens
        sequence.ids.append(row.token_ids[0])
    assert go_on(twins, sequences, following, output, 4) == 4
    assert twins.num_calls == 1 + 3  # the first of the four is packed anew
    twins.assert_same_memory()


@pytest.mark.parametrize("num_alone", [0, 1])
def test_two_runners_take_turns_with_one_decoder(twins: Twins, num_alone: int) -> None:
    """Whose last step is no longer the decoder's begins nothing in one call; what has begun goes on."""
    both = [twins, twins.again()]
    runs = []

    def step(i: int) -> None:
        sequences, plan, output = runs[i]
        following = following_plan(plan, output)
        assert following is not None
        runs[i] = sequences, following, both[i].run(following)

    for i, one in enumerate(both):
        runs.append(prompted(one, [{"temperature": 0.0}, {"temperature": 0.8}][: i + 1], 20))
        for _ in range(num_alone):
            step(i)
    for _ in range(4):
        for i in range(2):
            step(i)
    for one in both:
        assert one.num_calls == (5 if num_alone else 0)
        one.assert_same_memory()


def test_blocks_of_the_tables_end_it_and_the_next_step_begins_it_anew(twins: Twins) -> None:
    sequences, plan, output = prompted(twins, list(PLAIN), 0)
    room = len(sequences[0].blocks) * BLOCK_SIZE - len(sequences[0].prompt) - len(sequences[0].ids)
    assert go_on(twins, sequences, plan, output, room) == room
    assert twins.num_calls == room
    fresh = iter(range(NUM_BLOCKS // 2, NUM_BLOCKS))
    for sequence in sequences:
        sequence.make_room(5, fresh)
    plan = StepPlan(tuple(one.row(str(i)) for i, one in enumerate(sequences)))
    assert go_on(twins, sequences, plan, twins.run(plan), 4) == 4
    assert twins.num_calls == room + 4
    twins.assert_same_memory()


def test_tokens_that_are_not_the_last_steps_are_looked_at(twins: Twins) -> None:
    """The same plan again, and one whose tokens somebody has changed, though they look like what follows."""
    _, plan, output = prompted(twins, [{"temperature": 0.0}] * 2, 20)
    following = following_plan(plan, output)
    assert following is not None
    again = twins.run(following)
    twins.run(following)
    assert twins.num_calls == 1
    beyond = following_plan(following, again)
    assert beyond is not None
    assert isinstance(beyond.rows, FollowingRows)
    changed = FollowingRows(beyond.rows.run, beyond.rows.num_on, [3, 4])
    twins.run(StepPlan(changed))
    assert twins.num_calls == 1
    twins.assert_same_memory()


def test_a_prompt_between_two_steps_of_a_run_ends_what_was_laid_out(twins: Twins) -> None:
    sequences, plan, output = prompted(twins, [{"temperature": 0.0}] * 2, 20)
    other = Sequence([1, 2, 3], SamplingParams(max_tokens=9, temperature=0.0), [BlockId(NUM_BLOCKS - 1)])
    following = following_plan(plan, output)
    assert following is not None
    twins.run(StepPlan((other.row("other"),)))
    output = twins.run(following)
    assert twins.num_calls == 0
    for sequence in sequences:  # `go_on` adds the later tokens
        sequence.ids.append(following.rows[sequences.index(sequence)].token_ids[0])
    assert go_on(twins, sequences, following, output, 3) == 3
    assert twins.num_calls == 3
    twins.assert_same_memory()


def test_a_row_without_a_token_is_no_step_to_go_on_from(twins: Twins) -> None:
    _, plan, _ = prompted(twins, [{"temperature": 0.0}] * 2, 20)
    first, second = plan.rows
    silent = Row(second.request, second.attempt, second.token_ids, second.start, second.block_ids, None)
    twins.run(StepPlan((first, silent)))
    assert twins.one._brought is None


@pytest.mark.parametrize("num_before", [0, 2])
def test_what_the_library_refuses_is_said_and_a_step_after_it_goes_on_right(
    twins: Twins, num_before: int
) -> None:
    sequences, plan, output = prompted(twins, [{"temperature": 0.0}] * 3, 20)
    if num_before:  # then a planned one, for which later steps are laid out
        assert go_on(twins, sequences, plan, output, num_before) == num_before
        plan = StepPlan(tuple(one.row(str(i)) for i, one in enumerate(sequences)))
        output = twins.run(plan)
    following = following_plan(plan, output)
    assert following is not None
    table = twins.one._packer._table
    kept = int(table[1, 0])
    table[1, 0] = NUM_BLOCKS
    with pytest.raises(IndexError, match="slot 1 of the batch is out of range: 3 tokens"):
        twins.one.run(following)
    table[1, 0] = kept
    output = twins.run(following)
    assert twins.num_calls == num_before + 1  # the one that failed, and no other since
    for i, sequence in enumerate(sequences):
        sequence.ids.append(following.rows[i].token_ids[0])
    assert go_on(twins, sequences, following, output, 2) == 2
    twins.assert_same_memory()


def test_a_table_that_ends_before_its_row_is_refused_before_anything_moves(twins: Twins) -> None:
    sequences, plan, output = prompted(twins, [{"temperature": 0.0}], 0)
    num_blocks = len(sequences[0].blocks)
    room = num_blocks * BLOCK_SIZE - len(sequences[0].prompt) - len(sequences[0].ids)
    assert go_on(twins, sequences, plan, output, room) == room
    twins.one._fused._now.fields[2] = num_blocks  # type: ignore[union-attr]
    arrays = twins.one._packer._now.arrays  # type: ignore[union-attr]
    before = bytes(arrays.places), bytes(arrays.tokens)
    with pytest.raises(IndexError, match="sequence 0 of the batch is out of range"):
        twins.one._step_on()  # type: ignore[misc]
    assert (bytes(arrays.places), bytes(arrays.tokens)) == before


def test_bad_numbers_are_told_of_and_change_no_other_row(twins: Twins, caplog: Any) -> None:
    sequences, plan, output = prompted(twins, [{"temperature": 0.0}] * 3, 20)
    for pool in twins.pools:
        pool[sequences[1].blocks[0], :, 1] = -1 if pool.dtype is torch.int8 else torch.nan  # scales, too
    assert go_on(twins, sequences, plan, output, 2) == 2
    assert twins.num_calls == 2
    assert caplog.text.count("NaN or +inf in the logits of 1 of 3 rows") == 4  # twins
