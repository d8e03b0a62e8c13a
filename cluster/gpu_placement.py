"""Which worker computes on which GPU, and what part of it is its own. Pure.

1. Workers are dealt out over a host's visible GPUs in turn (`deal_out`): with as many GPUs as workers each
   has one of its own. More workers than GPUs share, each GPU's memory in equal parts.
2. A worker's process sees its own GPU alone, through `CUDA_VISIBLE_DEVICES`, whoever starts it: the local
   launcher sets that, Ray does, and by hand `--device cuda:K` (`own_device`). In a process that saw all of
   them every thread would begin on GPU 0, and one forgotten call takes half a GiB there. An edge over
   `cuda_ipc` needs no more: it maps the peer's memory on its own GPU (`cluster.kv.pool_device`).
3. With Ray, who shares which GPU is Ray's choice: each worker asks for the same fraction (`ray_share`). Of a
   cluster that was joined only what nobody else holds is asked for (`free_ray_gpus`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.errors import ConfigError
from cluster.gpus import Gpus

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_RAY_STEPS: Final = 10_000  # Ray counts fractions of a GPU in steps of 1e-4
_DEVICE: Final = re.compile(r"cuda:(\d{1,4})")


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """`gpu`: its number among those visible here; `visible`: what `CUDA_VISIBLE_DEVICES` is for this worker;
    `num_sharers`: workers on that GPU, this one among them."""

    gpu: int
    visible: str
    num_sharers: int


def visible_names(num_gpus: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """How the visible GPUs are called in `CUDA_VISIBLE_DEVICES`, in order: as it has them, else by number."""
    given = environment.get(VISIBLE)
    if given is None:
        return tuple(map(str, range(num_gpus)))
    return tuple(name.strip() for name in given.split(","))[
        :num_gpus
    ]  # the driver stops at the first unknown


def deal_out(num_workers: int, gpus: Sequence[str]) -> tuple[GpuPlace, ...]:
    """Worker i → GPU i modulo their number; without GPUs nobody has a place. `gpus`: see `visible_names`."""
    if not gpus:
        return ()
    return tuple(
        GpuPlace(gpu, gpus[gpu], len(range(gpu, num_workers, len(gpus))))
        for gpu in (worker % len(gpus) for worker in range(num_workers))
    )


def ray_share(num_workers: int, num_gpus: int) -> tuple[float, int]:
    """(GPUs that each worker asks Ray for, workers that may meet on one GPU). Equal fractions always fit,
    however Ray packs them; unequal ones may not."""
    most_sharers = -(-num_workers // num_gpus)
    return (_RAY_STEPS // most_sharers) / _RAY_STEPS, most_sharers


@dataclass(frozen=True, slots=True)
class RayNode:
    """One node of a Ray cluster: all that it has, and what nobody holds now."""

    address: str
    num_cpus: float
    free_cpus: float
    num_gpus: float
    free_gpus: float


def free_ray_gpus(backend: str, nodes: Sequence[RayNode]) -> tuple[int, str | None]:
    """(whole GPUs that workers may ask for, what a person should know of that). Parts of GPUs that are left
    over are nobody's: they may lie on different ones.

    Raises:
        ConfigError: there are GPUs, workers have to have one, and others hold them all.
    """
    num_gpus, num_free = sum(node.num_gpus for node in nodes), sum(int(node.free_gpus) for node in nodes)
    if num_free >= num_gpus:
        return num_free, None
    held = f"others hold GPUs of this Ray cluster: {describe_free_gpus(nodes)}"
    if num_free:
        return num_free, f"{held}; workers take {num_free}"
    if backend == "auto":
        return 0, f"{held}; workers compute on CPUs (`ray list actors` says who holds them)"
    raise ConfigError(
        f"{held}: wait or end who holds them (`ray list actors` says who), or use `--backend cpu`"
    )


def describe_free_gpus(nodes: Sequence[RayNode]) -> str:
    """Node by node, for a person."""
    told = [
        f"{node.address} has {node.free_gpus:g} of {node.num_gpus:g} free" for node in nodes if node.num_gpus
    ]
    return ", ".join(told) or "no node has any"


def own_device(device: str, backend: str, gpus: Gpus, environment: Mapping[str, str]) -> str:
    """`CUDA_VISIBLE_DEVICES` of a process that computes on `device` (`cuda:K`) alone.

    Raises:
        ConfigError: that is no device, there is none of that number, or the backend uses none.
    """
    found = _DEVICE.fullmatch(device)
    if found is None:
        raise ConfigError(f"--device: `cuda:0`, `cuda:1` and so on name a GPU, not `{device}`")
    if backend not in ("triton", "auto"):
        raise ConfigError(
            f"--device {device}: the backend `{backend}` uses no GPU: choose `--backend triton`"
        )
    number, names = int(found[1]), visible_names(len(gpus), environment)
    if number < len(names):
        return names[number]
    shown = f" ({VISIBLE}={environment[VISIBLE]})" if VISIBLE in environment else ""
    if not names:
        raise ConfigError(f"--device {device}: {gpus.problem or 'no GPU is visible here'}{shown}")
    there = "only cuda:0 is" if len(names) == 1 else f"cuda:0 to cuda:{len(names) - 1} are"
    raise ConfigError(f"--device {device}: there is no such GPU here, {there}{shown}")


def check_places(
    kv_edge: str, names: Sequence[str], roles: Sequence[str], num_sharers: Sequence[int]
) -> None:
    """Whether KV can move as asked between workers that share GPUs. The three go together, one per worker.

    Raises:
        ConfigError: `nccl`, which takes no two ranks on one GPU, and both roles may meet on one.
    """
    if kv_edge == "nccl" and len(set(roles)) > 1 and max(num_sharers, default=1) > 1:
        sharing = [name for name, sharers in zip(names, num_sharers, strict=True) if sharers > 1]
        raise ConfigError(
            f"--kv-edge nccl takes no two workers on one GPU, and {', '.join(sharing)} share: start fewer "
            "workers, or use `--kv-edge cuda_ipc`"
        )


def describe_places(names: Sequence[str], places: Sequence[GpuPlace], memory_share: float | None) -> str:
    """One line for a person. `memory_share`: what was asked for, instead of equal parts."""
    by_gpu: dict[int, list[str]] = {}
    for name, place in zip(names, places, strict=True):
        by_gpu.setdefault(place.gpu, []).append(name)
    return "; ".join(
        f"GPU {gpu}: {', '.join(workers)}{_part(len(workers), memory_share)}"
        for gpu, workers in sorted(by_gpu.items())
    )


def describe_ray_share(num_gpus: float, num_sharers: int, memory_share: float | None) -> str:
    return f"Ray gives each worker {num_gpus:g} of a GPU{_part(num_sharers, memory_share)}"


def _part(num_sharers: int, memory_share: float | None) -> str:
    if num_sharers == 1:
        return ""
    if memory_share is not None:
        return f", each taking {memory_share:g} of what it finds free for KV"
    return f", each with 1/{num_sharers} of its memory"
