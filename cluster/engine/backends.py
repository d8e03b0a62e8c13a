"""Backends by the names that settings use."""

from __future__ import annotations

import logging

from cluster.core_board import CoreShare, describe_share
from cluster.errors import ConfigError
from kernels.cpu.backend import CpuBackend
from kernels.cpu.build import library_path
from kernels.cpu.core_board import LentCore, Seat
from kernels.ops import Backend
from kernels.reference import ReferenceBackend

logger = logging.getLogger(__name__)

NAMES = ("cpu", "reference")


def must_compile(name: str) -> bool:
    """Whether `make_backend` will first compile for some seconds."""
    return name == "cpu" and not library_path().exists()


def make_backend(name: str, num_threads: int, share: CoreShare | None = None) -> Backend:
    """The backend called `name`, computing on `num_threads` threads; with `share`, on more while others rest.

    Raises:
        ConfigError: there is none of that name.
    """
    if name == "cpu":
        return CpuBackend(num_threads) if share is None else _sharing_backend(num_threads, share)
    if name == "reference":
        return ReferenceBackend("cpu")
    raise ConfigError(f"unknown backend `{name}`; use {' or '.join(NAMES)}")


def _sharing_backend(num_threads: int, share: CoreShare) -> Backend:
    lent = tuple(LentCore(core, share.owners[core]) for core in share.lent)
    try:
        backend = CpuBackend(num_threads, Seat(board=share.board, worker=share.worker, lent=lent))
    except OSError as error:  # costs speed only
        logger.warning("idle cores are not shared: %s", error)
        return CpuBackend(num_threads)
    if backend.board is not None:
        logger.info("this worker %s", describe_share(share))
    return backend
