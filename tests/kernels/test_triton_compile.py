"""Every kernel compiles for compute capability 9.0, on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def why_not() -> str | None:
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return "triton is not installed"
    tools = Path(found.origin).parent / "backends/nvidia/bin"
    missing = [tool for tool in ("ptxas", "cuobjdump") if not (tools / tool).exists()]
    return f"this build of triton brings no {' and no '.join(missing)}" if missing else None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_compile_for_hopper() -> None:
    """In one type and shape each; the command alone compiles them all, in two minutes."""
    if reason := why_not():
        pytest.skip(reason)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "kernels.triton.compile_check", "--capability", "9.0", "--quick"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()[1:]
    assert len(lines) > 20
    whole = [line for line in lines if line.startswith(("linear bf16", "attention bf16"))]
    assert all("mma m" in line for line in whole)
