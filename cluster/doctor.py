"""Checks of this machine for `baton doctor`: each says what it found and, if that is bad, what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster import preflight
from cluster.config import ClusterConfig, num_available_cores, threads_per_worker
from cluster.core_board import can_share, describe_shares, share_cores
from cluster.engine.cpu_isa import find_isa
from cluster.errors import BatonError, ConfigError
from cluster.kv.memory import available_bytes

LIBRARIES: Final = ("torch", "ray", "transformers", "tokenizers", "fastapi", "uvicorn", "msgspec")
ISAS: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "asimd")
NEEDED_MEMORY_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """`is_fatal`: Baton cannot serve like this; otherwise a failed check only costs speed or a feature."""

    name: str
    is_ok: bool
    finding: str
    is_fatal: bool = True


def run_checks() -> tuple[Check, ...]:
    """All checks, in the order in which they would stop `baton serve`."""
    config = ClusterConfig()
    return (
        _python(),
        _packages(),
        *(_library(name) for name in LIBRARIES),
        _cpu(),
        _cores(config),
        _compiler(),
        _products(),
        _memory(),
        _attempt(
            "port",
            lambda: preflight.check_port(config.host, config.port),
            f"{config.host}:{config.port} is free",
        ),
        _attempt("demo model", lambda: preflight.check_model("demo"), "installed"),
    )


def _python() -> Check:
    return Check(
        "python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or later is needed)"
    )


def _packages() -> Check:
    return _attempt("packages", preflight.check_own_packages, "no foreign package under our names")


def _library(name: str) -> Check:
    try:
        return Check(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, f"missing: pip install {name}")


def _cpu() -> Check:
    flags = _cpu_flags()
    found = [isa for isa in ISAS if isa in flags]
    text = f"{num_available_cores()} cores, {', '.join(found) or 'no vector extension known to Baton'}"
    return Check("cpu", bool(found), text, is_fatal=False)


def _cores(config: ClusterConfig) -> Check:
    """Which worker would own which cores, with the default settings."""
    if not can_share():
        return Check("cores", False, "idle cores are shared on Linux only", is_fatal=False)
    names = [f"prefill-{i}" for i in range(config.prefill)] + [f"decode-{i}" for i in range(config.decode)]
    num_cores = num_available_cores()
    shares = share_cores("", len(names), threads_per_worker(config, num_cores), num_cores)
    return Check("cores", bool(shares), describe_shares(names, shares), is_fatal=False)


def _cpu_flags(file: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return frozenset()  # no Linux: the check says that nothing is known
    return frozenset(
        flag
        for line in lines
        if line.startswith(("flags", "Features"))
        for flag in line.split(":", 1)[1].split()
    )


def _compiler_path() -> str | None:
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compiler() -> Check:
    path = _compiler_path()
    if path is not None:
        return Check("compiler", True, path)
    return Check("compiler", False, "none: the kernels run in torch, slower; install g++", is_fatal=False)


def _products() -> Check:
    """The instructions of the kernels' matrix products."""
    try:
        choice = find_isa(_compiler_path(), os.environ)
    except ConfigError as error:
        return Check("products", False, str(error))
    return Check("products", not choice.is_lost, f"{choice.isa.value}: {choice.reason}", is_fatal=False)


def _memory() -> Check:
    num_bytes = available_bytes()
    text = f"{num_bytes / 1e9:.1f} GB available"
    is_ok = num_bytes >= NEEDED_MEMORY_BYTES
    return Check("memory", is_ok, text if is_ok else f"{text}, about 4 are needed", is_fatal=False)


def _attempt(name: str, check: Callable[[], object], finding: str) -> Check:
    try:
        check()
    except BatonError as error:
        return Check(name, False, str(error))
    return Check(name, True, finding)
