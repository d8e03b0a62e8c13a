"""A run's directory: private, short, gone afterwards, and swept when its run died."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.runtime_dir import RuntimeDir, sweep


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as path:
        yield Path(path)


def test_private_and_gone_when_closed(base: Path) -> None:
    run = RuntimeDir.create(str(base))
    assert run.path.stat().st_mode & 0o777 == 0o700
    (run.path / "token").write_text("x")
    run.close()
    assert list(base.iterdir()) == []


def test_b140_what_a_killed_run_left_is_swept_by_the_next_and_living_runs_are_not(base: Path) -> None:
    code = (
        "import os, signal; from cluster.runtime_dir import RuntimeDir;"
        f"run = RuntimeDir.create({str(base)!r}); (run.path / 'sock').write_text('');"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    alive = RuntimeDir.create(str(base))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], timeout=30, cwd=Path(__file__).parents[1], check=False)
    (base / "baton-not-a-run").mkdir()
    assert len(list(base.iterdir())) == 3, "the second killed run swept the first"
    run = RuntimeDir.create(str(base))
    assert {path.name for path in base.iterdir()} == {alive.path.name, run.path.name, "baton-not-a-run"}
    assert sweep(base) == []
    run.close()
    alive.close()


def test_a_path_too_long_for_sockets_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"longer than 40 bytes.*--runtime-dir"):
        RuntimeDir.create(str(base / "a" / ("x" * 40)))


def test_a_place_that_cannot_hold_it_is_named(base: Path) -> None:
    (base / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make a runtime directory in"):
        RuntimeDir.create(str(base / "file"))
