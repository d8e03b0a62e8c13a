"""The engine on Triton's kernels: the fused pass is the single operations, and a token's bits are its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cluster.engine.model_spec import Dtype
from cluster.engine.packed_batch import pack
from cluster.engine.runner import ModelRunner
from tests.engine.tiny_models import BLOCK_SIZE, Engine, prompts, same_bits
from tests.kernels.triton_support import DEVICE, require

backend_module = require("kernels.triton.backend")
[PROMPT] = prompts(seed=3, lengths=(13,))
SMALL = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 40, "vocab_size": 96}


@pytest.fixture(params=["qwen3", "qwen2"])
def make_engine(request: Any, checkpoint: Any, prepare: Any) -> Any:
    """Norms of heads in the one family, biases in the other."""
    made = checkpoint(request.param, **SMALL)
    backend = backend_module.TritonBackend()
    prepared = prepare(made.directory, Dtype.FP32, backend)
    return lambda **options: Engine(prepared, backend, num_blocks=16, **options)


def tokens() -> list[int]:
    return [token % 96 for token in PROMPT]


def test_chunks_decode_steps_and_companions_do_not_change_bits(make_engine: Any) -> None:
    prompt = tokens()
    whole = make_engine()
    expected = whole.prefill(0, prompt)
    assert expected.isfinite().all()

    single = make_engine(fuse=False)
    assert torch.equal(single.prefill(0, prompt), expected)
    assert torch.equal(single.kv(0, len(prompt)), whole.kv(0, len(prompt)))

    chunked = make_engine(block_seed=5)
    assert torch.equal(chunked.prefill(0, prompt[:11], 5), expected[:11])
    beside = [chunked.row(0, prompt[11:12], 11), chunked.row(1, prompt[:4], 0)]
    hidden = chunked.hidden(beside)
    assert torch.equal(hidden[0], expected[11:12])
    assert torch.equal(hidden[1], expected[:4])
    assert torch.equal(chunked.hidden([chunked.row(0, prompt[12:], 12)])[0], expected[12:])
    assert torch.equal(chunked.kv(0, len(prompt)), whole.kv(0, len(prompt)))
    assert torch.equal(chunked.logits(expected[-1:])[0], whole.logits(expected[-3:])[2])


def test_rows_that_ask_for_no_logits_end_with_their_keys_and_values(make_engine: Any) -> None:
    whole, trimmed = make_engine(), make_engine()
    results = []
    for engine in (whole, trimmed):
        rows = [engine.row(0, tokens()[:5], 0), engine.row(1, tokens()[5:8], 0)]
        batch = dataclasses.replace(pack(rows, BLOCK_SIZE, 512, engine.device), logit_rows=torch.tensor([4]))
        with torch.inference_mode():
            results.append(engine.decoder.forward(batch, engine.pool, keep_hidden=engine is whole))
    assert torch.equal(results[0].logits, results[1].logits)
    assert same_bits(whole.pool, trimmed.pool)
    assert (len(results[0].hidden), len(results[1].hidden)) == (8, 0)


def test_it_is_close_to_the_reference(checkpoint: Any, prepare: Any) -> None:
    directory = checkpoint("qwen3", **SMALL).directory
    prompt, results = tokens()[:9], []
    for backend in (backend_module.TritonBackend(), backend_module.ReferenceBackend(DEVICE)):
        engine = Engine(prepare(directory, Dtype.FP32, backend), backend, num_blocks=4)
        results.append(engine.logits(engine.prefill(0, prompt)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-3)


def test_a_pool_elsewhere_is_refused(checkpoint: Any, prepare: Any) -> None:
    backend = backend_module.TritonBackend()
    prepared = prepare(checkpoint("qwen3", **SMALL).directory, Dtype.FP32, backend)
    with pytest.raises(ValueError, match="KV pool on meta does not fit a backend on"):
        ModelRunner(prepared, torch.zeros(4, 2, 2, 16, 2, 16, device="meta"), backend)
