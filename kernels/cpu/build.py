"""Compiles the C++ kernels for this machine once and loads them.

1. The cache key is a hash of the sources, the flags, this CPU's features and torch's version.
2. `<cache>/kernels/baton_cpu_<key>.so` is loaded if it is there and whole: a warm start needs no compiler.
3. Else, under a file lock (workers that start together compile once), the sources are compiled side by side
   and linked to a temporary name that is renamed into place when complete. A digest goes behind the library:
   a file that was cut short would load, and end the process where a page is missing.

The library has a plain C interface (no torch or Python headers: seconds to compile instead of a minute) and
shares the OpenMP runtime torch has loaded. The cache is `BATON_CACHE_DIR`, `~/.cache/baton` by default.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
SOURCES = (
    "gemm.cpp",
    "gemm_amx.cpp",
    "gemm_amx_row.cpp",
    "gemm_coded.cpp",
    "gemm_coded_amx.cpp",
    "gemm_dot.cpp",
    "gemm_int8.cpp",
    "line_rows.cpp",
    "attention.cpp",
    "attention_amx.cpp",
    "attention_amx_bytes.cpp",
    "rowwise.cpp",
    "forward.cpp",
    "core_board.cpp",
    "lifeline.cpp",
    "probe.cpp",
    "sampling.cpp",
    "step_on.cpp",
)
HEADERS = (
    "amx_tiles.h",
    "amx_unit.h",
    "attention.h",
    "attention_amx.h",
    "attention_amx_bytes.h",
    "attention_bytes.h",
    "attention_chunk.h",
    "attention_head.h",
    "attention_item.h",
    "attention_pages.h",
    "attention_pairs.h",
    "attention_panels.h",
    "attention_quarters.h",
    "attention_tiles.h",
    "attention_weights.h",
    "core_board.h",
    "forward_model.h",
    "gated.h",
    "gemm.h",
    "gemm_amx.h",
    "gemm_amx_row.h",
    "gemm_amx_tiles.h",
    "gemm_coded.h",
    "gemm_coded_amx.h",
    "gemm_dot.h",
    "gemm_int8.h",
    "gemm_words.h",
    "operand.h",
    "places.h",
    "kv_ahead.h",
    "kv_rows.h",
    "line_rows.h",
    "processors.h",
    "guests.h",
    "rowwise.h",
    "sampling.h",
    "selection.h",
    "simd.h",
    "stopwatch.h",
    "stage.h",
    "team.h",
    "threads.h",
    "word_tile.h",
    "words.h",
)
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # a multiply-add is fused where the source says so, in every copy of a loop
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-fvisibility-inlines-hidden",  # else they are called as if another library could replace them
)
COMPILE_TIMEOUT_S = 300.0
_SEAL_BYTES = hashlib.sha256().digest_size  # behind the library, of all that is before


class BuildError(Exception):
    """The kernels cannot be compiled or loaded here; the message says why in one sentence."""


def load_library(flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The compiled kernels, from the cache or compiled now. Raises `BuildError`."""
    path = library_path(flags)
    if not is_whole(path):
        _compile_once(path, flags)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"`{path}` cannot be loaded: {error}; delete it, or set BATON_CACHE_DIR to where programs may run"
        ) from error


def is_whole(path: Path) -> bool:
    """Whether `path` is a library as it was compiled: neither missing nor damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == hashlib.sha256(content[:-_SEAL_BYTES]).digest()


def library_path(flags: tuple[str, ...] = FLAGS) -> Path:
    """Where the library for these sources, this CPU and this torch is or will be."""
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS):
        digest.update((SOURCE_DIR / name).read_bytes())
    digest.update("\n".join((*flags, _cpu_features(), torch.__version__, "digest behind")).encode())
    root = os.environ.get("BATON_CACHE_DIR") or "~/.cache/baton"
    return Path(root).expanduser() / "kernels" / f"baton_cpu_{digest.hexdigest()[:16]}.so"


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *sorted(set(features))])


def _compile_once(path: Path, flags: tuple[str, ...]) -> None:
    """Compile under the lock of `path`. Its holder compiles for at most `COMPILE_TIMEOUT_S` and the kernel
    drops the lock of a dead process, so the wait is bounded too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_whole(path):
            return
        if path.exists():
            logger.warning("`%s` is damaged: compiling it again", path)
        start_s = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                output = Path(scratch) / path.name
                _run_compiler(output, flags)
                with output.open("ab") as library:
                    library.write(hashlib.sha256(output.read_bytes()).digest())
                output.replace(path)
        except OSError as error:
            raise _unwritable(path.parent, error) from error
        logger.info("compiled the CPU kernels in %.1f s: %s", time.monotonic() - start_s, path)


def _unwritable(directory: Path, error: OSError) -> BuildError:
    return BuildError(
        f"the cache `{directory}` cannot be written: {error}; set BATON_CACHE_DIR to a directory that can"
    )


def _run_compiler(output: Path, flags: tuple[str, ...]) -> None:
    """Each source by a process of its own, as many at once as there are cores; then all linked."""
    compiler, deadline_s = _compiler(), time.monotonic() + COMPILE_TIMEOUT_S
    objects = {name: str(output.with_name(f"{name}.o")) for name in SOURCES}
    commands = [
        [compiler, *flags, "-c", str(SOURCE_DIR / name), "-o", target] for name, target in objects.items()
    ]
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(num_cores) as pool:
        for done in [pool.submit(_run, command, deadline_s) for command in commands]:
            done.result()
    _run([compiler, *flags, "-shared", *objects.values(), "-o", str(output)], deadline_s)


def _run(command: Sequence[str], deadline_s: float) -> None:
    try:
        left_s = max(0.0, deadline_s - time.monotonic())
        result = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"`{command[0]}` failed: {error}") from error
    if result.returncode != 0:
        first_error = next(
            (line for line in result.stderr.splitlines() if "error" in line), result.stderr[:200]
        )
        raise BuildError(f"`{command[0]}` failed with status {result.returncode}: {first_error.strip()}")


def _compiler() -> str:
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(
        f"no C++ compiler: `CXX` is {chosen}" if chosen else "no C++ compiler: install g++ or set `CXX`"
    )
