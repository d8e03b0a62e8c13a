"""The note of a prepared model: found while nothing changed, gone with whatever it stands for."""

import os
import shutil
from pathlib import Path

import pytest

from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import prepare_model
from cluster.engine.prepared_index import find_prepared
from cluster.errors import ModelError
from kernels.quantization import Quantization
from kernels.reference import ReferenceBackend
from tests.support.tiny_model import write_tiny_model


def test_found_after_preparation_and_only_for_what_was_prepared(tmp_path: Path) -> None:
    model, root = write_tiny_model(tmp_path / "tiny"), tmp_path / "cache"
    assert find_prepared(str(model), "fp32", "reference", root) is None
    prepared = prepare_model(model, Dtype.FP32, ReferenceBackend("cpu"), cache_dir=root)
    assert find_prepared(str(model), "fp32", "reference", root) == prepared.directory
    assert find_prepared(str(model), "bf16", "reference", root) is None
    assert find_prepared(str(model), "fp32", "cpu", root) is None
    assert find_prepared(str(model), "fp32", "reference", root, "int8") is None
    quantized = prepare_model(model, Dtype.FP32, ReferenceBackend("cpu", Quantization.INT8), cache_dir=root)
    assert find_prepared(str(model), "fp32", "reference", root, "int8") == quantized.directory
    assert find_prepared(str(model), "fp32", "reference", root) == prepared.directory


def test_a_changed_source_or_a_lost_cache_is_not_found(tmp_path: Path) -> None:
    model, root = write_tiny_model(tmp_path / "tiny"), tmp_path / "cache"
    prepared = prepare_model(model, Dtype.FP32, ReferenceBackend("cpu"), cache_dir=root)
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert find_prepared(str(model), "fp32", "reference", root) is None
    again = prepare_model(model, Dtype.FP32, ReferenceBackend("cpu"), cache_dir=root)
    assert again.directory != prepared.directory
    shutil.rmtree(again.directory)
    assert find_prepared(str(model), "fp32", "reference", root) is None


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing"):
        find_prepared(str(tmp_path / "missing"), "fp32", "reference", tmp_path)
