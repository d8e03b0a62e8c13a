"""The engine's tokens on Triton's kernels: those of a request alone, whatever its steps are like.

The oracle computes each request alone: its whole prompt, then token by token, without graphs. Everything else
here is compared with it, bit for bit: batches, chunks, companions that come and go, rows padded to a bucket,
inputs that were there before the step. The reference backend chooses the same tokens.

Graphs are replaced by the work they would record, done where they would be replayed: the path through the
runner is the same.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.engine.batch import Row, SampleSpec, StepOutput, StepPlan
from cluster.engine.decode_graphs import DecodeGraphs
from cluster.engine.decode_inputs import DecodeInputs
from cluster.engine.gpu_runner import GpuRunner
from cluster.engine.graph_capture import CaptureError, CudaCapture, Work
from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import prepare_model
from cluster.engine.runner import ModelRunner
from cluster.errors import DeviceLost, StepError
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams, TokenOutput
from kernels.reference import ReferenceBackend
from tests.engine.tiny_models import BLOCK_SIZE
from tests.kernels.triton_support import DEVICE, require

backend_module = require("kernels.triton.backend")
SMALL = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 70,
}  # fmt: skip
NUM_BLOCKS = 8
MAX_LEN = 256  # so a lone row has several splits in a bucket, and one in a plain step
DRAWN, NARROW, GREEDY, EDITED = range(4)  # requests
# prompt, blocks, how tokens are chosen, how many
REQUESTS: list[tuple[list[int], list[int], dict[str, Any], int]] = [
    ([3, 9, 27, 61, 50], [4, 2], {"temperature": 0.8, "seed": 5}, 5),
    ([66, 11, 2, 9, 33, 21, 6, 8, 1, 40, 5, 30, 7, 12], [0, 7], {"seed": 6, "top_k": 9, "top_p": 0.9}, 6),
    ([12, 40], [5, 1], {"temperature": 0.0}, 4),
    ([5, 6, 7, 44], [6, 3], {"seed": 7, "repetition_penalty": 1.3, "num_logprobs": 2}, 3),
]


class Recording:
    """Does the work where a graph would be replayed; fails from the `fails_at`-th capture on."""

    def __init__(self, fails_at: int = 99) -> None:
        self.num_captured = self.num_replayed = 0
        self._fails_at = fails_at

    def __call__(self, work: Work) -> Work:
        if self.num_captured == self._fails_at:
            raise CaptureError("operation not permitted when stream is capturing")
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


@dataclass
class Sequence:
    """A request and where it stands; as a scheduler would step it."""

    tokens: list[int]
    blocks: list[BlockId]
    params: SamplingParams
    outputs: list[TokenOutput] = field(default_factory=list)
    num_computed: int = 0

    def __post_init__(self) -> None:
        self._ids: list[int] = []
        self._sample = SampleSpec(self.params, tuple(self.tokens), self._ids)

    def row(self, num_tokens: int | None = None) -> Row:
        end = len(self.tokens) if num_tokens is None else self.num_computed + num_tokens
        part = self.tokens[self.num_computed : end]
        sample = self._sample if end == len(self.tokens) else None
        return Row(RequestId("r"), Attempt(1), part, self.num_computed, self.blocks, sample)

    def advance(self, row: Row, output: TokenOutput | None) -> None:
        self.num_computed += len(row.token_ids)
        if output is not None:
            self.tokens.append(output.token_id)
            self._ids.append(output.token_id)
            self.outputs.append(output)


def sequence(which: int) -> Sequence:
    prompt, blocks, kind, _ = REQUESTS[which]
    return Sequence(list(prompt), [BlockId(b) for b in blocks], SamplingParams(max_tokens=50, **kind))


class World:
    """One pool and one runner, stepped by plans; with `capture`, decode steps of `sizes` go by graphs."""

    def __init__(self, prepared: Any, backend: Any, sizes: tuple[int, ...] = (), capture: Any = None) -> None:
        spec = prepared.spec
        shape = (NUM_BLOCKS + 1, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self.pool = torch.full(shape, 1e4, device=backend.device)  # what was there before must not matter
        self.plain = ModelRunner(prepared, self.pool, backend, MAX_LEN)
        self.runner: Any = self.plain
        self.num_written = 0  # steps whose inputs were not there
        if capture is None:
            return
        with torch.inference_mode():
            inputs = DecodeInputs(sizes[-1], MAX_LEN, BLOCK_SIZE, BlockId(NUM_BLOCKS), backend.device)
            sampler = backend.make_device_sampler(sizes[-1], spec.vocab_size)
            graphs = DecodeGraphs(self.plain.decoder, self.pool, sampler, inputs, sizes)
            graphs.capture(capture)
        self.runner = GpuRunner(self.plain, graphs, backend.device)
        write = inputs.write

        def counted(rows: Any, num_rows: int) -> None:
            self.num_written += 1
            write(rows, num_rows)

        inputs.write = counted  # type: ignore[method-assign]

    def step(self, *sequences: Sequence, chunk: int | None = None) -> None:
        """All tokens without KV of each; of the last one, `chunk` of them."""
        rows = [one.row() for one in sequences[:-1]] + [sequences[-1].row(chunk)]
        outputs = self.runner.run(StepPlan(tuple(rows))).outputs
        for one, row, output in zip(sequences, rows, outputs, strict=True):
            one.advance(row, output)

    @property
    def kv(self) -> torch.Tensor:
        """Without what padding writes."""
        return self.pool[:NUM_BLOCKS]


class Oracle:
    """Every request alone: its outputs, and KV as it is afterwards."""

    def __init__(self, prepared: Any, backend: Any) -> None:
        world = World(prepared, backend)
        self.outputs: list[list[TokenOutput]] = []
        for which, (*_, num_tokens) in enumerate(REQUESTS):
            one = sequence(which)
            for _ in range(num_tokens):
                world.step(one)
            self.outputs.append(one.outputs)
        self.kv = world.kv

    def has(self, which: int, one: Sequence) -> bool:
        """Whether `one` got what its request gets alone."""
        return bool(one.outputs) and one.outputs == self.outputs[which][: len(one.outputs)]


@pytest.fixture(scope="module")
def backend() -> Any:
    return backend_module.TritonBackend()


@pytest.fixture(scope="module")
def model(original: Any) -> Any:
    return original("qwen3", **SMALL).directory


@pytest.fixture(scope="module")
def prepared(model: Any, backend: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return prepare_model(model, Dtype.FP32, backend, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def alone(prepared: Any, backend: Any) -> Oracle:
    return Oracle(prepared, backend)


def life(world: World) -> list[Sequence]:
    """Three requests decode; the fourth's prompt comes in chunks beside them; one by one they end."""
    drawn, narrow, greedy, edited = map(sequence, range(4))
    for _ in range(3):
        world.step(drawn, narrow, greedy)
    world.step(drawn, narrow, greedy, edited, chunk=2)
    world.step(drawn, narrow, edited)
    world.step(narrow, edited)
    world.step(edited)
    return [drawn, narrow, greedy, edited]


needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="graphs need a GPU")


@needs_gpu
def test_captured_steps_have_the_bits_of_plain_ones(prepared: Any, backend: Any, alone: Oracle) -> None:
    with torch.inference_mode():
        capture = CudaCapture(torch.device(DEVICE))
    world = World(prepared, backend, (1, 4), capture)
    assert [one.outputs for one in life(world)] == alone.outputs
    assert torch.equal(world.kv, alone.kv)


def test_batches_chunks_and_padding_do_not_change_bits(prepared: Any, backend: Any, alone: Oracle) -> None:
    capture = Recording()
    world = World(prepared, backend, (1, 4), capture)
    assert [one.outputs for one in life(world)] == alone.outputs
    assert torch.equal(world.kv, alone.kv)
    assert capture.num_captured == 6
    assert capture.num_replayed == 4  # the other steps computed prompts
    assert (world.pool[NUM_BLOCKS] != 1e4).any()  # padding wrote there


def test_the_reference_chooses_the_same_tokens(model: Any, prepare: Any, alone: Oracle) -> None:
    backend = ReferenceBackend(DEVICE)
    reference = Oracle(prepare(model, Dtype.FP32, backend), backend)
    for ours, theirs in zip(alone.outputs, reference.outputs, strict=True):
        assert [output.token_id for output in ours] == [output.token_id for output in theirs]
    torch.testing.assert_close(alone.kv, reference.kv, rtol=1e-3, atol=1e-3)


def test_a_step_that_was_expected_finds_its_inputs_there(prepared: Any, backend: Any, alone: Oracle) -> None:
    world = World(prepared, backend, (2,), Recording())
    narrow, drawn = sequence(NARROW), sequence(DRAWN)
    second = narrow.blocks.pop()  # it gets its second block when it needs it
    for _ in range(3):
        world.step(narrow, drawn)
    assert world.num_written == 1
    narrow.blocks.append(second)
    for _ in range(2):
        world.step(narrow, drawn)
    assert world.num_written == 2  # once more: there was no block to prepare inputs for
    assert alone.has(NARROW, narrow)
    assert alone.has(DRAWN, drawn)


def test_rows_that_end_or_change_places_are_not_taken_for_one_another(
    prepared: Any, backend: Any, alone: Oracle
) -> None:
    world = World(prepared, backend, (2,), Recording())
    drawn, greedy, edited = sequence(DRAWN), sequence(GREEDY), sequence(EDITED)
    world.step(drawn, greedy, edited)
    for rows in ((drawn, greedy), (greedy, drawn), (drawn,), (edited, drawn)):
        world.step(*rows)
    assert world.num_written == 4
    assert alone.has(DRAWN, drawn)
    assert alone.has(GREEDY, greedy)
    assert alone.has(EDITED, edited)


def test_what_cannot_be_captured_is_computed_as_usual(
    prepared: Any, backend: Any, alone: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    capture = Recording(fails_at=4)  # all kinds of two rows, one kind of one row
    with caplog.at_level(logging.WARNING):
        world = World(prepared, backend, (1, 2), capture)
    assert "of 1 rows run without a CUDA graph: operation not permitted" in caplog.text
    drawn, greedy = sequence(DRAWN), sequence(GREEDY)
    world.step(drawn, greedy)
    world.step(drawn, greedy)
    assert capture.num_replayed == 1
    world.step(greedy)
    assert capture.num_replayed == 1
    assert alone.has(DRAWN, drawn)
    assert alone.has(GREEDY, greedy)


def test_out_of_memory_fails_one_step_in_one_sentence(
    prepared: Any, backend: Any, alone: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(prepared, backend, (1,), Recording())
    one = sequence(GREEDY)
    world.step(one)
    world.step(one)

    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")

    with monkeypatch.context() as patched:
        patched.setattr(world.plain.decoder, "forward", full)
        with pytest.raises(StepError) as error:
            world.step(one)
    assert str(error.value).startswith(
        "a step of 1 rows, 1 tokens ran out of GPU memory (CUDA out of memory."
    )
    assert "\n" not in str(error.value)
    world.step(one)
    assert alone.has(GREEDY, one)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), StepError),
        (RuntimeError("no kernel"), RuntimeError),
        (ValueError("a grammar"), ValueError),
    ],
)
def test_a_step_that_fails_ends_when_the_device_has(
    error: Exception, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are freed then, and an edge may write into them on another stream."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    class Failing:
        def run(self, plan: StepPlan, await_history: object) -> StepOutput:
            raise error

    runner: Any = Failing()
    with pytest.raises(told):
        GpuRunner(runner, None, torch.device("cuda", 0)).run(StepPlan(()))
    assert waited == [torch.device("cuda", 0)]


def test_a_step_waits_for_its_history_when_the_device_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is taken off the step's time: what the device did meanwhile would be, too."""
    order: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: order.append("device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    class Waiting:
        def run(self, plan: StepPlan, await_history: Any) -> StepOutput:
            if await_history is not None:
                await_history()
            order.append("sampled")
            return StepOutput((), 1.0)

    runner: Any = Waiting()
    one = GpuRunner(runner, None, torch.device("cuda", 0))
    one.run(StepPlan(()), lambda: order.append("history"))
    assert order == ["device", "history", "sampled", "device"]
    order.clear()
    one.run(StepPlan(()))
    assert order == ["sampled", "device"]


def test_a_device_that_faulted_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    runner: Any = SimpleNamespace(run=fault)
    with pytest.raises(DeviceLost, match="cannot use it again: CUDA error: an illegal memory access was enc"):
        GpuRunner(runner, None, torch.device("cuda", 0)).run(StepPlan(()))


def test_a_plan_that_cannot_be_computed_is_refused_as_ever(prepared: Any, backend: Any) -> None:
    world = World(prepared, backend, (1,), Recording())
    one = sequence(GREEDY)
    row = Row(RequestId("x"), Attempt(1), [1], 40, one.blocks, one.row().sample)
    with pytest.raises(ValueError, match="request x has 2 blocks for 41 tokens, needs 3"):
        world.runner.run(StepPlan((row,)))
