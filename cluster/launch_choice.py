"""Who starts the processes: Ray, or the launcher itself on this machine. A pure choice and one look."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from cluster.config import ClusterConfig
from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LauncherChoice:
    """`notice`: what a person should know of it, if anything."""

    launcher: Literal["ray", "local"]
    notice: str | None = None


def choose_launcher(config: ClusterConfig, has_ray: bool) -> LauncherChoice:
    """`--launcher`, with `auto` decided: Ray where it can be imported.

    Raises:
        ConfigError: Ray is missing, or another setting cannot be had without it.
    """
    if config.launcher == "ray" and not has_ray:
        raise ConfigError("`--launcher ray` needs Ray, which is not installed: pip install ray")
    if has_ray and config.launcher != "local":
        return LauncherChoice("ray")
    needed = (
        "needs Ray: drop it" if has_ray else "needs Ray, which is not installed: pip install ray, or drop it"
    )
    if config.address is not None:
        raise ConfigError(f"`--address` {needed}")
    if config.gpus_per_worker > 0:
        raise ConfigError(
            f"`--gpus-per-worker` {needed}; workers are dealt out over the GPUs there are anyway"
        )
    if config.launcher == "local":
        return LauncherChoice("local")
    return LauncherChoice(
        "local", "Ray is not installed: the processes are started without it, on this machine"
    )


def can_import_ray() -> bool:
    """Whether it is installed; nothing is imported."""
    try:
        spec = importlib.util.find_spec("ray")
    except ImportError:
        return False
    return spec is not None and spec.origin is not None  # a mere folder of that name has none
