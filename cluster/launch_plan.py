"""What a cluster consists of: a pure map from `ClusterConfig` to the roles, with what each needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from cluster.admin_address import admin_address
from cluster.config import DEFAULT_GPU_MEMORY_SHARE, ClusterConfig, EdgeKind, threads_per_worker
from cluster.core_board import CoreShare, share_cores
from cluster.gpu_placement import (
    VISIBLE,
    check_places,
    deal_out,
    describe_places,
    describe_ray_share,
    ray_share,
)
from cluster.gpus import may_use_gpus
from cluster.ids import Epoch, RouterId, WorkerId
from cluster.request_config import RequestConfig
from cluster.role_config import KV_ADDRESS_BY_ROUTE, LogConfig, RouterConfig, WorkerConfig
from cluster.wire.messages import Role

ENTRIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "router": "router.service:run",
        Role.PREFILL.value: "prefill_worker.service:run",
        Role.DECODE.value: "decode_worker.service:run",
    }
)

_OTHER: Final = MappingProxyType({Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL})


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One process to place. `env` is set before it starts; Ray reserves `num_cpus` and `num_gpus`."""

    name: str
    entry: str  # `module:function`, see `cluster.role_process`
    config: RouterConfig | WorkerConfig
    num_cpus: float
    num_gpus: float
    env: Mapping[str, str]
    alternative: RoleSpec | None = None  # the same worker in the other role, where roles change

    @property
    def is_router(self) -> bool:
        return isinstance(self.config, RouterConfig)

    @property
    def role(self) -> str:
        return "router" if isinstance(self.config, RouterConfig) else self.config.role.value

    def in_role(self, role: str) -> RoleSpec:
        """The same place in a role that it has or may have."""
        if role == self.role:
            return self
        assert self.alternative is not None, f"{self.name} keeps its role"
        return replace(self.alternative, alternative=replace(self, alternative=None))

    def started(self, epoch: int, model_dir: str) -> RoleSpec:
        """The role as it is started for the `epoch`-th time, once the model is prepared."""
        if isinstance(self.config, RouterConfig):
            return replace(self, config=msgspec.structs.replace(self.config, model_dir=model_dir))
        return replace(self, config=msgspec.structs.replace(self.config, epoch=Epoch(epoch)))


@dataclass(frozen=True, slots=True)
class Site:
    """Facts of this run that the settings do not hold."""

    served_model_name: str
    runtime_dir: str
    log_dir: str | None  # None: standard error
    cluster_token: str
    num_cores: int  # of this machine
    core_board: str | None = None  # None: workers keep to their own threads
    gpus: tuple[str, ...] = ()  # that workers here are dealt out over, as `CUDA_VISIBLE_DEVICES` calls them
    ray_gpus: int = 0  # that Ray deals out instead; of a cluster that was joined: those that nobody holds
    ray_cpus: float | None = None  # that nobody holds of a Ray cluster that was joined; None: one of our own
    router_host: str | None = None  # this machine's address in a joined cluster
    router_control_ports: tuple[int, ...] = (0,)  # of each router there
    launcher_pid: int | None = None


# Ray would tell a worker's death on the terminal, in ten lines; the launcher does so in one, with what comes
# of it. Ray's own logs keep it. Read when `ray` is imported, and only of what this process prints.
QUIET_RAY: Final = {"RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed"}


def private_ray_environment(auth_token_file: Path) -> dict[str, str]:
    """What a Ray of our own reads from the environment; must be set before `ray` is imported."""
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on any system this binds every port to loopback
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(auth_token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def plan_roles(
    config: ClusterConfig, site: Site, entries: Mapping[str, str] = ENTRIES
) -> tuple[RoleSpec, ...]:
    """The routers first, then prefill, then decode workers.

    On one machine processes meet at unix sockets in the runtime directory, in a joined cluster over TCP.
    Workers that want more CPUs than a joined cluster has free get equal fractions: slower, but placed. GPUs,
    see `cluster.gpu_placement`; what was asked for with `gpus_per_worker` is asked of Ray.

    Raises:
        ConfigError: KV cannot move as asked between workers that share GPUs.
    """
    num_threads = threads_per_worker(config, site.num_cores)
    num_workers = config.prefill + config.decode
    num_cpus = float(num_threads)
    if site.ray_cpus is not None and num_cpus * num_workers > site.ray_cpus:
        num_cpus = int(site.ray_cpus / num_workers * 1000) / 1000
    addresses = _control_addresses(config, site)
    routers = tuple(
        RoleSpec(
            name=_router_name(number),
            entry=entries["router"],
            config=router_config(config, site, _router_name(number), number, address),
            num_cpus=0.0,  # waits more than it computes; the workers' cores are theirs
            num_gpus=0.0,
            env=process_environment(config, 1),
        )
        for number, address in enumerate(addresses)
    )
    shares: Sequence[CoreShare] = ()
    if site.core_board is not None:
        shares = share_cores(site.core_board, num_workers, num_threads, site.num_cores)
    gpus = _gpu_parts(config, site)

    def worker(number: int, role: Role, name: str) -> RoleSpec:
        return RoleSpec(
            name=name,
            entry=entries[role.value],
            config=worker_config(
                config,
                site,
                role,
                name,
                num_threads,
                shares[number] if shares else None,
                addresses,
                gpus[number].num_sharers,
            ),
            num_cpus=num_cpus,
            num_gpus=gpus[number].of_ray,
            env=process_environment(config, num_threads) | gpus[number].env,
        )

    workers = [worker(number, role, name) for number, (role, name) in enumerate(_workers(config))]
    if config.roles == "planned":
        workers = [
            replace(spec, alternative=worker(number, _OTHER[Role(spec.role)], spec.name))
            for number, spec in enumerate(workers)
        ]
    return (*routers, *workers)


@dataclass(frozen=True, slots=True)
class _GpuPart:
    """What one worker has of the GPUs."""

    of_ray: float = 0.0
    num_sharers: int = 1
    env: dict[str, str] = field(default_factory=dict)


def _gpu_parts(config: ClusterConfig, site: Site) -> list[_GpuPart]:
    """For each worker, in the order in which they are counted."""
    workers = _workers(config)
    if config.gpus_per_worker > 0:
        parts = [_GpuPart(of_ray=config.gpus_per_worker)] * len(workers)
    elif site.ray_gpus:
        fraction, num_sharers = ray_share(len(workers), site.ray_gpus)
        parts = [_GpuPart(of_ray=fraction, num_sharers=num_sharers)] * len(workers)
    elif places := deal_out(len(workers), site.gpus):
        parts = [_GpuPart(num_sharers=one.num_sharers, env={VISIBLE: one.visible}) for one in places]
    else:
        parts = [_GpuPart()] * len(workers)
    roles = [role.value for role, _ in workers]
    if config.roles == "planned":  # any two may come to move KV
        roles[0], roles[-1] = Role.PREFILL.value, Role.DECODE.value
    check_places(
        config.kv_edge,
        [name for _, name in workers],
        roles,
        [part.num_sharers for part in parts],
    )
    return parts


def describe_gpus(config: ClusterConfig, site: Site) -> str | None:
    """Which worker computes where, for a person; None where that is nobody's to say."""
    names = [name for _, name in _workers(config)]
    if config.gpus_per_worker > 0:
        return None
    if site.ray_gpus:
        return describe_ray_share(*ray_share(len(names), site.ray_gpus), config.gpu_memory_share)
    places = deal_out(len(names), site.gpus)
    return describe_places(names, places, config.gpu_memory_share) if places else None


def _control_addresses(config: ClusterConfig, site: Site) -> tuple[str, ...]:
    """Where workers dial each router."""
    if site.router_host is None:
        return tuple(f"unix:{site.runtime_dir}/{_router_name(i)}.sock" for i in range(config.routers))
    return tuple(f"tcp:{site.router_host}:{port}" for port in site.router_control_ports)


def _router_name(number: int) -> str:
    return f"router-{number}"


def router_config(
    config: ClusterConfig, site: Site, name: str, number: int, control_address: str
) -> RouterConfig:
    """The `number`-th router's; its `model_dir` is known once the model is prepared."""
    admin = admin_address(config)
    return RouterConfig(
        cluster_token=site.cluster_token,
        served_model_name=site.served_model_name,
        block_size=config.block_size,
        heartbeat_interval_s=config.heartbeat_interval_s,
        lease_ttl_s=config.lease_ttl_s,
        drain_grace_s=config.drain_grace_s,
        slo_ttft_s=config.slo_ttft_ms / 1e3,
        slo_tpot_s=config.slo_tpot_ms / 1e3,
        slo_gap_s=_seconds(config.slo_gap_ms),
        log=_log(config, site, name),
        router=RouterId(name),
        model_dir="",
        host=config.host,
        port=config.port,
        shares_port=config.routers > 1,
        admin_host=config.admin_host,
        admin_port=None if admin is None else admin[1] and admin[1] + number,
        metric_names=config.metric_names,
        otlp_endpoint=config.otlp_endpoint,
        control_address=control_address,
        num_prefill=config.prefill,
        num_decode=config.decode,
        placement=config.placement,
        plans_roles=config.roles == "planned" and number == 0,  # its share of the requests is like any other
        max_attempts=config.max_attempts,
        recovery_wait_s=config.recovery_wait_s,
        launcher_pid=site.launcher_pid,
        redis=config.redis,
        requests=RequestConfig(**{name: getattr(config, name) for name in RequestConfig.__struct_fields__}),
    )


def _workers(config: ClusterConfig) -> list[tuple[Role, str]]:
    """(role, name), in the order in which they are counted. A name says the role only if that is for good."""
    if config.roles == "planned":
        roles = [Role.PREFILL] * config.prefill + [Role.DECODE] * config.decode
        return [(role, f"worker-{index}") for index, role in enumerate(roles)]
    numbers = ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
    return [(role, f"{role.value}-{index}") for role, number in numbers for index in range(number)]


def worker_config(
    config: ClusterConfig,
    site: Site,
    role: Role,
    name: str,
    num_threads: int,
    core_share: CoreShare | None,
    router_addresses: tuple[str, ...],
    gpu_sharers: int = 1,
) -> WorkerConfig:
    """In its first epoch. `num_threads` compute threads, and what `core_share` says beside them;
    `gpu_sharers`: workers on its GPU."""
    is_decode = role is Role.DECODE
    kv_bytes = config.decode_kv_bytes if is_decode else config.prefill_kv_bytes
    has_equal_part = config.gpu_memory_share is None and kv_bytes is None  # what was asked for wins
    is_one_host = site.router_host is None
    kv_address = f"unix:{site.runtime_dir}/{name}-kv.sock" if is_one_host else KV_ADDRESS_BY_ROUTE
    return WorkerConfig(
        cluster_token=site.cluster_token,
        served_model_name=site.served_model_name,
        block_size=config.block_size,
        heartbeat_interval_s=config.heartbeat_interval_s,
        lease_ttl_s=config.lease_ttl_s,
        drain_grace_s=config.drain_grace_s,
        slo_ttft_s=config.slo_ttft_ms / 1e3,
        slo_tpot_s=config.slo_tpot_ms / 1e3,
        slo_gap_s=_seconds(config.slo_gap_ms),
        log=_log(config, site, name),
        worker=WorkerId(name),
        role=role,
        epoch=Epoch(1),
        router_addresses=router_addresses,
        model=config.model,
        kv_address=kv_address if is_decode else None,
        runtime_dir=site.runtime_dir,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
        speculation=config.speculation,
        backend=config.backend,
        num_threads=num_threads,
        core_share=core_share,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_chunk_tokens=config.local_chunk if is_decode else config.prefill_chunk,
        kv_bytes=kv_bytes,
        gpu_memory_share=config.gpu_memory_share or DEFAULT_GPU_MEMORY_SHARE,
        gpu_sharers=gpu_sharers if has_equal_part else 1,
        kv_edge=choose_edge(config, is_one_host),
        max_kv_edges=config.max_kv_edges,
    )


def choose_edge(config: ClusterConfig, is_one_host: bool) -> EdgeKind:
    """How KV moves: as asked; through shared memory where both ends are sure to keep it there. Workers whose
    KV may lie on a GPU find out for themselves (`cluster.kv.edge_fallback`)."""
    if config.kv_edge != "auto" or may_use_gpus(config):
        return config.kv_edge
    return "shm" if is_one_host else "gloo"


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _log(config: ClusterConfig, site: Site, name: str) -> LogConfig:
    file = None if site.log_dir is None else str(Path(site.log_dir) / f"{name}.log")
    return LogConfig(level=config.log_level, format=config.log_format, file=file)


def process_environment(config: ClusterConfig, num_threads: int) -> dict[str, str]:
    """Thread counts must be set before numeric libraries load: they read them once."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(num_threads))
    others = {
        # Waiting threads sleep after some microseconds instead of milliseconds: the cores are shared with
        # the other roles.
        "GOMP_SPINCOUNT": "20000",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return threads | others | kernel_environment(config)


def kernel_environment(config: ClusterConfig) -> dict[str, str]:
    """What the kernels read for themselves, in every process that loads them."""
    return {
        "BATON_CACHE_DIR": str(Path(config.cache_dir).expanduser()),
        "BATON_CPU_ISA": config.cpu_isa,
        "BATON_GPU_MODE": config.gpu_mode,
        "BATON_GGUF_WEIGHTS": config.gguf_weights,
    }
