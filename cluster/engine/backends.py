"""Backends by the names that settings use."""

from __future__ import annotations

import logging
import os

from cluster.core_board import CoreShare, describe_share
from cluster.errors import ConfigError
from kernels.coded import CodedFormError, requested_form
from kernels.cpu.backend import CpuBackend
from kernels.cpu.build import is_whole, library_path
from kernels.cpu.core_board import LentCore, Seat
from kernels.cpu.isa import IsaError
from kernels.ops import Backend
from kernels.quantization import Quantization
from kernels.reference import ReferenceBackend
from kernels.triton.availability import interpreting, why_unavailable
from kernels.triton.tiles import Mode, ModeError, requested_mode

logger = logging.getLogger(__name__)

AUTO = "auto"  # a GPU if there is one that can be used, else the CPU
NAMES = ("cpu", "triton", AUTO, "reference")
QUANTIZATIONS: dict[str, tuple[Quantization, ...]] = {  # by backend
    "cpu": tuple(Quantization),
    "reference": tuple(Quantization),
    "triton": (Quantization.NONE,),  # on a GPU, or in Triton's interpreter
}


def must_compile(name: str) -> bool:
    """Whether `make_backend` will first compile for some seconds."""
    return name == "cpu" and not is_whole(library_path())  # `auto` finds out when it is resolved


def resolve_backend(name: str) -> str:
    """`name`, or for `auto` what this process can use; the log says what and why."""
    if name != AUTO:
        return name
    reason = "Triton's interpreter is no GPU" if interpreting() else why_unavailable()
    if reason is None:
        logger.info("backend `triton`: a GPU is here")
        return "triton"
    logger.info("backend `cpu`: %s", reason)
    return "cpu"


def make_backend(
    name: str,
    num_threads: int,
    quantization: str = Quantization.NONE.value,
    share: CoreShare | None = None,
) -> Backend:
    """The backend called `name`, or that `auto` stands for, computing on `num_threads` threads, packing
    matrices as `quantization` says; with `share`, on more threads while others rest.

    Raises:
        ConfigError: there is none of that name, it does not compute with that quantization, not with the
            instructions that `BATON_CPU_ISA` demands, the form of weights of `BATON_GGUF_WEIGHTS` or the mode
            of `BATON_GPU_MODE`, or not on this machine.
    """
    name = resolve_backend(name)
    if name not in QUANTIZATIONS:
        raise ConfigError(f"unknown backend `{name}`; use {' or '.join(NAMES)}")
    chosen = find_quantization(name, quantization)
    try:
        requested_form(os.environ)  # whoever reads it later finds it right, whatever the backend
        if name == "reference":
            return ReferenceBackend("cpu", chosen)
        if name == "triton":
            return _triton_backend()
        if share is None:
            return CpuBackend(num_threads, chosen)
        return _sharing_backend(num_threads, chosen, share)
    except (IsaError, CodedFormError, ModeError) as error:
        raise ConfigError(str(error)) from error


def _triton_backend() -> Backend:
    mode = requested_mode(os.environ)
    if reason := why_unavailable():
        raise ConfigError(reason)
    from kernels.triton.backend import TritonBackend  # needs triton

    if mode is Mode.FAST:
        logger.info("GPU mode `fast`: the bits of a result may depend on what else is computed with it")
    return TritonBackend(mode)


def find_quantization(backend: str, name: str) -> Quantization:
    """
    Raises:
        ConfigError: there is none of that name, or the backend does not have it.
    """
    if name not in list(Quantization):
        raise ConfigError(f"unknown quantization `{name}`; use {' or '.join(Quantization)}")
    supported = QUANTIZATIONS[backend]
    if name not in supported:
        raise ConfigError(
            f"the {backend} backend does not compute with quantization `{name}`; use {' or '.join(supported)}"
        )
    return Quantization(name)


def _sharing_backend(num_threads: int, quantization: Quantization, share: CoreShare) -> Backend:
    lent = tuple(LentCore(core, share.owners[core]) for core in share.lent)
    try:
        backend = CpuBackend(
            num_threads, quantization, Seat(board=share.board, worker=share.worker, lent=lent)
        )
    except OSError as error:  # costs speed only
        logger.warning("idle cores are not shared: %s", error)
        return CpuBackend(num_threads, quantization)
    if backend.board is not None:
        logger.info("this worker %s", describe_share(share))
    return backend
