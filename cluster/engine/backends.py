"""Backends by the names that settings use."""

from __future__ import annotations

from cluster.errors import ConfigError
from kernels.cpu.backend import CpuBackend
from kernels.cpu.build import library_path
from kernels.ops import Backend
from kernels.reference import ReferenceBackend

NAMES = ("cpu", "reference")


def must_compile(name: str) -> bool:
    """Whether `make_backend` will first compile for some seconds."""
    return name == "cpu" and not library_path().exists()


def make_backend(name: str, num_threads: int) -> Backend:
    """The backend called `name`, computing on `num_threads` threads.

    Raises:
        ConfigError: there is none of that name.
    """
    if name == "cpu":
        return CpuBackend(num_threads)
    if name == "reference":
        return ReferenceBackend("cpu")
    raise ConfigError(f"unknown backend `{name}`; use {' or '.join(NAMES)}")
