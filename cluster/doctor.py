"""Checks of this machine for `baton doctor`: each says what it found and, if that is bad, what to do.

The settings are those that `baton serve` would have without flags: environment, file, defaults.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from cluster import preflight
from cluster.admin_address import admin_address
from cluster.client import ClientError, get_json
from cluster.config import ClusterConfig, num_available_cores, threads_per_worker
from cluster.config_sources import resolve_config
from cluster.core_board import can_share, describe_shares, share_cores
from cluster.edge_speed import loopback_bytes_per_s, shm_bytes_per_s
from cluster.engine.cpu_isa import find_isa
from cluster.errors import BatonError, ConfigError
from cluster.gpu_placement import deal_out, describe_places, visible_names
from cluster.gpus import Gpus, find_gpus, may_use_gpus
from cluster.kv.memory import available_bytes

LIBRARIES: Final = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "msgspec")
ISAS: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "asimd")
NEEDED_MEMORY_BYTES: Final = 4 << 30
NEEDED_FILES: Final = 1024
SLOW_SHM_BYTES_PER_S: Final = 1e9
# Set by hand, they win over what Baton gives each process.
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY")


@dataclass(frozen=True, slots=True)
class Check:
    """`is_fatal`: Baton cannot serve like this; otherwise a failed check only costs speed or a feature."""

    name: str
    is_ok: bool
    finding: str
    is_fatal: bool = True


def run_checks(environment: Mapping[str, str]) -> tuple[Check, ...]:
    """All checks, in the order in which they would stop `baton serve`."""
    config, settings = _settings(environment)
    return (
        _system(),
        _python(),
        settings,
        _packages(),
        *(_library(name) for name in LIBRARIES),
        _ray(),
        _cpu(),
        _cores(config),
        _threads(environment),
        _compiler(),
        _products(),
        _memory(),
        _shared_memory(),
        _loopback(),
        gpus_check(config, find_gpus(environment), environment),
        _kv_edge(config),
        _open_files(),
        *_ports(config),
        _attempt("model", lambda: preflight.check_model(config.model), f"{config.model} is there"),
    )


def _system() -> Check:
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    is_linux = sys.platform == "linux"
    return Check("system", is_linux, text if is_linux else f"{text}: Baton serves on Linux", is_fatal=False)


def _settings(environment: Mapping[str, str]) -> tuple[ClusterConfig, Check]:
    """As `baton serve` would have them; the defaults where they cannot be read."""
    try:
        resolved = resolve_config({}, environment)
    except ConfigError as error:
        return ClusterConfig(), Check("settings", False, str(error))
    own = [f"{name} from {origin}" for name, origin in resolved.origins.items()]
    return resolved.config, Check("settings", True, ", ".join(own) or "all defaults")


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


def _ray() -> Check:
    """Only clusters of several machines need it."""
    check = _library("ray")
    if check.is_ok:
        return check
    text = "missing: processes are started on this machine only, without it; pip install ray for more"
    return Check("ray", False, text, is_fatal=False)


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


def _threads(environment: Mapping[str, str]) -> Check:
    own = [f"{name}={environment[name]}" for name in THREAD_VARIABLES if name in environment]
    return Check("threads", True, ", ".join(own) or "no variable of the environment sets them")


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


def _shared_memory() -> Check:
    """What the `shm` edge is made of, and how fast it copies here."""
    try:
        speed = shm_bytes_per_s()
    except OSError as error:
        return Check("shm edge", False, f"no shared memory: {error.strerror}; use `--kv-edge gloo`")
    text = f"{speed / 1e9:.1f} GB/s from one mapping to another"
    is_ok = speed >= SLOW_SHM_BYTES_PER_S
    return Check("shm edge", is_ok, text if is_ok else f"{text}: this machine is busy", is_fatal=False)


def _loopback() -> Check:
    try:
        speed = loopback_bytes_per_s()
    except OSError as error:
        return Check("loopback", False, f"it cannot be used: {error.strerror}")
    return Check("loopback", True, f"{speed / 1e9:.1f} GB/s over one TCP stream")


def gpus_check(config: ClusterConfig, gpus: Gpus, environment: Mapping[str, str]) -> Check:
    """Which there are, which reach one another's memory, and which worker would compute where."""
    if gpus.problem is not None or not gpus:
        problem = gpus.problem or "the NVIDIA driver shows no GPU"
        if config.backend == "triton":
            return Check("gpus", False, f"{problem}: the backend `triton` needs one")
        return Check("gpus", True, f"{problem}; the backend `{config.backend}` needs none")
    kinds = [
        f"{name} ({size / 2**30:.0f} GiB)" for name, size in zip(gpus.names, gpus.memory_bytes, strict=True)
    ]
    text = [f"{len(gpus)}: {', '.join(kinds)}"]
    strangers = gpus.strangers()
    if strangers:
        pairs = ", ".join(f"{one} and {other}" for one, other in strangers)
        text.append(f"`cuda_ipc` not between {pairs}: KV goes by nccl or gloo there")
    elif len(gpus) > 1:
        text.append("each reaches the others' memory")
    if may_use_gpus(config) and config.gpus_per_worker == 0:
        names = [f"prefill-{i}" for i in range(config.prefill)] + [
            f"decode-{i}" for i in range(config.decode)
        ]
        places = deal_out(len(names), visible_names(len(gpus), environment))
        text.append(describe_places(names, places, config.gpu_memory_share))
    return Check("gpus", True, "; ".join(text))


def _kv_edge(config: ClusterConfig) -> Check:
    """The one that was asked for."""
    return _attempt("kv edge", partial(preflight.check_kv_edge, config), f"`{config.kv_edge}` can be used")


def _open_files() -> Check:
    """A connection is a file, and so is much else."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_ok = allowed == resource.RLIM_INFINITY or allowed >= NEEDED_FILES
    number = "no limit" if allowed == resource.RLIM_INFINITY else f"{allowed} allowed"
    text = number if is_ok else f"{number}: raise it, e.g. `ulimit -n 65536`"
    return Check("open files", is_ok, text, is_fatal=False)


def _ports(config: ClusterConfig) -> list[Check]:
    """A cluster of ours that serves there already is no fault of the machine."""
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::", "") else config.host
    url = f"http://{host}:{config.port}"
    try:
        running = get_json(url, "/version")["version"]
    except (ClientError, KeyError, TypeError):
        running = None
    if running is not None:
        return [Check("port", False, f"Baton {running} serves at {url} already", is_fatal=False)]
    addresses = [("port", (config.host, config.port), "--port")]
    if (admin := admin_address(config)) is not None:
        addresses += [
            ("admin port", (admin[0], admin[1] + number), "--admin-port") for number in range(config.routers)
        ]
    return [
        _attempt(name, partial(preflight.check_port, *address, flag), f"{address[0]}:{address[1]} is free")
        for name, address, flag in addresses
    ]


def _attempt(name: str, check: Callable[[], object], finding: str) -> Check:
    try:
        check()
    except BatonError as error:
        return Check(name, False, str(error))
    return Check(name, True, finding)
