"""`baton serve` from its settings to its exit code.

1. Check what would otherwise fail late: packages, port, model path. Nothing has started yet.
2. Start a Redis where several routers need one, and Ray if it is the launcher, while a process of its own
   prepares the model.
3. The `Driver` places a process per role and does what the `Supervisor` decides, until it is over. SIGINT and
   SIGTERM stop it; SIGUSR1 (`baton restart`) replaces the workers one after the other.
4. Whatever happened: kill the roles, leave Ray, end every process that is left, remove the directory. Should
   this process be killed, its guard does the same.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster import preflight
from cluster.admin_address import admin_address
from cluster.clock import MonotonicClock
from cluster.cluster_token import exposure, resolve_cluster_token, write_private
from cluster.config import ClusterConfig, num_available_cores
from cluster.core_board import BoardFile, can_share
from cluster.errors import BatonError, ConfigError
from cluster.gpu_placement import RayNode, free_ray_gpus, visible_names
from cluster.gpus import find_gpus, may_use_gpus
from cluster.launch_choice import can_import_ray, choose_launcher
from cluster.launch_driver import Driver, Report
from cluster.launch_events import Finish
from cluster.launch_guard import Guard
from cluster.launch_local import LocalSession
from cluster.launch_plan import (
    ENTRIES,
    QUIET_RAY,
    Site,
    describe_gpus,
    plan_roles,
    private_ray_environment,
)
from cluster.launch_prepare import start_preparation
from cluster.launch_processes import become_subreaper, children, end_children
from cluster.launch_session import Session
from cluster.launch_supervisor import Supervisor
from cluster.redis_server import EmbeddedRedis, needs_own_redis
from cluster.runtime_dir import RuntimeDir

END_GRACE_S: Final = 3.0  # what Ray's own processes get to end by themselves

RESTART_SIGNAL: Final = signal.SIGUSR1
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def check(config: ClusterConfig) -> ClusterConfig:
    """The settings with everything filled in that can be known before anything starts.

    Raises:
        BatonError: a setting cannot work here, in one sentence.
    """
    preflight.check_own_packages()
    preflight.check_key_limits(config)
    preflight.check_api_keys(config)
    preflight.check_request_limits(config)
    preflight.check_allowed_origins(config)
    preflight.check_allowed_hosts(config)
    preflight.check_redis(config)
    preflight.check_kv_edge(config)
    choose_launcher(config, can_import_ray())
    model_name = preflight.check_model(config.model)
    preflight.check_port(config.host, config.port)
    port = config.port or _free_port(config.host)
    admin = admin_address(msgspec.structs.replace(config, port=port))
    if admin is not None:
        admin = admin[0], admin[1] or _free_port(admin[0])
        for number in range(config.routers):
            preflight.check_port(admin[0], admin[1] + number, flag="--admin-port")
    state_dir = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    log_dir = Path(config.log_dir or f"{state_dir}/baton/logs/{port}").expanduser()
    return msgspec.structs.replace(
        config,
        port=port,
        admin_port=None if admin is None else admin[1],
        served_model_name=config.served_model_name or model_name,
        log_dir=str(log_dir.absolute()),
    )


def serve(
    config: ClusterConfig,
    report: Report,
    *,
    entries: Mapping[str, str] = ENTRIES,
    command: Sequence[str] | None = None,
) -> Finish:
    """Run a cluster until it is stopped by a signal or cannot go on. `config` comes from `check`.

    Blocks the main thread and owns its SIGINT and SIGTERM. `entries` and `command` (what prepares the
    model) are given by tests only.

    Raises:
        BatonError: it could not even begin; nothing is left running.
        KeyboardInterrupt: a signal came while Ray was starting; nothing is left running.
    """
    become_subreaper()
    with _Signals() as signals:
        runtime_dir = RuntimeDir.create(config.runtime_dir)
        guard = Guard(runtime_dir.path)
        keep = children()
        board = BoardFile() if can_share() else None
        redis = None
        try:
            if needs_own_redis(config):
                redis = EmbeddedRedis(runtime_dir.path)
                config = msgspec.structs.replace(config, redis=redis.url)
            return _run(config, report, entries, command, runtime_dir, board, signals)
        finally:
            signals.on_signal = lambda: None  # the end is near and bounded: nothing may cut it short
            if redis is not None:
                redis.close()
            end_children(keep, END_GRACE_S)
            guard.close()
            if board is not None:
                board.close()
            runtime_dir.close()


def _run(
    config: ClusterConfig,
    report: Report,
    entries: Mapping[str, str],
    command: Sequence[str] | None,
    runtime_dir: RuntimeDir,
    board: BoardFile | None,
    signals: _Signals,
) -> Finish:
    if config.cluster_token_file is not None:
        warning = exposure(config.cluster_token_file)
        if warning is not None:
            report.say(warning)
    choice = choose_launcher(config, can_import_ray())
    if choice.notice is not None:
        report.say(choice.notice)
    if choice.launcher == "ray":
        report.phase("Ray")
    directory, give_up = start_preparation(config, report.progress, report.say, command)
    try:
        site = _site(config, runtime_dir, board)
        session: Session
        if choice.launcher == "ray":
            try:
                session, site = _start_ray(config, site, runtime_dir, entries, report.say)
            except BatonError:
                if directory.done():
                    directory.result()  # a model that cannot be loaded is told before what else is wrong
                raise
        else:
            session = LocalSession(report.say)
        signals.install()  # Ray has put its own handler in place
        try:
            specs = plan_roles(config, site, entries)
            if (gpus := describe_gpus(config, site)) is not None:
                report.say(gpus)
            report.phase("model")
            supervisor = Supervisor(
                roles=[(spec.name, spec.role) for spec in specs],
                start_timeout_s=config.start_timeout_s,
                drain_grace_s=config.drain_grace_s,
            )
            driver = Driver(session, specs, supervisor, report, MonotonicClock())
            return asyncio.run(_drive(driver, directory, signals))
        finally:
            signals.on_signal = lambda: None
            session.close()
    finally:
        give_up()


async def _drive(driver: Driver, directory: Future[str], signals: _Signals) -> Finish:
    loop = asyncio.get_running_loop()
    signals.on_signal = lambda: loop.call_soon_threadsafe(driver.request_stop)
    signals.on_restart = lambda: loop.call_soon_threadsafe(driver.request_restart)
    try:
        return await driver.run(directory)
    finally:
        signals.on_signal = signals.on_restart = lambda: None
        driver.kill_all()


def _site(config: ClusterConfig, runtime_dir: RuntimeDir, board: BoardFile | None) -> Site:
    assert config.served_model_name is not None, "`check` fills it in"
    assert config.log_dir is not None, "`check` fills it in"
    return Site(
        served_model_name=config.served_model_name,
        runtime_dir=str(runtime_dir.path),
        log_dir=config.log_dir,
        cluster_token=resolve_cluster_token(
            config.cluster_token_file, os.environ, runtime_dir.path / "cluster_token"
        ),
        num_cores=num_available_cores(),
        core_board=board.path if board is not None and config.idle_cores == "lend" else None,
        gpus=_visible_gpus(config),
        launcher_pid=os.getpid(),
    )


def _visible_gpus(config: ClusterConfig) -> tuple[str, ...]:
    """GPUs of this machine that workers are to be dealt out over. Where there are none, the workers say so:
    what they need is their backend's to know."""
    if not may_use_gpus(config) or config.gpus_per_worker > 0 or config.address is not None:
        return ()
    return visible_names(len(find_gpus(os.environ)), os.environ)


def _start_ray(
    config: ClusterConfig,
    site: Site,
    runtime_dir: RuntimeDir,
    entries: Mapping[str, str],
    say: Callable[[str], object],
) -> tuple[Session, Site]:
    """A private Ray, or the one at `address`; and the site as it is there.

    Raises:
        ConfigError: Ray cannot be imported, started or joined; or others hold all its GPUs, and it takes one.
    """
    for name, value in QUIET_RAY.items():
        os.environ.setdefault(name, value)
    if config.address is None:
        auth_token = runtime_dir.path / "ray_token"
        write_private(auth_token, secrets.token_hex(32).encode())
        os.environ.update(private_ray_environment(auth_token))
    try:
        from cluster.launch_ray import RaySession, living_nodes  # reads that environment when it is imported
    except ImportError as error:
        raise ConfigError(
            f"Ray is installed and cannot be imported ({error}): install it again, or use --launcher local"
        ) from error

    if config.address is None:
        site = replace(site, gpus=(), ray_gpus=len(site.gpus))
        specs = plan_roles(config, site, entries)
        return RaySession.start_private(runtime_dir.path / "r", specs, site.ray_gpus or None), site
    session = RaySession.join(config.address)
    try:
        return session, joined_site(config, site, living_nodes(), session.host, say)
    except BatonError:
        session.close()
        raise


def joined_site(
    config: ClusterConfig, site: Site, nodes: Sequence[RayNode], host: str, say: Callable[[str], object]
) -> Site:
    """The site in a cluster of these nodes: what others hold is not there. `host`: of this machine.

    Raises:
        ConfigError: see `free_ray_gpus`.
    """
    num_gpus = 0
    if may_use_gpus(config) and config.gpus_per_worker == 0:
        num_gpus, notice = free_ray_gpus(config.backend, nodes)
        if notice is not None:
            say(notice)
    return replace(
        site,
        ray_cpus=sum(node.free_cpus for node in nodes),
        ray_gpus=num_gpus,
        router_host=host,
        router_control_ports=tuple(_free_port(host) for _ in range(config.routers)),
        core_board=None,  # which workers share a machine is Ray's choice
    )


class _Signals:
    """SIGINT and SIGTERM call `on_signal`; until there is a loop to stop, they interrupt the main thread.
    SIGUSR1 calls `on_restart`, which does nothing until then."""

    def __init__(self) -> None:
        self.on_signal: Callable[[], object] = self._interrupt
        self.on_restart: Callable[[], object] = lambda: None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Signals:
        self._previous = {number: signal.getsignal(number) for number in (*_SIGNALS, RESTART_SIGNAL)}
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, lambda _number, _frame: self.on_signal())
        signal.signal(RESTART_SIGNAL, lambda _number, _frame: self.on_restart())

    def _interrupt(self) -> None:
        raise KeyboardInterrupt


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
