"""The model is converted in a process of its own: the launcher needs no torch, and Ray starts meanwhile.

1. `Preparation` starts `python -m cluster.engine.prepare --json` and follows its standard output, one JSON
   object per line: {"phase": "converting", "done_bytes": n, "total_bytes": n} or {"notice": sentence}, ...
2. The last line is {"directory": path} or {"error": sentence}; either ends up in the future `directory`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Final

import msgspec

from cluster.config import ClusterConfig
from cluster.engine.prepared_index import find_prepared
from cluster.errors import ModelError
from cluster.launch_plan import kernel_environment

Progress = Callable[[str, int, int], None]  # phase ("": it ended), bytes done, bytes in all (0: not known)

MODULE: Final = "cluster.engine.prepare"


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    notice: str | None = None
    directory: str | None = None
    error: str | None = None


def prepare_command(config: ClusterConfig) -> list[str]:
    """What converts the model of `config`, or finds it converted."""
    return [
        *(sys.executable, "-m", MODULE, "--json", "--model", config.model),
        *("--dtype", config.dtype, "--quantization", config.quantization, "--backend", config.backend),
    ]


def start_preparation(
    config: ClusterConfig,
    progress: Progress,
    say: Callable[[str], None],
    command: Sequence[str] | None = None,
) -> tuple[Future[str], Callable[[], None]]:
    """The prepared model's directory to come, at once if it lies in the cache; and how to end it early.

    `command` (what prepares the model, whatever the cache has) is given by tests only.
    """
    found = None
    if command is None:
        models = Path(config.cache_dir).expanduser() / "models"
        found = find_prepared(
            config.model, config.dtype, config.backend, models, config.quantization, config.gguf_weights
        )
    if found is not None:
        done: Future[str] = Future()
        done.set_result(str(found))
        return done, lambda: None
    preparation = Preparation(command or prepare_command(config), kernel_environment(config), progress, say)
    return preparation.directory, preparation.close


class Preparation:
    """One conversion under way. `progress` and `say` are called from a thread of its own."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        progress: Progress,
        say: Callable[[str], None],
    ) -> None:
        self.directory: Future[str] = Future()  # or the `ModelError` why there is none
        self._progress = progress
        self._say = say
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | environment,
        )
        assert self._process.stdout is not None
        self._thread = threading.Thread(target=self._follow, args=(self._process.stdout,), name="prepare")
        self._thread.start()

    def close(self) -> None:
        """End the process if it still runs, and everything of it."""
        self._process.kill()
        self._thread.join()
        self._errors.close()

    def _follow(self, output: IO[bytes]) -> None:
        with output:
            try:
                directory = self._read(output)
            except (ModelError, msgspec.DecodeError) as error:
                self._process.kill()
                self._process.wait()
                self.directory.set_exception(ModelError(str(error)))
            else:
                self._process.wait()
                self.directory.set_result(directory)

    def _read(self, output: IO[bytes]) -> str:
        for text in output:
            line = msgspec.json.decode(text, type=_Line)
            if line.error is not None:
                raise ModelError(line.error)
            if line.directory is not None:
                return line.directory
            if line.notice is not None:
                self._say(line.notice)
            else:
                self._progress(line.phase, line.done_bytes, line.total_bytes)
        status = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"preparing the model ended with status {status}: {last or 'it said nothing'}")
