"""`python -m cluster.engine.prepare`: what a person and what the launcher reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.prepare import CACHE_VARIABLE, main
from cluster.engine.prepared_model import MANIFEST
from kernels.cpu import build
from tests.support.copying_compiler import copying_compiler


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "baton"))


def command(model: Path | str, *more: str) -> int:
    return main(["--model", str(model), "--dtype", "fp32", "--backend", "reference", *more])


def test_prints_the_directory(checkpoint: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = checkpoint("llama").directory
    capsys.readouterr()
    assert command(model) == 0
    printed = capsys.readouterr()
    assert (Path(printed.out.strip()) / MANIFEST).is_file()
    assert Path(printed.out.strip()).is_relative_to(tmp_path / "baton" / "models")
    assert "converting: 0.00 GB in" in printed.err


def test_one_sentence_and_a_status_when_it_cannot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command(tmp_path / "nowhere") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"error: {tmp_path / 'nowhere'}: no such model file or directory\n"


def test_a_backend_that_cannot_run_here_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What `--backend triton` ends with where there is no GPU: workers and the launcher show this line."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--model", str(tmp_path), "--backend", "triton"]
    assert main(arguments) == main([*arguments, "--json"]) == 1
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("error: the triton backend needs ")
    assert json.loads(printed.out)["error"] == line.removeprefix("error: ")


def test_json_lines_for_the_launcher(checkpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = checkpoint("llama").directory
    capsys.readouterr()
    assert command(model, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["done_bytes"] == line["total_bytes"] for line in lines[:-1]].count(
        True
    ) == 2  # reading: 0 of 0
    assert {frozenset(line) for line in lines[:-1]} == {frozenset({"phase", "done_bytes", "total_bytes"})}
    assert lines[-2]["done_bytes"] == lines[-2]["total_bytes"] > 0
    assert (Path(lines[-1]["directory"]) / MANIFEST).is_file()
    assert command(model / "nowhere", "--json") == 1
    assert list(json.loads(capsys.readouterr().out)) == ["error"]


@pytest.fixture(scope="module")
def compiled() -> Path:
    """This machine's library, from its own cache."""
    build.load_library()
    return build.library_path()


@pytest.mark.parametrize("compiler", [None, "no-such-compiler"])
def test_the_launcher_hears_of_the_compiler(
    compiled: Path,
    checkpoint: Any,
    compiler: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    model = checkpoint("llama").directory
    monkeypatch.setenv("CXX", compiler or str(copying_compiler(tmp_path, compiled, tmp_path / "log")))
    capsys.readouterr()
    assert main(["--model", str(model), "--dtype", "fp32", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["phase"] == "compiling the kernels"
    notices = [line["notice"] for line in lines if "notice" in line]
    assert len(notices) == (1 if compiler else 0)
    assert all("running slower in torch: no C++ compiler" in notice for notice in notices)
