"""What is measured: one real router process on a core of its own, scripted engines and the client on another.

1. A `Site` writes a model directory (the model's tokenizer, a long context), starts `python -m router` and
   the engines, and is entered when the cluster is ready.
2. `CpuWatch` notes how much CPU the router has used, ten times a second.
3. At its end the engines tell when they sent what (`Site.engines`).
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.load.client.capacity import process_cpu_s
from bench.load.client.target import Target, call
from bench.router_speed.engines import BLOCK_TOKENS, EngineLog, EngineSettings
from cluster.errors import BatonError
from cluster.ids import RouterId
from cluster.role_config import RouterConfig, dump_config

HOST = "127.0.0.1"
MODEL = "scripted"
MAX_MODEL_LEN = 131_072
START_S = 60.0
STOP_S = 20.0
WATCH_S = 0.1
NS = 1_000_000_000
TOKEN = "a-cluster-token-for-benchmarks"


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """`step_s`: between two steps of an engine. `profile`: where the router's goes; None: it makes none."""

    model_dir: Path  # of a prepared model: its tokenizer is used
    num_workers: int
    num_streams: int
    step_s: float
    router_core: int | None
    other_core: int | None
    profile: Path | None = None


@dataclass(slots=True)
class CpuWatch:
    """CPU seconds of a process over time, and those that the machine's host took from all cores."""

    pid: int
    moments_ns: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    stolen_s: list[float] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def used_s(self, start_ns: int, end_ns: int) -> float:
        return self._at(self.cpu_s, end_ns) - self._at(self.cpu_s, start_ns)

    def taken_s(self, start_ns: int, end_ns: int) -> float:
        """What the host ran others for while something here wanted to run: no fault of who is measured."""
        return self._at(self.stolen_s, end_ns) - self._at(self.stolen_s, start_ns)

    def _at(self, values: Sequence[float], moment_ns: int) -> float:
        """In between, a straight line."""
        right = min(max(1, bisect_left(self.moments_ns, moment_ns)), len(self.moments_ns) - 1)
        left = right - 1
        share = (moment_ns - self.moments_ns[left]) / (self.moments_ns[right] - self.moments_ns[left])
        return values[left] + share * (values[right] - values[left])

    def _watch(self) -> None:
        while True:
            self.moments_ns.append(time.perf_counter_ns())
            self.cpu_s.append(process_cpu_s(self.pid))
            self.stolen_s.append(_stolen_s())
            if self._over.wait(WATCH_S):
                return


class Site:
    """A context manager; inside, the cluster is ready at `target`. `engines` is there after it."""

    def __init__(self, settings: SiteSettings) -> None:
        self.target = Target(host=HOST, port=_free_port())
        self.engines: EngineLog | None = None
        self._settings = settings
        self._directory = tempfile.TemporaryDirectory(prefix="router-speed-")

    @property
    def path(self) -> Path:
        return Path(self._directory.name)

    def __enter__(self) -> Site:
        """
        Raises:
            BatonError: the router or the engines do not start in time.
        """
        ready, router_end = os.pipe()
        with os.fdopen(ready) as ready_line:
            self._router = self._start_router(router_end)
            os.close(router_end)
            self._engines: subprocess.Popen[str] | None = None
            try:
                self._await_health()
                self._engines = self._start_engines()
                if not select.select([ready_line], [], [], START_S)[0] or not ready_line.readline():
                    raise BatonError("the router is not ready: its log says why")
            except BaseException:
                self._stop()
                raise
        self.watch = CpuWatch(self._router.pid)
        self.watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.stop()
        self._stop()

    def _stop(self) -> None:
        if self._engines is not None:
            self._engines.communicate(timeout=STOP_S)  # which ends their stdin
            log = self.path / "log"
            if log.exists():
                self.engines = msgspec.msgpack.decode(log.read_bytes(), type=EngineLog)
        self._router.terminate()
        try:
            self._router.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._router.kill()
            self._router.wait()
        self._directory.cleanup()

    def _start_router(self, ready_fd: int) -> subprocess.Popen[str]:
        settings = self._settings
        write_model(settings.model_dir, self.path / "model")
        config = RouterConfig(
            cluster_token=TOKEN,
            served_model_name=MODEL,
            block_size=BLOCK_TOKENS,
            router=RouterId("router-0"),
            model_dir=str(self.path / "model"),
            host=HOST,
            port=self.target.port,
            control_address=f"unix:{self.path}/control",
            num_prefill=0,
            num_decode=settings.num_workers,
            drain_grace_s=1.0,
        )
        path = self.path / "router.json"
        path.write_bytes(dump_config(config))
        module = ["router"]
        if settings.profile is not None:
            module = ["bench.router_speed.profile", str(settings.profile)]
        command = [sys.executable, "-m", *module, str(path), "--ready-fd", str(ready_fd)]
        return subprocess.Popen([*pinned(settings.router_core), *command], pass_fds=[ready_fd], text=True)

    def _await_health(self) -> None:
        give_up_at = time.monotonic() + START_S
        while True:
            try:
                call(self.target, "GET", "/health", timeout_s=1.0)
                return
            except BatonError as error:
                if self._router.poll() is not None or time.monotonic() > give_up_at:
                    raise BatonError(f"the router does not start: {error}") from error
                time.sleep(0.05)

    def _start_engines(self) -> subprocess.Popen[str]:
        settings = self._settings
        command = [sys.executable, "-m", "bench.router_speed.engines"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        told = EngineSettings(
            address=f"unix:{self.path}/control",
            token=TOKEN,
            model_dir=str(settings.model_dir),
            max_model_len=MAX_MODEL_LEN,
            num_workers=settings.num_workers,
            max_num_seqs=-(-settings.num_streams // settings.num_workers),
            step_s=settings.step_s,
            core=settings.other_core,
            log=str(self.path / "log"),
        )
        process.stdin.write(msgspec.json.encode(told).decode() + "\n")
        process.stdin.flush()
        if process.stdout.readline() != "ready\n":
            process.wait(STOP_S)
            raise BatonError("the scripted engines do not start")
        return process


def _stolen_s() -> float:
    """Since the machine started, in steps of a hundredth of a second; 0 where the system does not say."""
    try:
        total = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return 0.0
    return int(total[8]) / os.sysconf("SC_CLK_TCK")


def pinned(core: int | None) -> list[str]:
    """What a command begins with that shall stay on one core."""
    return [] if core is None else ["taskset", "-c", str(core)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def write_model(source: Path, target: Path) -> None:
    """The tokenizer of a prepared model, with a context of `MAX_MODEL_LEN`."""
    target.mkdir()
    for path in source.iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_bytes())
    kept = {"vocab_size": config["vocab_size"], "max_position_embeddings": MAX_MODEL_LEN}
    (target / "config.json").write_text(json.dumps(kept))
