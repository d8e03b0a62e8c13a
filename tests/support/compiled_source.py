"""C++ beside a test, compiled against the kernels' headers: what they do that no call from Python shows."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from kernels.cpu import build


def compiled(source: Path, target: Path, machine: str = "native") -> ctypes.CDLL:
    """`source` for `machine` as a library in `target`; fast to make, not fast, free of warnings."""
    path = target / f"{source.stem}.so"
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", "-march=native")]
    command = [
        build._compiler(),
        *flags,
        f"-march={machine}",
        "-O0",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
        "-shared",
    ]
    command += ["-I", str(build.SOURCE_DIR), str(source), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(path))
