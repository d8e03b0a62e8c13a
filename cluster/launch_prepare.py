"""The model is converted in a process of its own, so that the launcher needs no torch and Ray starts meanwhile.

1. `prepare_in_subprocess` starts `python -m cluster.engine.prepare ... --json` and reads its standard output,
   one JSON object per line: {"phase": "converting", "done_bytes": n, "total_bytes": n}, ...
2. The last line is {"directory": path} or {"error": sentence}.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from cluster.config import ClusterConfig
from cluster.errors import ModelError

Progress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all (0: not known)

MODULE: Final = "cluster.engine.prepare"


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    directory: str | None = None
    error: str | None = None


def prepare_command(config: ClusterConfig) -> list[str]:
    """What converts the model of `config`, or finds it converted."""
    return [
        *(sys.executable, "-m", MODULE, "--model", config.model),
        *("--dtype", config.dtype, "--backend", config.backend, "--json"),
    ]


def prepare_in_subprocess(command: Sequence[str], env: Mapping[str, str], progress: Progress) -> str:
    """The directory of the prepared model. Blocks; call it in a thread.

    Raises:
        ModelError: with the one sentence that the process gave, or what it wrote before it died.
    """
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | dict(env),
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for text in process.stdout:
                line = msgspec.json.decode(text, type=_Line)
                if line.error is not None:
                    raise ModelError(line.error)
                if line.directory is not None:
                    return line.directory
                progress(line.phase, line.done_bytes, line.total_bytes)
        except BaseException:
            process.kill()
            raise
        exit_code = process.wait()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"preparing {command[4]} ended with status {exit_code}: {last or 'no message'}")
