"""Which instructions workers here will use for products, found out without torch: for `baton doctor`."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.errors import ConfigError
from kernels.cpu.isa import (
    IsaChoice,
    IsaError,
    acquire_without_library,
    choose_isa,
    cpu_has_amx,
    has_dot_without_library,
    requested_isa,
)


def find_isa(compiler: str | None, environment: Mapping[str, str]) -> IsaChoice:
    """What the kernels choose once `compiler` has built them.

    Raises:
        ConfigError: `BATON_CPU_ISA` asks for what is not to be had here.
    """
    try:
        return choose_isa(
            requested_isa(environment),
            lambda: acquire_without_library(compiler),
            cpu_has_amx,
            lambda: has_dot_without_library(compiler),
        )
    except IsaError as error:
        raise ConfigError(str(error)) from error
