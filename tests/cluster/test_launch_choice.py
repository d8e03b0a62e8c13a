"""Ray where it is there, this machine alone where it is not, and no setting that only Ray could honour."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.launch_choice import can_import_ray, choose_launcher


@pytest.mark.parametrize(
    ("settings", "has_ray", "launcher"),
    [
        ({}, True, "ray"),
        ({}, False, "local"),
        ({"launcher": "ray"}, True, "ray"),
        ({"launcher": "local"}, True, "local"),
        ({"launcher": "local"}, False, "local"),
        ({"address": "auto", "gpus_per_worker": 1.0}, True, "ray"),
    ],
)
def test_who_starts_the_processes(settings: dict[str, Any], has_ray: bool, launcher: str) -> None:
    choice = choose_launcher(ClusterConfig(**settings), has_ray)
    assert choice.launcher == launcher
    was_asked_for = settings.get("launcher") == launcher
    assert (choice.notice is None) == (launcher == "ray" or was_asked_for)


@pytest.mark.parametrize(
    ("settings", "has_ray", "message"),
    [
        ({"launcher": "ray"}, False, "`--launcher ray` needs Ray, which is not installed: pip install ray"),
        ({"address": "auto"}, False, "`--address` needs Ray, which is not installed"),
        ({"address": "auto", "launcher": "local"}, True, "`--address` needs Ray: drop it"),
        ({"gpus_per_worker": 0.5}, False, "`--gpus-per-worker` needs Ray, which is not installed"),
        ({"gpus_per_worker": 0.5, "launcher": "local"}, True, "`--gpus-per-worker` needs Ray: drop it"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(settings: dict[str, Any], has_ray: bool, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_launcher(ClusterConfig(**settings), has_ray)
    assert str(raised.value).startswith(message)


def test_a_folder_called_ray_is_not_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert importlib.util.find_spec("ray") is not None, "the folder is found"
    assert not can_import_ray()
    (tmp_path / "ray" / "__init__.py").write_text("raise RuntimeError('it was imported')")
    importlib.invalidate_caches()
    assert can_import_ray()


def test_a_blocked_import_is_a_missing_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    class Block:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "ray":
                raise ImportError("blocked")

    monkeypatch.setattr(sys, "meta_path", [Block(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert not can_import_ray()
