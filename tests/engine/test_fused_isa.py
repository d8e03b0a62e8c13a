"""A whole pass by emulated instructions equals its operations one by one, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.engine.model_spec import Dtype
from kernels.cpu import backend as cpu_backend
from kernels.cpu.backend import CpuBackend
from kernels.quantization import Quantization
from tests.engine.test_fused import assert_fused_equals_one_by_one
from tests.support.isa_emulation import emulated_library

pytestmark = pytest.mark.timeout(600)  # the first test compiles the emulated library

VARIANTS = ("llama-biases", "qwen3", "odd", "tiny-vocabulary")


@pytest.mark.parametrize(
    ("isa", "quantization", "layout"),
    [
        ("amx", Quantization.NONE, "-paired-amx-tiles"),
        ("amx", Quantization.INT8, "-int8-amx-tiles"),
        ("avx512-bf16", Quantization.NONE, "-paired-dot-dots"),
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
    backend = CpuBackend(num_threads, quantization)
    assert backend.packed_layout.endswith(layout)
    assert_fused_equals_one_by_one(variant, Dtype.BF16, backend, checkpoint, prepare)
