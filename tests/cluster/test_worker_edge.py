"""A worker that cannot have the KV edge it was told to use says so in one line, before it loads a model."""

from __future__ import annotations

import asyncio
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.config import ClusterConfig
from cluster.errors import ConfigError, EdgeCrowded
from cluster.kv.edge_fallback import kinds_of
from cluster.kv.edges import EdgeKind
from cluster.launch_plan import ENTRIES
from cluster.role_by_hand import ByHand, config_by_hand
from cluster.role_config import WorkerConfig
from cluster.role_process import load_entry
from decode_worker import service as decode_service

ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])


def config_of(role: str, kind: Any) -> WorkerConfig:
    settings = ClusterConfig(model="/no/such/model", kv_edge=kind)
    config = config_by_hand(role, settings, ByHand("w"), model_name="m", token="t" * 32, num_cores=1)
    assert isinstance(config, WorkerConfig)
    return config


@ROLES
@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
async def test_without_a_gpu_edges_between_gpus_end_it(
    monkeypatch: pytest.MonkeyPatch, role: str, kind: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"^--kv-edge {kind} needs a CUDA device: torch .* sees none; use "):
        await load_entry(ENTRIES[role])(config_of(role, kind), stop=asyncio.Event())


@ROLES
async def test_a_gpu_beside_a_backend_that_does_not_use_it_is_no_help(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    service = importlib.import_module(ENTRIES[role].partition(":")[0])
    engine = SimpleNamespace(backend=SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(service, "open_engine", lambda config: engine)
    with pytest.raises(ConfigError, match=r"^--kv-edge cuda_ipc moves KV between GPUs, and this worker's"):
        await service.run(config_of(role, "cuda_ipc"), stop=asyncio.Event())


@pytest.mark.parametrize(("asked", "shared"), [("auto", [True, False]), ("cuda_ipc", [True])])
def test_auto_does_without_shared_gpu_memory_where_there_can_be_none(asked: str, shared: list[bool]) -> None:
    tried: list[bool] = []

    def make_pool(*, shared: bool) -> str:
        tried.append(shared)
        if shared:
            raise ConfigError("the KV pool's GPU memory cannot be shared")
        return "pool"

    engine: Any = SimpleNamespace(make_pool=make_pool)
    kinds = kinds_of(asked, "cuda", None)
    if asked == "auto":
        pool, others = decode_service._make_pool(engine, kinds, may_do_without=True)
        assert (pool, others) == ("pool", (EdgeKind.NCCL, EdgeKind.GLOO))
    else:
        with pytest.raises(ConfigError, match="cannot be shared"):
            decode_service._make_pool(engine, kinds, may_do_without=False)
    assert tried == shared


def test_a_decode_worker_without_room_for_the_best_kind_takes_the_next() -> None:
    receiver: Any = object()

    def build(kind: EdgeKind) -> Any:
        if kind is not EdgeKind.GLOO:
            raise EdgeCrowded("this worker holds 16 edges, as many as it may")
        return receiver

    kinds = [EdgeKind.NCCL, EdgeKind.GLOO]
    chosen = decode_service.first_that_can(kinds, build, may_be_worse=True)
    assert chosen == (EdgeKind.GLOO, receiver)
    for those, may_be_worse in ((kinds[:1], True), (kinds, False)):
        with pytest.raises(EdgeCrowded, match="16 edges"):
            decode_service.first_that_can(those, build, may_be_worse=may_be_worse)
