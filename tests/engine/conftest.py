from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import prepare_model
from cluster.engine.prepared_model import PreparedModel
from kernels.ops import Backend
from kernels.reference import ReferenceBackend
from tests.engine.tiny_models import Checkpoint, make_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Checkpoint]:
    def make(family: str, **overrides: Any) -> Checkpoint:
        return make_checkpoint(tmp_path / family, family, **overrides)

    return make


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., PreparedModel]:
    def run(
        model: Path,
        dtype: Dtype = Dtype.FP32,
        backend: Backend | None = None,
        progress: Any = lambda *args: None,
    ) -> PreparedModel:
        return prepare_model(
            model,
            dtype,
            backend or ReferenceBackend(),
            progress,
            cache_dir=tmp_path / "cache",
            lock_timeout_s=30,
        )

    return run


@pytest.fixture
def reference() -> ReferenceBackend:
    return ReferenceBackend()
