"""No step of a served request waits for a compiler. Triton compiles a kernel anew for arguments of another
kind: every kind that serving uses was there when the worker said that it is warm.

A kind is told apart here as Triton's launcher does: constants, types, and of what a kernel is specialised on
whether it is a multiple of 16, or 1. The host's allocator aligns addresses as a device's does.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from cluster.engine.batch import StepPlan
from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import prepare_model
from cluster.engine.runner import ModelRunner
from cluster.ids import BlockId
from cluster.sampling import SamplingParams
from tests.engine.test_gpu_runner import SMALL, Sequence
from tests.engine.tiny_models import BLOCK_SIZE
from tests.kernels.triton_support import require

backend_module = require("kernels.triton.backend")
USERS = ("attention", "gemm", "rowwise", "sampling_edits", "selection")  # modules that launch
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "temperature": 0.8},
    {"seed": 2, "top_k": 9, "num_logprobs": 2},
    {"seed": 3, "top_p": 0.7, "repetition_penalty": 1.2},
    {"seed": 4, "top_k": 9, "top_p": 0.7, "presence_penalty": 0.2},
]


def kind_of(argument: Any, *, specialised: bool) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, float):
        return float
    wide = not -(2**31) <= argument < 2**31
    return (wide, argument == 1, argument % 16 == 0) if specialised else wide


class Variants:
    """Those of every kernel that were launched since they were last asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen: set[object] = set()
        for user in USERS:
            module = require(f"kernels.triton.{user}")
            monkeypatch.setattr(module, "launch", self._watching(module.launch))

    def _watching(self, launch: Any) -> Any:
        def watched(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
            free = kernel.kwargs.get("do_not_specialize") or ()
            names = list(inspect.signature(kernel.fn).parameters)[: len(arguments)]
            kinds = tuple(
                kind_of(argument, specialised=name not in free)
                for name, argument in zip(names, arguments, strict=True)
            )
            self._seen.add((kernel.fn.__name__, kinds, tuple(sorted(constants.items()))))
            launch(kernel, grid, *arguments, **constants)

        return watched

    def take(self) -> set[object]:
        taken, self._seen = self._seen, set()
        return taken


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels of a device do not tell what they are compiled for"
)
def test_a_warm_worker_compiles_nothing_more(
    original: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_module.TritonBackend()
    prepared = prepare_model(original("qwen3", **SMALL).directory, Dtype.FP32, backend, cache_dir=tmp_path)
    spec = prepared.spec
    shape = (24, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    runner = ModelRunner(prepared, torch.zeros(shape), backend, 256)
    for part in (runner.decoder.fused, runner._chooser._sampler):  # as on a GPU
        part._is_compiled = False  # type: ignore[union-attr]
    variants = Variants(monkeypatch)
    runner.warm_up()
    warm = variants.take()

    def request(which: int) -> Sequence:
        blocks = [BlockId(4 * which + index) for index in range(4)]
        return Sequence(list(range(3, 9 + which)), blocks, SamplingParams(max_tokens=9, **WISHES[which]))

    served = [request(which) for which in range(len(WISHES))]
    for some in (served[:1], served[1:3], served[:4], served, served[2:], served[3:]):
        rows = [one.row() for one in some]
        for one, row, output in zip(some, rows, runner.run(StepPlan(tuple(rows))).outputs, strict=True):
            one.advance(row, output)
    later = variants.take() - warm
    assert not later, "\n".join(map(str, sorted(later, key=str)))
