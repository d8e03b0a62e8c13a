"""Every kernel compiles for compute capability 9.0, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.triton import compile_check
from kernels.triton.compile_check import why_not

ROOT = Path(__file__).resolve().parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The command's exit status, or what it says with status 1."""
    monkeypatch.setattr(sys, "argv", ["compile_check", *arguments])
    monkeypatch.setattr(compile_check, "interpreting", lambda: False)
    with pytest.raises(SystemExit) as ended:
        compile_check.main()
    return ended.value.code


@pytest.mark.parametrize("capability", ["hopper", "9", "90", "7.5", ""])
def test_what_is_no_capability_is_refused(
    capability: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--capability", capability) == 2
    assert f"`{capability}`: one like 9.0, of at least 8.0" in capsys.readouterr().err


def test_what_is_missing_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_check.importlib.util, "find_spec", lambda name: None)
    assert run(monkeypatch) == "kernels are compiled with the package `triton`: pip install triton"


def test_a_label_that_no_kernel_has_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_check, "why_not", lambda: None)
    monkeypatch.setattr(
        compile_check, "cases", lambda capability, quick: iter([compile_check.Case("a", None, {})])
    )
    assert run(monkeypatch, "--only", "b") == "no kernel's label begins with `b`"


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "kernels.triton.compile_check", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_has_no_room_on_a_smaller_device_is_seen() -> None:
    if reason := why_not():
        pytest.skip(reason)
    common = compiled("--capability", "8.9", "--only", "attention bf16 group 4 head_dim 128 exact long")
    assert common.returncode == 0, common.stdout + common.stderr
    wide = compiled("--capability", "8.9", "--only", "attention bf16 group 8 head_dim 256 exact single all")
    assert wide.returncode == 1
    assert "bytes of shared memory, of 101376" in wide.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_compile_for_hopper() -> None:
    """In one type and shape each; the command alone compiles them all, in two minutes."""
    if reason := why_not():
        pytest.skip(reason)
    result = compiled("--capability", "9.0", "--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()[1:]
    assert len(lines) > 20
    whole = [line for line in lines if line.startswith(("linear bf16", "attention bf16"))]
    assert all("mma m" in line for line in whole)
