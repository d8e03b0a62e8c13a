"""Starting a kernel: the one place that knows how, and what a failure means.

Multiplications and additions are never fused: kernels that must give the same bits would otherwise depend on
what the compiler finds to fuse in each.
"""

from __future__ import annotations

from subprocess import CalledProcessError
from typing import Any

import triton
from triton.compiler.errors import CompilationError
from triton.errors import TritonError

from kernels.triton.availability import interpreting

_OF_DRIVER = "Triton Error ["


class KernelError(RuntimeError):
    """A kernel cannot be compiled for this device, or asks for more than it has."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    num_warps: int = 4,
    num_stages: int = 2,
    **constants: Any,
) -> None:
    """Run `kernel` over `grid` on the current device; nothing happens for an empty grid.

    Raises:
        KernelError: it does not compile here; nothing was computed.
    """
    if 0 in grid:
        return
    if interpreting():
        from kernels.triton.interpreter import like_a_device

        with like_a_device():
            kernel[grid](*arguments, **constants)
        return
    try:
        kernel[grid](
            *arguments, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False, **constants
        )
    except (TritonError, RuntimeError, CalledProcessError) as error:
        if not _is_of_compiler(error):
            raise
        name = kernel.fn.__name__
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = (
            lines[-1] if isinstance(error, CompilationError) else lines[0]
        )  # below the source, or above all
        raise KernelError(f"`{name}`: {said}") from error


def _is_of_compiler(error: Exception) -> bool:
    """A pass that fails raises a plain `RuntimeError`, as the driver does, whose errors say so; torch has
    classes of its own. The last kind is of the C compiler, which makes what starts a kernel."""
    if isinstance(error, TritonError | CalledProcessError):
        return True
    return type(error) is RuntimeError and not str(error).startswith(_OF_DRIVER)


def next_power_of_2(value: int) -> int:
    power: int = triton.next_power_of_2(value)
    return power


def cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)
