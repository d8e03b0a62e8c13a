"""A disk that is full when a result is written: one line that names the file, and the figures on screen."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.load.cli import app
from bench.load.cli_session import Session
from bench.load.mock.process import MockProcess, running_mock
from bench.load.results import files
from bench.load.results.result import requests_path
from cluster.errors import BatonError, ConfigError

LOAD = ("--output-tokens", "2", "--slo", "ttft=5s")
COMMANDS = {
    "run": ("--rate", "50", "--requests", "2", *LOAD),
    "sweep": ("--rates", "50,60", "--requests", "2", *LOAD),
    "max-goodput": ("--duration", "300ms", "--start-rate", "20", "--max-probes", "1", "--seeds", "1", *LOAD),
}


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    with running_mock() as running:
        yield running


class Disk:
    """Fails to keep what is written to a file of a certain ending."""

    def __init__(self, ending: str) -> None:
        self.ending = ending
        self.sync = os.fsync

    def fsync(self, number: int) -> None:
        if (
            os.readlink(f"/proc/self/fd/{number}")
            .removesuffix(".tmp")
            .rpartition(".")[0]
            .endswith(self.ending)
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.sync(number)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["--out", "--report"])
def test_a_full_disk_costs_the_file_alone(
    mock: MockProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    ending = ".json" if option == "--out" else ".html"
    monkeypatch.setattr(files.os, "fsync", Disk(ending).fsync)
    outputs = ("--out", str(tmp_path / "r.json"), "--report", str(tmp_path / "page.html"))
    result = CliRunner().invoke(app, [command, "--url", mock.target.url, *COMMANDS[command], *outputs])
    assert isinstance(result.exception, BatonError), (result.output, result.exception)
    assert not isinstance(result.exception, ConfigError)  # no fault of the command line: status 1
    message = str(result.exception)
    assert "No space left on device" in message
    assert "\n" not in message
    name = {"--report": "page.html", "--out": "r.rate-50.json" if command == "sweep" else "r.json"}[option]
    assert f"`{tmp_path / name}`" in message
    figures = "max goodput at 90%" if command == "max-goodput" else "2 planned, 2 sent, 2 ok"
    assert figures in result.output
    left = [path.name for path in tmp_path.iterdir()]
    assert not any(one.endswith(".tmp") for one in left)
    assert name not in left
    if option == "--report":  # what did fit is there, whole, and told
        written = next(one for one in left if one.endswith(".json"))
        json.loads((tmp_path / written).read_text())
        assert f"written: {tmp_path / written}" in result.output


def test_an_earlier_file_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    path.write_text("before")
    monkeypatch.setattr(files.os, "fsync", Disk(".json").fsync)
    with pytest.raises(BatonError, match="No space left"):
        files.write_atomically(path, [b"after"])
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_was_measured_is_kept_elsewhere_when_its_directory_is_gone(
    mock: MockProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The directory goes away between the check and the end; where it was, a file stands."""
    place, rescue = tmp_path / "place", tmp_path / "rescue"
    rescue.mkdir()
    monkeypatch.setattr(files.tempfile, "tempdir", str(rescue))
    measure = Session.measure

    def measure_and_lose(*arguments: Any, **named: Any) -> Any:
        measured = measure(*arguments, **named)
        if place.is_dir():
            place.rmdir()
            place.write_text("")
        return measured

    monkeypatch.setattr(Session, "measure", measure_and_lose)
    outputs = ("--out", str(place / "r.json"))
    result = CliRunner().invoke(app, [command, "--url", mock.target.url, *COMMANDS[command], *outputs])
    assert isinstance(result.exception, BatonError), (result.output, result.exception)
    assert not isinstance(result.exception, ConfigError)
    message = str(result.exception)
    (kept,) = [path for path in rescue.rglob("*.json")]
    assert f"what was measured is in `{kept}` instead" in message
    assert json.loads(kept.read_text())["schema_version"] == 1
    if command != "max-goodput":
        assert len(requests_path(kept).read_text().splitlines()) == 2


def test_where_nothing_can_be_kept_both_reasons_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.os, "fsync", Disk(".json").fsync)
    with pytest.raises(BatonError, match="nor could it be kept in a temporary directory") as raised:
        files.write_or_rescue([(tmp_path / "r.json", lambda: [b"{}"])])
    assert str(raised.value).count("No space left") == 2
