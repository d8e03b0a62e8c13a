"""A turned model is the same function of its tokens, and its activations are level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine.decoder import Decoder
from cluster.engine.model_spec import Dtype
from cluster.engine.packed_batch import pack
from cluster.engine.rotation import factors, turned, turned_rows, turned_tensors
from cluster.engine.weights_file import map_weights
from cluster.engine.weights_pack import assemble
from kernels.reference import ReferenceBackend
from tests.engine.test_fused import CASES
from tests.engine.tiny_models import BLOCK_SIZE, Engine, prompts

PROMPT = prompts(lengths=(40,))[0]


@pytest.mark.parametrize("size", [1, 2, 3, 6, 64, 70, 96, 576, 896, 4096])
def test_turning_is_orthogonal(size: int) -> None:
    product = 1
    for matrix in factors(size):
        product *= matrix.shape[0]
        unit = torch.eye(matrix.shape[0], dtype=torch.float64)
        torch.testing.assert_close(matrix @ matrix.t(), unit, rtol=0, atol=1e-12)
    assert product == size
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    torch.testing.assert_close(turned(x).double() @ turned(x).double().t(), x @ x.t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(turned(x.t(), 0), turned(x).t(), rtol=0, atol=0)


def test_one_large_channel_is_spread_over_all() -> None:
    x = torch.zeros(1, 576)
    x[0, 17] = 1.0
    assert turned(x).abs().max() < 1.5 / 576**0.5 * 1.01


def test_many_rows_are_turned_as_few_are() -> None:
    x = torch.randn(5000, 6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(turned_rows(x), turned(x))


@pytest.mark.parametrize("variant", CASES)
def test_a_turned_model_gives_the_same_logits(variant: str, checkpoint: Any, prepare: Any) -> None:
    family, overrides = CASES[variant]
    backend = ReferenceBackend()
    prepared = prepare(checkpoint(family, **overrides).directory, Dtype.FP32, backend)
    spec, tensors = prepared.spec, dict(map_weights(prepared.directory).tensors)
    tensors.setdefault("lm_head", tensors["embedding"])
    order = sorted(tensors, key=lambda name: (name == "lm_head", "norm" not in name))
    turned_weights = dict(turned_tensors(((name, tensors[name]) for name in order), spec))
    plain = Engine(prepared, backend)
    tokens = [token % spec.vocab_size for token in PROMPT]
    expected = plain.logits(plain.prefill(0, tokens))

    decoder = Decoder(spec, assemble(spec, turned_weights, frozenset(), backend), backend, 512)
    batch = pack([plain.row(1, tokens, 0)], BLOCK_SIZE, 512, plain.device)
    with torch.inference_mode():
        actual: Tensor = decoder.logits(decoder.forward(batch, plain.pool).hidden)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    assert not torch.equal(turned_weights["layers.0.qkv"], tensors["layers.0.qkv"])


def test_a_tensor_nobody_thought_of_is_not_passed_on(checkpoint: Any, prepare: Any) -> None:
    spec = prepare(checkpoint("llama").directory).spec
    with pytest.raises(ValueError, match=r"cannot be turned: layers\.0\.router"):
        list(turned_tensors([("layers.0.router", torch.zeros(2, 2))], spec))
