"""SmolLM2 in fp32: what we read, convert and compute against transformers' own LlamaForCausalLM."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import gguf
import pytest
import torch

from cluster.engine.batch import Row, SampleSpec, StepPlan
from cluster.engine.gguf_source import GgufSource
from cluster.engine.model_source import DEMO, resolve_model
from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import prepare_model
from cluster.engine.prepared_model import PreparedModel
from cluster.engine.runner import ModelRunner
from cluster.errors import ModelError
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams
from cluster.tokenizer import Tokenizer
from kernels.cpu.backend import CpuBackend
from kernels.ops import Backend
from tests.parity.varied_prompts import PROMPTS

NUM_TOKENS = 64
BLOCK_SIZE = 16
NUM_THREADS = 1  # the other cores run other tests
BATCH_TOKENS = 1024  # that transformers computes at a time, padding included

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return CpuBackend(NUM_THREADS)


@pytest.fixture(scope="module")
def prepared(backend: Backend) -> PreparedModel:
    try:
        resolve_model(DEMO)
    except ModelError as error:
        pytest.skip(str(error))
    return prepare_model(DEMO, Dtype.FP32, backend)


@pytest.fixture(scope="module")
def prompt_ids(prepared: PreparedModel) -> list[list[int]]:
    tokenizer = Tokenizer.load(prepared.directory)
    return [list(tokenizer.encode(prompt)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def published(prepared: PreparedModel) -> Any:
    """transformers' model with the weights that transformers reads from the GGUF file."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = LlamaForCausalLM(LlamaConfig.from_pretrained(prepared.directory))
    with pytest.MonkeyPatch.context() as patch:  # it makes the same table of names for each of its modules
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        tensors = load_gguf_checkpoint(
            str(resolve_model(DEMO).path), return_tensors=True, model_to_load=model
        )
    incompatible = model.load_state_dict(tensors["tensors"], strict=False)
    assert (incompatible.missing_keys, incompatible.unexpected_keys) == (["lm_head.weight"], [])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.eval()


def transformers_next(model: Any, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[int]]:
    """The ids transformers would choose after each prompt and each of its outputs, were those given so far.

    One pass instead of a generation: if all of them are the outputs themselves, then by induction so is what
    transformers generates. Batches of similar lengths, padded on the left.
    """
    chosen: dict[int, list[int]] = {}
    for batch in _batches([len(prompt) + NUM_TOKENS - 1 for prompt in prompts]):
        given = [prompts[i] + outputs[i][:-1] for i in batch]
        width = max(map(len, given))
        ids = torch.tensor([[0] * (width - len(tokens)) + tokens for tokens in given])
        mask = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in given])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.inference_mode():
            logits = model(
                ids, attention_mask=mask, position_ids=positions, logits_to_keep=NUM_TOKENS, use_cache=False
            ).logits
        chosen |= dict(zip(batch, logits.argmax(dim=-1).tolist(), strict=True))
    return [chosen[i] for i in range(len(prompts))]


def _batches(lengths: list[int]) -> list[list[int]]:
    """Indices in the order of their lengths, cut before a batch would have more than `BATCH_TOKENS`."""
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(index)
    return batches


def our_greedy(prepared: PreparedModel, backend: Backend, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts in one batch."""
    spec = prepared.spec
    blocks_per_request = -(-(max(map(len, prompts)) + NUM_TOKENS) // BLOCK_SIZE)
    num_blocks = blocks_per_request * len(prompts)
    pool = torch.zeros(num_blocks, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    runner = ModelRunner(prepared, pool, backend, max_model_len=1024)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(NUM_TOKENS):
        rows = tuple(
            Row(
                request=RequestId(str(i)),
                attempt=Attempt(1),
                token_ids=prompt if step == 0 else outputs[i][-1:],
                start=0 if step == 0 else len(prompt) + step - 1,
                block_ids=[BlockId(i + len(prompts) * b) for b in range(blocks_per_request)],
                sample=SampleSpec(params, prompt, outputs[i]),
            )
            for i, prompt in enumerate(prompts)
        )
        for output, sampled in zip(outputs, runner.run(StepPlan(rows=rows)).outputs, strict=True):
            assert sampled is not None
            output.append(sampled.token_id)
    return outputs


def test_converted_weights_are_transformers_bits(published: Any) -> None:
    source = GgufSource(resolve_model(DEMO).path)
    state = published.state_dict()
    for name in source.shapes():
        assert torch.equal(source.load(name), state[name]), name


def test_greedy_ids_equal_transformers(
    published: Any, prepared: PreparedModel, backend: Backend, prompt_ids: list[list[int]]
) -> None:
    ours = our_greedy(prepared, backend, prompt_ids)
    theirs = transformers_next(published, prompt_ids, ours)
    differing = [
        f"{PROMPTS[i]!r} at token {next(t for t in range(NUM_TOKENS) if a[t] != b[t])}"
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a != b
    ]
    assert differing == []
