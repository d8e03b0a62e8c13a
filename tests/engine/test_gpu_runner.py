"""Steps by graphs, padded or not, have the bits of plain ones; what fails is one step, in one sentence.

Graphs are replaced by the work they would record, computed anew: the path through the runner is the same.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cluster.engine.batch import Row, SampleSpec, StepPlan
from cluster.engine.decode_graphs import DecodeGraphs
from cluster.engine.decode_inputs import DecodeInputs
from cluster.engine.gpu_runner import GpuRunner
from cluster.engine.graph_capture import CaptureError, CudaCapture, Work
from cluster.engine.model_spec import Dtype
from cluster.engine.runner import ModelRunner
from cluster.errors import StepError
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams, TokenOutput
from tests.engine.tiny_models import BLOCK_SIZE
from tests.kernels.triton_support import DEVICE, require

backend_module = require("kernels.triton.backend")
SMALL = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 40, "vocab_size": 96}
NUM_BLOCKS = 12
MAX_LEN = 512  # so a lone row has several splits in a bucket, and one in a plain step
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_k": 9, "top_p": 0.9},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.3},
    {"temperature": 0.0, "num_logprobs": 2},
]


class Recording:
    """Does the work again where a graph would be replayed; fails from the `fails_at`-th capture on."""

    def __init__(self, fails_at: int = 99) -> None:
        self.num_captured = self.num_replayed = 0
        self._fails_at = fails_at

    def __call__(self, work: Work) -> Work:
        if self.num_captured == self._fails_at:
            raise CaptureError("operation not permitted when stream is capturing")
        work()
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
    output: list[int] = field(default_factory=list)
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.sample = SampleSpec(self.params, tuple(self.tokens), self.output)

    def row(self, num_tokens: int | None = None) -> Row:
        end = len(self.tokens) if num_tokens is None else self.num_computed + num_tokens
        part = self.tokens[self.num_computed : end]
        sample = self.sample if end == len(self.tokens) else None
        return Row(RequestId("r"), Attempt(1), part, self.num_computed, self.blocks, sample)

    def advance(self, row: Row, output: TokenOutput | None) -> None:
        self.num_computed += len(row.token_ids)
        if output is not None:
            self.tokens.append(output.token_id)
            self.output.append(output.token_id)


class World:
    """One pool and one runner, stepped by plans."""

    def __init__(self, prepared: Any, backend: Any, sizes: tuple[int, ...] = (), capture: Any = None) -> None:
        spec = prepared.spec
        shape = (NUM_BLOCKS + 1, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self.pool = torch.full(shape, 1e4, device=DEVICE)  # what was there before must not matter
        self.plain = ModelRunner(prepared, self.pool, backend, MAX_LEN)
        self.graphs: DecodeGraphs | None = None
        self.written = 0
        if sizes:
            with torch.inference_mode():
                inputs = DecodeInputs(sizes[-1], MAX_LEN, BLOCK_SIZE, BlockId(NUM_BLOCKS), backend.device)
                sampler = backend.make_device_sampler(sizes[-1], spec.vocab_size)
                self.graphs = DecodeGraphs(self.plain.decoder, self.pool, sampler, inputs, sizes)
                self.graphs.capture(capture)
            write = inputs.write

            def counted(*arguments: Any) -> None:
                self.written += 1
                write(*arguments)

            inputs.write = counted  # type: ignore[method-assign]
        self.runner = GpuRunner(self.plain, self.graphs, torch.device(DEVICE)) if sizes else self.plain

    def step(self, *sequences: Sequence, chunk: int | None = None) -> list[TokenOutput | None]:
        """All tokens without KV of each; of the last one, `chunk` of them."""
        rows = [one.row() for one in sequences[:-1]] + [sequences[-1].row(chunk)]
        outputs = list(self.runner.run(StepPlan(tuple(rows))).outputs)
        for one, row, output in zip(sequences, rows, outputs, strict=True):
            one.advance(row, output)
        return outputs


@pytest.fixture(scope="module")
def backend() -> Any:
    return backend_module.TritonBackend()


@pytest.fixture(params=["qwen3", "qwen2"])
def prepared(request: Any, checkpoint: Any, prepare: Any, backend: Any) -> Any:
    return prepare(checkpoint(request.param, **SMALL).directory, Dtype.FP32, backend)


@pytest.fixture
def one_family(checkpoint: Any, prepare: Any, backend: Any) -> Any:
    return prepare(checkpoint("qwen3", **SMALL).directory, Dtype.FP32, backend)


def sequences(kinds: list[dict[str, Any]]) -> list[Sequence]:
    prompts = [[3, 9, 27, 81, 50], [4, 8], [70, 11, 2, 90, 33, 21, 66], [12, 40, 8], [5, 6, 7]]
    places = [[10, 2], [0, 7], [5, 1], [9, 3], [4, 6]]
    return [
        Sequence(list(prompt), [BlockId(b) for b in blocks], SamplingParams(max_tokens=50, **kind))
        for prompt, blocks, kind in zip(prompts, places, kinds, strict=False)
    ]


def life(world: World, kinds: list[dict[str, Any]]) -> list[list[TokenOutput | None]]:
    """Three rows decode; a prompt joins in chunks; one row ends; two decode."""
    first, second, third, late = sequences([*kinds, KINDS[0]])
    outputs = [world.step(first, second, third)]
    outputs += [world.step(first, second, third) for _ in range(3)]
    outputs.append(world.step(first, second, third, late, chunk=2))
    outputs.append(world.step(first, second, third, late))
    outputs += [world.step(third, late) for _ in range(2)]
    outputs.append(world.step(late))
    return outputs


needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="graphs need a GPU")


@needs_gpu
def test_captured_steps_have_the_bits_of_plain_ones(prepared: Any, backend: Any) -> None:
    plain = World(prepared, backend)
    with torch.inference_mode():
        capture = CudaCapture(torch.device(DEVICE))
    graphed = World(prepared, backend, (1, 4), capture)
    assert life(graphed, KINDS[:3]) == life(plain, KINDS[:3])
    assert torch.equal(graphed.pool[:NUM_BLOCKS], plain.pool[:NUM_BLOCKS])


@pytest.mark.parametrize("kinds", [KINDS[:3], KINDS[2:]], ids=["chosen on the device", "on the host too"])
def test_padded_steps_have_the_bits_of_plain_ones(
    prepared: Any, backend: Any, kinds: list[dict[str, Any]]
) -> None:
    capture = Recording()
    plain, graphed = World(prepared, backend), World(prepared, backend, (1, 4), capture)
    assert life(graphed, kinds) == life(plain, kinds)
    assert capture.num_captured == 6
    assert capture.num_replayed == 7
    assert torch.equal(graphed.pool[:NUM_BLOCKS], plain.pool[:NUM_BLOCKS])
    assert not torch.equal(graphed.pool[NUM_BLOCKS], plain.pool[NUM_BLOCKS])  # padding wrote there


def test_a_step_that_was_expected_finds_its_inputs_there(one_family: Any, backend: Any) -> None:
    plain, graphed = World(one_family, backend), World(one_family, backend, (2,), Recording())
    for world in (plain, graphed):
        first, second = sequences(KINDS[1:3])
        last = first.blocks.pop()  # it gets its second block when it needs it
        world.step(first, second)
        for _ in range(BLOCK_SIZE - len(first.tokens) + 1):
            world.step(first, second)
        first.blocks.append(last)
        world.step(first, second)
        world.step(first, second)
        world.result = (first.tokens, second.tokens)  # type: ignore[attr-defined]
    assert graphed.result == plain.result  # type: ignore[attr-defined]
    assert torch.equal(graphed.pool[:NUM_BLOCKS], plain.pool[:NUM_BLOCKS])
    assert graphed.written == 2  # the first step, and the one that no block was there for


def test_rows_that_end_or_change_places_are_not_taken_for_one_another(one_family: Any, backend: Any) -> None:
    plain, graphed = World(one_family, backend), World(one_family, backend, (2,), Recording())
    found = []
    for world in (plain, graphed):
        first, second, third = sequences(KINDS[:3])
        outputs = [world.step(first, second, third), world.step(first, second)]
        outputs += [world.step(second, first), world.step(first), world.step(third, first)]
        found.append(outputs)
    assert found[0] == found[1]
    assert graphed.written == 4
    assert torch.equal(graphed.pool[:NUM_BLOCKS], plain.pool[:NUM_BLOCKS])


def test_what_cannot_be_captured_is_computed_as_usual(
    one_family: Any, backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    capture = Recording(fails_at=4)  # all kinds of two rows, one kind of one row
    plain, graphed = World(one_family, backend), World(one_family, backend, (1, 2), capture)
    assert "of 1 rows run without a CUDA graph: operation not permitted" in caplog.text
    for world in (plain, graphed):
        first, second = sequences(KINDS[:2])
        world.step(first, second)
        world.result = [world.step(first, second), world.step(first)]  # type: ignore[attr-defined]
    assert graphed.result == plain.result  # type: ignore[attr-defined]
    assert capture.num_replayed == 1


def test_out_of_memory_fails_one_step_in_one_sentence(
    one_family: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, graphed = World(one_family, backend), World(one_family, backend, (2,), Recording())
    expected, tried = sequences(KINDS[:2]), sequences(KINDS[:2])
    for world, both in ((plain, expected), (graphed, tried)):
        world.step(*both)
        world.step(*both)
    decoder = graphed.plain.decoder
    forward = decoder.forward

    def full(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")

    monkeypatch.setattr(decoder, "forward", full)
    with pytest.raises(StepError) as error:
        graphed.step(*tried)
    assert str(error.value).startswith(
        "a step of 2 rows, 2 tokens ran out of GPU memory (CUDA out of memory."
    )
    assert "\n" not in str(error.value)
    monkeypatch.setattr(decoder, "forward", forward)
    assert graphed.step(*tried) == plain.step(*expected)


def test_a_plan_that_cannot_be_computed_is_refused_as_ever(one_family: Any, backend: Any) -> None:
    graphed = World(one_family, backend, (1,), Recording())
    (one,) = sequences(KINDS[:1])
    graphed.step(one)
    row = Row(RequestId("x"), Attempt(1), [1], 40, one.blocks, one.sample)
    with pytest.raises(ValueError, match="request x has 2 blocks for 41 tokens, needs 3"):
        graphed.runner.run(StepPlan((row,)))


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
