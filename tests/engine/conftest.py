from __future__ import annotations

import copy
import shutil
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


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Each checkpoint that tests ask for, made once."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Checkpoint] = {}

    def make(family: str, **overrides: Any) -> Checkpoint:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            made[key] = make_checkpoint(root / str(len(made)), family, **overrides)
        return made[key]

    return make


@pytest.fixture
def checkpoint(original: Callable[..., Checkpoint], tmp_path: Path) -> Callable[..., Checkpoint]:
    """A copy of the test's own: it may change or break it."""

    def make(family: str, **overrides: Any) -> Checkpoint:
        source = original(family, **overrides)
        directory = shutil.copytree(source.directory, tmp_path / family, dirs_exist_ok=True)
        return Checkpoint(directory, copy.deepcopy(source.model))

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
