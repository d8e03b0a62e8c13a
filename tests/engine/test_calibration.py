"""Calibration with the real engine: a model comes out, and nothing of it stays."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from cluster.engine.batch import StepOutput, StepPlan
from cluster.engine.parallel import SINGLE_RANK, kv_geometry
from cluster.engine.runner import ModelRunner
from cluster.engine.worker_engine import WorkerEngine
from cluster.kv.layout import KVLayout
from cluster.live_step_model import ASSUMED
from cluster.sampling import SamplingParams
from cluster.step_model import StepWork
from kernels.reference import ReferenceBackend
from tests.engine.test_runner import generate
from tests.engine.tiny_models import BLOCK_SIZE, prompts

NUM_BLOCKS = 48


@pytest.fixture
def engine(checkpoint: Any, prepare: Any) -> WorkerEngine:
    prepared = prepare(checkpoint("llama").directory)
    geometry = kv_geometry(
        prepared.spec, SINGLE_RANK, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="float32"
    )
    layout = KVLayout.from_geometry(geometry)
    return WorkerEngine(prepared, ReferenceBackend(), layout, 512, 1, None, None)


def make_pool(engine: WorkerEngine) -> torch.Tensor:
    spec = engine.prepared.spec
    shape = (NUM_BLOCKS, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def test_a_model_comes_out_and_nothing_of_it_stays(
    engine: WorkerEngine, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(engine)
    before = pool.clone()
    runner = ModelRunner(engine.prepared, pool, engine.backend, engine.max_model_len)
    with caplog.at_level(logging.INFO):
        model = engine.calibrate(pool)(runner)
    assert torch.equal(pool, before)
    assert model.step_s(StepWork(512)) >= model.step_s(StepWork(1)) > 0
    assert "calibrat" in caplog.text

    fresh = ModelRunner(engine.prepared, before.clone(), engine.backend, engine.max_model_len)
    (prompt,) = prompts(lengths=(40,))
    params = SamplingParams(max_tokens=8, seed=3, temperature=0.7, num_logprobs=2)
    blocks = [5, 2, 7, 1]
    assert generate(runner, prompt, blocks, params, 8) == generate(fresh, prompt, blocks, params, 8)


class Broken:
    """Writes, then fails."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool

    def run(self, plan: StepPlan, await_history: object = None) -> StepOutput:
        self._pool[plan.rows[0].block_ids[0]] = 9.0
        raise RuntimeError("out of memory")


def test_a_step_that_fails_is_a_warning_and_the_pool_is_as_it_was(
    engine: WorkerEngine, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(engine)
    before = pool.clone()
    assert engine.calibrate(pool)(Broken(pool)) == ASSUMED
    assert torch.equal(pool, before)
    assert "the calibration of step times failed: a step failed (RuntimeError: out of memory)" in caplog.text
