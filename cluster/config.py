"""What the user may set, and what each process is told: frozen values, resolved once, never changed.

1. `ClusterConfig` is the whole surface of `baton serve`; `cluster.config_sources` fills it from flags,
   environment, file and defaults, in this order of precedence.
2. `cluster.launch_plan` derives one `RouterConfig` and one `WorkerConfig` per worker from it. They are all
   that those processes ever see of it, and travel as JSON.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from cluster.core_board import CoreShare
from cluster.errors import ConfigError
from cluster.ids import Epoch, RouterId, WorkerId
from cluster.wire.messages import Role

KiB: Final = 1 << 10
MiB: Final = 1 << 20

MetricNames = Literal["baton", "baton+vllm"]
DtypeName = Literal["bf16", "fp32"]
BackendName = Literal["cpu", "triton", "auto", "reference"]
CpuIsaName = Literal["auto", "simd", "amx"]
QuantizationName = Literal["none", "int8", "int8-weights"]  # as `kernels.quantization` spells them
EdgeKind = Literal["auto", "shm", "gloo"]
KvDtypeName = Literal["auto", "int8"]
LogLevel = Literal["debug", "info", "warning", "error"]
IdleCores = Literal["lend", "keep"]
LauncherName = Literal["auto", "ray", "local"]
LogFormat = Literal["text", "json"]
PlacementName = Literal["elastic", "remote"]
OverloadStatus = Literal[429, 503, 529]
RequestTemplates = Literal["refuse", "trust"]
ToolFormatName = Literal["auto", "hermes", "json"]

DEFAULT_KV_BYTES: Final = {Role.PREFILL: 256 * MiB, Role.DECODE: 512 * MiB}  # in host memory

KV_ADDRESS_BY_ROUTE: Final = "by-route"  # this host's address towards the router, any free port

_AtLeastOne = Annotated[int, Meta(ge=1)]

_BYTES: Final = {"unit": "bytes"}  # marks fields that also take "512MiB"


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a whole cluster. The descriptions are the help texts of the command line."""

    model: Annotated[
        str, Meta(description="`demo`, a directory with config.json and safetensors, or a .gguf file")
    ] = "demo"
    served_model_name: Annotated[
        str | None, Meta(description="name clients use (default: from the model's file name)")
    ] = None
    host: Annotated[str, Meta(description="address the HTTP server listens on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP server; 0: any free one")] = 8000
    admin_host: Annotated[
        str, Meta(description="address of metrics and cluster state, where it is not the HTTP server's")
    ] = "127.0.0.1"
    admin_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="its port (default: the HTTP server's own on loopback, else the port after it)"),
    ] = None
    routers: Annotated[
        int,
        Meta(ge=1, le=16, description="router processes that share the HTTP port; each has an admin port"),
    ] = 1
    prefill: Annotated[
        int, Meta(ge=0, le=256, description="prefill workers; 0: decode workers prefill for themselves")
    ] = 1
    decode: Annotated[int, Meta(ge=1, le=256, description="decode workers")] = 1
    threads_per_worker: Annotated[
        _AtLeastOne | None, Meta(description="compute threads of each worker (default: share the cores)")
    ] = None
    idle_cores: Annotated[
        IdleCores, Meta(description="whether a worker's cores help the others of this machine while it rests")
    ] = "lend"
    gpus_per_worker: Annotated[float, Meta(ge=0, description="GPUs that Ray reserves for each worker")] = 0.0
    gpu_memory_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="of the GPU memory that weights and steps leave free, the share for a worker's KV "
            "where no size is given",
        ),
    ] = 0.9
    dtype: Annotated[DtypeName, Meta(description="numeric type of weights and activations")] = "bf16"
    quantization: Annotated[
        QuantizationName,
        Meta(description="of matrices; int8: weights and activations in int8, int8-weights: weights only"),
    ] = "none"
    kv_dtype: Annotated[
        KvDtypeName,
        Meta(description="numeric type of KV; int8: a scale per token and head; auto: as `--dtype`"),
    ] = "auto"
    backend: Annotated[
        BackendName,
        Meta(description="kernel backend; triton: on a GPU; auto: on a GPU where a worker finds one"),
    ] = "cpu"
    cpu_isa: Annotated[
        CpuIsaName,
        Meta(description="instructions of matrix products; auto: the matrix unit (AMX) where there is one"),
    ] = "auto"
    block_size: Annotated[
        Literal[8, 16, 32, 64, 128], Meta(description="tokens per KV block; the same on all workers")
    ] = 32
    max_model_len: Annotated[
        _AtLeastOne | None, Meta(description="longest prompt plus output in tokens (default: the model's)")
    ] = None
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=4096, description="sequences that one worker runs at once")
    ] = 64
    prefill_chunk: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="most prompt tokens per step of a prefill worker; targets and speed say how many",
        ),
    ] = 512
    local_chunk: Annotated[
        int, Meta(ge=1, le=65536, description="most prompt tokens per step of a decode worker; as above")
    ] = 512
    prefill_kv_bytes: Annotated[
        _AtLeastOne | None,
        Meta(
            extra=_BYTES,
            description="KV memory of each prefill worker (default: 256MiB); on a GPU what "
            "`--gpu-memory-share` says",
        ),
    ] = None
    decode_kv_bytes: Annotated[
        _AtLeastOne | None,
        Meta(
            extra=_BYTES,
            description="KV memory of each decode worker (default: 512MiB); on a GPU what "
            "`--gpu-memory-share` says",
        ),
    ] = None
    kv_edge: Annotated[
        EdgeKind,
        Meta(
            description="how KV moves from prefill to decode; auto: shm on one host with KV in its memory, "
            "else gloo"
        ),
    ] = "auto"
    slo_ttft_ms: Annotated[
        float, Meta(gt=0, description="time to the first token that a request is promised unless it asks")
    ] = 2000.0
    slo_tpot_ms: Annotated[
        float, Meta(gt=0, description="mean time per further token that a request is promised unless it asks")
    ] = 100.0
    slo_gap_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="longest time between two tokens of an answer (default: no limit)"),
    ] = None
    placement: Annotated[
        PlacementName,
        Meta(
            description="where prompts are computed; elastic: wherever the targets are best met; remote: on "
            "prefill workers while one is there, to compare with"
        ),
    ] = "elastic"
    max_body_bytes: Annotated[int, Meta(ge=1024, extra=_BYTES, description="largest body of a request")] = (
        8 * MiB
    )
    max_header_bytes: Annotated[
        int, Meta(ge=1024, extra=_BYTES, description="most that a request's address and headers may take")
    ] = 64 * KiB
    max_grammar_bytes: Annotated[
        int, Meta(ge=0, extra=_BYTES, description="largest schema, grammar or list of tools of a request")
    ] = 64 * KiB
    max_messages: Annotated[_AtLeastOne, Meta(description="most messages of a chat")] = 2048
    max_n: Annotated[int, Meta(ge=1, le=128, description="most answers to one prompt")] = 16
    max_choices: Annotated[
        _AtLeastOne, Meta(description="most answers of one request, to all of its prompts")
    ] = 256
    max_logprobs: Annotated[
        int, Meta(ge=0, le=1000, description="most alternatives per token with log-probabilities")
    ] = 20
    max_stop_strings: Annotated[int, Meta(ge=0, le=1024, description="most stop strings of a request")] = 16
    max_tools: Annotated[int, Meta(ge=0, description="most tools of a request")] = 128
    tool_format: Annotated[
        ToolFormatName, Meta(description="how the model writes tool calls; auto: as its chat template says")
    ] = "auto"
    request_chat_templates: Annotated[
        RequestTemplates, Meta(description="whether a request may bring a chat template of its own")
    ] = "refuse"
    api_keys_file: Annotated[
        str | None,
        Meta(description="file with a line `sha256:…` per API key (default: no key is asked for)"),
    ] = None
    key_requests_per_min: Annotated[
        _AtLeastOne | None,
        Meta(description="requests per minute of a key whose line does not say (default: no limit)"),
    ] = None
    key_tokens_per_min: Annotated[
        _AtLeastOne | None,
        Meta(description="its tokens per minute, prompt and answer together (default: no limit)"),
    ] = None
    key_concurrent: Annotated[
        _AtLeastOne | None, Meta(description="its requests at once (default: no limit)")
    ] = None
    redis: Annotated[
        str | None,
        Meta(
            description="Redis through which several routers share the limits of API keys, e.g. "
            "redis://host:6379 (default: with several routers, one of our own on this machine)"
        ),
    ] = None
    overload_status: Annotated[
        OverloadStatus, Meta(description="HTTP status of what is refused because all workers are busy")
    ] = 503
    max_attempts: Annotated[int, Meta(ge=1, le=100, description="worker pairs tried per request")] = 3
    recovery_wait_s: Annotated[
        float,
        Meta(ge=0, description="how long a request waits for a worker when none is there; 0: fails at once"),
    ] = 20.0
    lease_ttl_s: Annotated[
        float, Meta(gt=0, description="how long a decode worker holds blocks without hearing from the router")
    ] = 10.0
    heartbeat_interval_s: Annotated[
        float, Meta(gt=0, description="between two signs of life of a worker")
    ] = 0.5
    drain_grace_s: Annotated[
        float, Meta(ge=0, description="what running requests get to finish when the cluster stops")
    ] = 20.0
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="how long a worker may take to become ready")
    ] = 600.0
    launcher: Annotated[
        LauncherName,
        Meta(
            description="who starts the processes; local: on this machine without Ray; auto: Ray where it is "
            "installed"
        ),
    ] = "auto"
    address: Annotated[
        str | None,
        Meta(description="Ray cluster to join, or `auto` (default: a private one on this machine)"),
    ] = None
    cluster_token_file: Annotated[
        str | None,
        Meta(description="file with the secret all processes share (default: generated for each run)"),
    ] = None
    cache_dir: Annotated[str, Meta(description="where converted models are kept")] = "~/.cache/baton"
    log_dir: Annotated[
        str | None, Meta(description="where processes log (default: ~/.local/state/baton/logs/PORT)")
    ] = None
    log_level: Annotated[LogLevel, Meta(description="least severity that is logged")] = "info"
    log_format: Annotated[LogFormat, Meta(description="one line of text or one JSON object per record")] = (
        "text"
    )
    metric_names: Annotated[
        MetricNames, Meta(description="baton+vllm: also under the names that autoscalers know from vLLM")
    ] = "baton"
    otlp_endpoint: Annotated[
        str | None,
        Meta(description="where traces go, as OTLP over HTTP, e.g. http://localhost:4318 (default: nowhere)"),
    ] = None
    runtime_dir: Annotated[
        str | None, Meta(description="where sockets live while it runs; a short path (default: below /tmp)")
    ] = None


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


class RequestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may ask of a router; the fields of `ClusterConfig` of the same names."""

    max_body_bytes: int = 8 * MiB
    max_header_bytes: int = 64 * KiB
    max_grammar_bytes: int = 64 * KiB
    max_messages: int = 2048
    max_n: int = 16
    max_choices: int = 256
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_tools: int = 128
    tool_format: ToolFormatName = "auto"
    request_chat_templates: RequestTemplates = "refuse"
    overload_status: OverloadStatus = 503
    api_keys_file: str | None = None
    key_requests_per_min: int | None = None
    key_tokens_per_min: int | None = None
    key_concurrent: int | None = None


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
    backend: BackendName = "cpu"
    num_threads: int = 1
    core_share: CoreShare | None = None  # None: it has its threads and no more
    max_model_len: int | None = None  # None: the model's
    max_num_seqs: int = 64
    max_chunk_tokens: int = 512  # prompt tokens per step, at most
    kv_bytes: int | None = None  # None: by role on a CPU, by `gpu_memory_share` on a GPU
    gpu_memory_share: float = 0.9  # of what weights and steps leave free
    kv_edge: Literal["shm", "gloo"] = "shm"
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


def num_available_cores(cgroup_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: its affinity, bounded by the container's CPU quota."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cgroup_file.read_text().split()
    except (OSError, ValueError):
        return num_cores  # no cgroup v2: nothing limits us
    if quota != "max":
        num_cores = min(num_cores, max(1, int(quota) // int(period)))
    return num_cores


def threads_per_worker(config: ClusterConfig, num_cores: int) -> int:
    """As asked, else an equal share of the cores, at least one."""
    if config.threads_per_worker is not None:
        return config.threads_per_worker
    return max(1, num_cores // (config.prefill + config.decode))


def shown_kv_bytes(config: ClusterConfig, role: Role) -> str:
    """KV memory of a worker where nobody has said how much."""
    default = str(DEFAULT_KV_BYTES[role])
    on_gpu = f"{config.gpu_memory_share:g} of what a GPU has left"
    return {"triton": on_gpu, "auto": f"{default}, or {on_gpu}"}.get(config.backend, default)


def describe(config: ClusterConfig, origins: Mapping[str, str], derived: Mapping[str, str]) -> str:
    """One `name = value  (origin)` line per setting: what `--dry-run` prints. `derived`: values that follow
    from other settings, instead of those nobody has given."""
    width = max(map(len, config.__struct_fields__))

    def line(name: str) -> str:
        if name in derived and name not in origins:
            return f"{name:<{width}} = {derived[name]}  (derived)"
        return f"{name:<{width}} = {getattr(config, name)}  ({origins.get(name, 'default')})"

    return "\n".join(map(line, config.__struct_fields__))
