"""Which cause `baton serve` tells if several things are wrong at once."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NoReturn

import pytest

from cluster import launch
from cluster.config_sources import resolve_config
from cluster.errors import BatonError, ConfigError, ModelError


class SilentReport:
    def phase(self, name: str) -> None:
        assert name == "Ray"

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None: ...

    def say(self, text: str) -> None: ...


def start(monkeypatch: pytest.MonkeyPatch, directory: Future[str]) -> str:
    """A start whose Ray fails; the sentence it ends with."""

    def no_ray(*_: object) -> NoReturn:
        raise ConfigError("Ray does not start")

    ended: list[bool] = []
    monkeypatch.setattr(launch, "start_preparation", lambda *_: (directory, lambda: ended.append(True)))
    monkeypatch.setattr(launch, "_start_ray", no_ray)
    monkeypatch.setattr(launch, "_site", lambda *_: None)
    config = resolve_config({"model": "m", "served_model_name": "m", "launcher": "ray"}, {}).config
    report: Any = SilentReport()
    nothing: Any = None
    with pytest.raises(BatonError) as told:
        launch._run(config, report, {}, None, nothing, None, nothing)
    assert ended == [True]
    return str(told.value)


def test_a_model_that_cannot_be_loaded_is_told_before_a_ray_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken: Future[str] = Future()
    broken.set_exception(ModelError("m: unknown architecture"))
    assert start(monkeypatch, broken) == "m: unknown architecture"


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_ray_that_does_not_start_is_told_else(monkeypatch: pytest.MonkeyPatch, is_prepared: bool) -> None:
    directory: Future[str] = Future()
    if is_prepared:
        directory.set_result("prepared")
    assert start(monkeypatch, directory) == "Ray does not start"
