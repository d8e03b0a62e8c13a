"""What each process is told: a `RouterConfig` or a `WorkerConfig`, and nothing else of the user's settings.

`cluster.launch_plan` makes them, or `cluster.role_by_hand`; they travel as JSON.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cluster.config import (
    BackendName,
    DtypeName,
    EdgeKind,
    KvDtypeName,
    LogFormat,
    LogLevel,
    MetricNames,
    PlacementName,
    QuantizationName,
    SpeculationName,
)
from cluster.core_board import CoreShare
from cluster.errors import ConfigError
from cluster.ids import Epoch, RouterId, WorkerId
from cluster.request_config import RequestConfig
from cluster.wire.messages import Role

KV_ADDRESS_BY_ROUTE: Final = "by-route"  # this host's address towards the router, any free port


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a process logs: a file that is rotated at 10 MB, or standard error."""

    level: LogLevel = "info"
    format: LogFormat = "text"
    file: str | None = None


class _RoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every process is told. `cluster_token` never shows in a repr, so not in a log or traceback; nor
    does the address of Redis, which may have a password."""

    cluster_token: str
    served_model_name: str
    block_size: int
    heartbeat_interval_s: float = 0.5
    lease_ttl_s: float = 10.0
    drain_grace_s: float = 20.0
    slo_ttft_s: float = 2.0  # of requests that ask for nothing else
    slo_tpot_s: float = 0.1
    slo_gap_s: float | None = None
    log: LogConfig = LogConfig()

    def __repr__(self) -> str:
        shown = msgspec.structs.asdict(self)
        shown |= {name: "***" for name in ("cluster_token", "redis") if shown.get(name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def token(self) -> bytes:
        """The cluster token as the handshake takes it."""
        return self.cluster_token.encode()


class RouterConfig(_RoleConfig, frozen=True, kw_only=True, tag_field="kind", tag="router"):
    """One router: its HTTP server and where workers dial it."""

    router: RouterId
    model_dir: str  # prepared model: config.json, tokenizer.json, tokenizer_config.json, ...
    host: str
    port: int  # 0: any free one
    shares_port: bool = False  # with other routers of this machine, which take clients in turn
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None  # None: the HTTP server answers for metrics and cluster state too
    metric_names: MetricNames = "baton"
    otlp_endpoint: str | None = None
    control_address: str  # `unix:/path` or `tcp:host:port`
    num_prefill: int  # workers to expect: ready once one of each expected role serves
    num_decode: int
    placement: PlacementName = "elastic"
    plans_roles: bool = False  # and asks its launcher for workers in other roles
    max_attempts: int = 3
    recovery_wait_s: float = 20.0
    launcher_pid: int | None = None  # on this machine, for `/cluster`
    redis: str | None = None  # None: nothing is shared with other routers
    requests: RequestConfig = RequestConfig()


class WorkerConfig(_RoleConfig, frozen=True, kw_only=True, tag_field="kind", tag="worker"):
    """One worker: what it loads, its limits, whom it dials."""

    worker: WorkerId
    role: Role
    epoch: Epoch
    router_addresses: tuple[str, ...]
    model: str  # as the user named it; the worker finds it in the cache
    # Where a decode worker listens for KV: an address (tcp port 0: any), or `KV_ADDRESS_BY_ROUTE`; None on
    # prefill workers.
    kv_address: str | None
    runtime_dir: str
    dtype: DtypeName = "bf16"
    quantization: QuantizationName = "none"
    kv_dtype: KvDtypeName = "auto"
    speculation: SpeculationName = "auto"  # of decode workers
    backend: BackendName = "cpu"
    num_threads: int = 1
    core_share: CoreShare | None = None  # None: it has its threads and no more
    max_model_len: int | None = None  # None: the model's
    max_num_seqs: int = 64
    max_chunk_tokens: int = 512  # prompt tokens per step, at most
    kv_bytes: int | None = None  # None: by role on a CPU, by `gpu_memory_share` on a GPU
    gpu_memory_share: float = 0.9  # of what weights and steps leave free
    gpu_sharers: int = 1  # workers that have its GPU's memory in equal parts; what is free is of such a part
    kv_edge: EdgeKind = "shm"  # auto: by the device that KV lies on, and where the peer is
    max_kv_edges: int = 16
    step_timeout_s: float = 60.0  # a step that takes longer is stuck: the process ends and is restarted
    join_timeout_s: float | None = None  # without any router for so long at first, it ends; None: it waits


_ROLE_DECODER: Final = msgspec.json.Decoder(RouterConfig | WorkerConfig)


def dump_config(config: RouterConfig | WorkerConfig) -> bytes:
    """As JSON. Contains the cluster token: write it to private files only."""
    return msgspec.json.encode(config)


def load_config(data: bytes) -> RouterConfig | WorkerConfig:
    """
    Raises:
        ConfigError: naming the field that is unknown, missing or wrong.
    """
    try:
        config: RouterConfig | WorkerConfig = _ROLE_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a role's configuration: {error}") from error
    return config
