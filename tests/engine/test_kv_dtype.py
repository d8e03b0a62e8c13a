"""`--kv-dtype int8` in a worker's engine: more blocks, another fingerprint, nearly the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.model_spec import Dtype
from cluster.engine.worker_engine import WorkerEngine, open_engine
from cluster.errors import ConfigError, EdgeError
from cluster.ids import Epoch, WorkerId
from cluster.kv.layout import single_edge
from cluster.role_config import WorkerConfig
from cluster.wire.messages import Role
from kernels.cpu.backend import CpuBackend
from tests.engine.tiny_models import Engine, prompts

KV_BYTES = 1 << 20


@pytest.fixture
def opened(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    directory = checkpoint("llama", head_dim=64).directory
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))

    def run(**settings: Any) -> WorkerEngine:
        config = WorkerConfig(
            cluster_token="secret",
            served_model_name="tiny",
            block_size=16,
            worker=WorkerId("decode-0"),
            epoch=Epoch(1),
            router_addresses=(),
            model=str(directory),
            kv_address=None,
            runtime_dir="",
            backend="reference",
            **{"kv_bytes": KV_BYTES, "role": Role.DECODE} | settings,
        )
        return open_engine(config)

    return run


def test_int8_holds_nearly_twice_the_blocks_under_another_fingerprint(opened: Any) -> None:
    plain, small = opened(), opened(kv_dtype="int8")
    assert (plain.layout.dtype, small.layout.dtype) == ("bfloat16", "int8")
    assert small.layout.num_blocks == KV_BYTES // (3 * 2 * 16 * 2 * 68)
    assert plain.layout.num_blocks == KV_BYTES // (3 * 2 * 16 * 2 * 128)
    assert small.fingerprint == f"{plain.fingerprint}-kv-int8"
    assert plain.fingerprint == plain.prepared.fingerprint == small.prepared.fingerprint
    with pytest.raises(EdgeError, match="`dtype` is bfloat16 on prefill rank 0 but int8 on a decode rank"):
        single_edge(plain.layout.to_geometry(), small.layout.to_geometry())


def test_memory_that_is_too_small_names_the_way_out(opened: Any) -> None:
    with pytest.raises(ConfigError, match="--kv-dtype int8"):
        opened(kv_bytes=3 * 2 * 16 * 2 * 68 * 2)
    assert opened(kv_bytes=3 * 2 * 16 * 2 * 68 * 2, kv_dtype="int8").layout.num_blocks == 2


@pytest.mark.parametrize(("role", "mib"), [(Role.PREFILL, 256), (Role.DECODE, 512)])
def test_memory_by_role_where_nobody_says(opened: Any, role: Role, mib: int) -> None:
    assert opened(kv_bytes=None, role=role).layout.num_blocks == (mib << 20) // (3 * 2 * 16 * 2 * 128)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_stay_close_to_those_of_plain_kv(family: str, checkpoint: Any, prepare: Any) -> None:
    """KL of each position's distribution, prompt and decoded, of a random model."""
    backend = CpuBackend(1)
    prepared = prepare(checkpoint(family).directory, Dtype.BF16, backend)
    prompt = prompts(lengths=(150,))[0]
    found = []
    for kv_int8 in (False, True):
        engine = Engine(prepared, backend, kv_int8=kv_int8)
        hidden = [engine.prefill(0, prompt[:120])]
        hidden += [engine.hidden([engine.row(0, [prompt[i]], i)])[0] for i in range(120, 150)]
        found.append(torch.log_softmax(engine.logits(torch.cat(hidden)).double(), dim=-1))
    plain, small = found
    divergence = (plain.exp() * (plain - small)).sum(dim=-1)
    assert divergence.mean() < 2e-3
    assert divergence.max() < 2e-2
    assert divergence.max() > 0  # it was int8
