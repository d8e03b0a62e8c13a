"""`python -m cluster.engine.prepare_process MODEL DTYPE BACKEND`: prepare a model, telling how far it is.

Writes one JSON object per line to standard output, for `cluster.launch_prepare`:

1. {"phase": "kernels"} while the backend compiles or loads its kernels.
2. {"phase": "converting", "done_bytes": n, "total_bytes": n} at most ten times a second.
3. {"directory": path} at the end, or {"error": sentence}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Final, cast

from cluster.config import BackendName, num_available_cores
from cluster.engine.backends import make_backend
from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import prepare_model
from cluster.errors import BatonError
from cluster.preflight import check_packages

INTERVAL_S: Final = 0.1


class ProgressLines:
    """Writes progress, but no more often than every `INTERVAL_S` within one phase."""

    def __init__(self) -> None:
        self._phase = ""
        self._written_at = 0.0

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if phase == self._phase and now - self._written_at < INTERVAL_S and done_bytes < total_bytes:
            return
        self._phase, self._written_at = phase, now
        write_line(phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)


def write_line(**fields: str | int) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    _program, model, dtype, backend_name = sys.argv
    try:
        check_packages()
        write_line(phase="kernels")
        backend = make_backend(cast(BackendName, backend_name), num_available_cores())
        prepared = prepare_model(model, Dtype(dtype), backend, ProgressLines())
    except BatonError as error:
        write_line(error=str(error))
        sys.exit(1)
    write_line(directory=str(prepared.directory))


if __name__ == "__main__":
    main()
