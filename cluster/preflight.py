"""Cheap checks before anything starts: each failure is one sentence that says what to do.

1. `check_own_packages` runs first in every process: our import names are common words (Hugging Face ships a
   `kernels`), and a foreign package in their place fails in ways nobody would guess.
2. The launcher then checks what would otherwise fail late: ports, model path, a GPU where KV is to move
   between them, limits that would limit nobody.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
from pathlib import Path
from typing import Final

import cluster
from cluster.allowed_hosts import parse_hosts
from cluster.allowed_origins import parse_origins
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.redis_server import PACKAGE, needs_own_redis
from cluster.redis_state import check_address

DISTRIBUTION: Final = "baton-serve"
PACKAGES: Final = ("cluster", "kernels", "prefill_worker", "decode_worker", "router", "bench")


def packages_root() -> Path:
    """The directory that our packages lie in."""
    return Path(next(iter(cluster.__path__))).resolve().parent


def check_own_packages(root: Path | None = None) -> None:
    """Every package of ours is the one beside this file.

    Raises:
        ConfigError: a foreign distribution is installed under one of our names, or shadows it.
    """
    root = root or packages_root()
    for name in PACKAGES:
        foreign = _foreign_distribution(name)
        if foreign is not None:
            raise ConfigError(
                f"a foreign package `{name}` {foreign} is installed and shadows Baton's: pip uninstall {name}"
            )
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places:
            raise ConfigError(f"the package `{name}` of Baton is missing: install Baton again")
        if Path(places[0]).resolve().parent != root:
            raise ConfigError(
                f"`import {name}` finds {places[0]} instead of {root / name}: remove one of them"
            )


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """`flag` is what sets the port, for the message.

    Raises:
        ConfigError: the port is taken, or the host is not an address of this machine.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on host `{host}`: {error.strerror}") from error
    for family, kind, protocol, _, address in infos:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except PermissionError as error:
                raise ConfigError(
                    f"port {port} needs more rights: choose one above 1023 with {flag}"
                ) from error
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {host} port {port}: {error.strerror}; choose another with {flag}"
                ) from error


def check_key_limits(config: ClusterConfig) -> None:
    """
    Raises:
        ConfigError: limits for API keys, and no keys: nobody would be limited.
    """
    for name in ("key_requests_per_min", "key_tokens_per_min", "key_concurrent"):
        if config.api_keys_file is None and getattr(config, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"`{flag}` limits API keys, and there are none: name their file with --api-keys-file"
            )


def check_request_limits(config: ClusterConfig) -> None:
    """
    Raises:
        ConfigError: two of them exclude each other.
    """
    if config.max_bodies_bytes is not None and config.max_bodies_bytes < config.max_body_bytes:
        raise ConfigError(
            f"`--max-bodies` ({config.max_bodies_bytes} bytes) is less than one body may have (`--max-body`, "
            f"{config.max_body_bytes} bytes), which could never arrive: raise the one or lower the other"
        )


def check_allowed_origins(config: ClusterConfig) -> None:
    """
    Raises:
        ConfigError: one of the allowed origins is none.
    """
    if config.allowed_origins is not None:
        parse_origins(config.allowed_origins)


def check_allowed_hosts(config: ClusterConfig) -> None:
    """
    Raises:
        ConfigError: one of the allowed hosts is none.
    """
    if config.allowed_hosts is not None:
        parse_hosts(config.allowed_hosts)


def check_api_keys(config: ClusterConfig) -> None:
    """Before anything is started; what its lines say is for the router.

    Raises:
        ConfigError: the file of API keys cannot be read, or has none.
    """
    if config.api_keys_file is None:
        return
    path = Path(config.api_keys_file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
    if not any(line.partition("#")[0].strip() for line in text.splitlines()):
        raise ConfigError(f"{path} has no API key: nobody could use the server")


def check_redis(config: ClusterConfig) -> None:
    """
    Raises:
        ConfigError: routers are to share limits through a Redis, and what it takes is not installed.
    """
    needed = ["redis"] if config.redis is not None else []
    if needs_own_redis(config):
        needed = ["redis", PACKAGE]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"routers share the limits of API keys through Redis: pip install {name.replace('_', '-')}"
            )
    if config.redis is not None:
        check_address(config.redis)


def check_kv_edge(config: ClusterConfig) -> None:
    """Of workers on this machine; those of a cluster that is joined look for themselves.

    Raises:
        ConfigError: KV is to move between GPUs, and there is none here, or the backend uses none.
    """
    if config.kv_edge in ("auto", "shm", "gloo") or config.address is not None:
        return
    from cluster.kv.edges import check_kind, check_memory, edge_kind  # torch: only who wants a GPU waits

    kind = edge_kind(config.kv_edge)
    check_kind(kind)
    if config.backend in ("cpu", "reference"):
        check_memory(kind, "cpu")


def check_model(model: str) -> str:
    """The model's name, if the path leads to something that looks like one. Reads no weights.

    Raises:
        ModelError: nothing is there, or it is not a model.
    """
    from cluster.engine.model_source import resolve_model

    return resolve_model(model).name


def _foreign_distribution(name: str) -> str | None:
    """Version of an installed distribution that is called like our package `name`, if there is one."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return distribution.version
