"""A whole pass by emulated instructions equals its operations one by one, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.engine.model_spec import Dtype
from cluster.engine.packed_batch import pack
from kernels.cpu import backend as cpu_backend
from kernels.cpu.backend import CpuBackend
from kernels.quantization import Quantization
from tests.engine.test_fused import CASES, make_batches
from tests.engine.tiny_models import BLOCK_SIZE, Engine
from tests.support.isa_emulation import emulated_library

pytestmark = pytest.mark.timeout(600)  # the first test compiles the emulated library

VARIANTS = ("llama-biases", "qwen3", "odd", "tiny-vocabulary")


@pytest.mark.parametrize(
    ("isa", "quantization", "layout"),
    [
        ("amx", Quantization.NONE, "-paired-amx-pairs"),
        ("amx", Quantization.INT8, "-int8-amx-pairs"),
        ("avx512-bf16", Quantization.NONE, "-paired-dot-pairs"),
    ],
)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_equals_the_operations_one_by_one(
    variant: str,
    num_threads: int,
    isa: str,
    quantization: Quantization,
    layout: str,
    checkpoint: Any,
    prepare: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_CPU_ISA", isa)
    monkeypatch.setattr(cpu_backend, "load_library", emulated_library)
    family, overrides = CASES[variant]
    backend = CpuBackend(num_threads, quantization)
    assert backend.packed_layout.endswith(layout)
    prepared = prepare(checkpoint(family, **overrides).directory, Dtype.BF16, backend)
    fused, oracle = Engine(prepared, backend), Engine(prepared, backend, fuse=False)
    vocab_size = prepared.spec.vocab_size
    for ours, theirs in zip(make_batches(fused, vocab_size), make_batches(oracle, vocab_size), strict=True):
        with torch.inference_mode():
            actual = fused.decoder.forward(pack(ours, BLOCK_SIZE, 512, fused.device), fused.pool)
            expected = oracle.decoder.forward(pack(theirs, BLOCK_SIZE, 512, oracle.device), oracle.pool)
        assert torch.equal(actual.hidden, expected.hidden)
        assert torch.equal(actual.logits, expected.logits)
        assert actual.best.tolist() == expected.logits.argmax(dim=-1).tolist()
        assert torch.equal(fused.pool, oracle.pool)
        assert actual.hidden.isfinite().all()
