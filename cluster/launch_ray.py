"""Ray as the launcher uses it: a session, private to this machine or joined, and the roles' actors.

A private Ray listens on loopback only, without dashboard or usage statistics, with the smallest object
store, its session below the run's own directory, and a token of its own: two runs never meet, and all of it
can be removed afterwards. It must be started on the main thread: Ray's processes die with the thread that
started them, which is also what ends them when this process is killed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.errors import ConfigError
from cluster.gpu_placement import RayNode, describe_free_gpus
from cluster.launch_actors import NUM_THREADS, RoleActor
from cluster.launch_plan import RoleSpec
from cluster.launch_processes import kill_process, open_visible, wait_ended
from cluster.launch_session import PLACE_TIMEOUT_S
from cluster.role_config import dump_config

OBJECT_STORE_BYTES: Final = 80 << 20  # about the least that Ray takes; nothing of ours goes through it
END_TIMEOUT_S: Final = 2.0

_SYSTEM_CONFIG: Final = {
    # Idle Python workers cost seconds of CPU at start, and every role gets a process of its own anyway.
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    # Ray's own daemons must not outrun the processes that serve: by default those are at nice 15.
    "worker_niceness": 0,
    # Ray would kill a worker of ours when something else fills the machine's memory.
    "memory_monitor_refresh_ms": 0,
}

T = TypeVar("T")


class RaySession:
    """Implements `cluster.launch_session.Session`: a connection to Ray. `close` ends it, and Ray itself if we
    started it. One per process."""

    def __init__(self, *, is_private: bool) -> None:
        self.is_private = is_private
        context = ray.get_runtime_context()
        self._node_id = context.get_node_id()
        self.host: str = ray.util.get_node_ip_address()

    @classmethod
    def start_private(cls, session_dir: Path, specs: Sequence[RoleSpec], num_gpus: int | None) -> RaySession:
        """Start Ray on this machine with room for `specs`, whatever the machine has; `num_gpus` None: Ray
        looks for itself. A worker that asks for a GPU, or a part of one, sees that one alone: Ray's doing.

        Raises:
            ConfigError: Ray does not start.
        """
        try:
            ray.init(
                address="local",
                num_cpus=max(1, math.ceil(sum(spec.num_cpus for spec in specs))),
                num_gpus=num_gpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level="ERROR",
                _node_ip_address="127.0.0.1",
                _temp_dir=str(session_dir),
                _system_config=_SYSTEM_CONFIG,
            )
        except Exception as error:  # Ray raises whatever its start meets
            ray.shutdown()
            raise ConfigError(f"Ray does not start: {' '.join(str(error).split())}") from error
        return cls(is_private=True)

    @classmethod
    def join(cls, address: str) -> RaySession:
        """
        Raises:
            ConfigError: there is no Ray cluster at `address`, or it refuses us.
        """
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # as above
            ray.shutdown()
            reason = " ".join(str(error).split())
            raise ConfigError(f"cannot join the Ray cluster at {address}: {reason}") from error
        return cls(is_private=False)

    def place(self, spec: RoleSpec) -> PlacedRole:
        """Ask Ray for a process for this role; returns at once. A router stays on this machine, where the
        user wants to reach it."""
        strategy = NodeAffinitySchedulingStrategy(self._node_id, soft=False) if spec.is_router else "DEFAULT"
        actor_class = ray.remote(RoleActor).options(
            num_cpus=spec.num_cpus,
            num_gpus=spec.num_gpus,
            max_concurrency=NUM_THREADS,
            max_restarts=0,  # who is restarted, and as which epoch, is the supervisor's to say
            max_task_retries=0,
            enable_task_events=False,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": dict(spec.env)},
        )
        return PlacedRole(spec, actor_class.remote())

    def close(self) -> None:
        ray.shutdown()


class PlacedRole:
    """Implements `cluster.launch_session.Placed`: one actor."""

    def __init__(self, spec: RoleSpec, actor: Any) -> None:
        self._spec = spec
        self._actor = actor
        self._pidfd: int | None = None  # of a process that we can see

    async def load(self) -> str:
        reference = self._actor.load.remote(self._spec.entry)
        try:
            async with asyncio.timeout(PLACE_TIMEOUT_S):
                cause = await _answer(reference, if_dead=_DIED)
                if not cause:
                    place, pid = await _answer(self._actor.process.remote(), if_dead=("", 0))
                    self._pidfd = open_visible(place, pid)
                return cause
        except TimeoutError:
            wanted = f"{self._spec.num_cpus:g} CPU and {self._spec.num_gpus:g} GPU"
            return f"Ray found no place with {wanted} within {PLACE_TIMEOUT_S:g} s: {_describe_free()}"

    def run(self, spec: RoleSpec) -> Awaitable[str]:
        reference = self._actor.run.remote(spec.entry, dump_config(spec.config))
        return _answer(reference, if_dead=_DIED)

    async def wait_ready(self, timeout_s: float) -> bool:
        return await _answer(self._actor.wait_ready.remote(timeout_s), if_dead=False)

    async def responds(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return await _answer(self._actor.responds.remote(timeout_s), if_dead=True)
        except TimeoutError:
            return False

    async def stop(self) -> None:
        await _answer(self._actor.stop.remote(), if_dead=None)

    async def end(self) -> None:
        """Its role is over: the process ends as Ray ends one. Killed, it would be told of as a crash."""
        ray.kill(self._actor, no_restart=True)
        if self._pidfd is not None:
            await wait_ended(self._pidfd, END_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the process now. Does nothing when it is dead. Ray alone would ask a hung one for 5 s first."""
        ray.kill(self._actor, no_restart=True)
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            kill_process(pidfd)


def living_nodes() -> tuple[RayNode, ...]:
    """Of the cluster that this process has joined or started."""
    left = available_resources_per_node()  # what is all held is not in it
    return tuple(
        RayNode(
            node["NodeManagerAddress"],
            num_cpus=float(node["Resources"].get("CPU", 0.0)),
            free_cpus=float(left.get(node["NodeID"], {}).get("CPU", 0.0)),
            num_gpus=float(node["Resources"].get("GPU", 0.0)),
            free_gpus=float(left.get(node["NodeID"], {}).get("GPU", 0.0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    )


def _describe_free() -> str:
    nodes = living_nodes()
    cpus = sum(node.free_cpus for node in nodes), sum(node.num_cpus for node in nodes)
    return f"{cpus[0]:g} of {cpus[1]:g} CPUs are free; GPUs: {describe_free_gpus(nodes)}"


_DIED: Final = "its process died"


async def _answer(reference: Any, *, if_dead: T) -> T:
    """The result of an actor call, or `if_dead`."""
    try:
        result: T = await asyncio.wrap_future(reference.future())
    except ray.exceptions.RayActorError:
        return if_dead
    return result
