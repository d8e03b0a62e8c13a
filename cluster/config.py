"""What the user may set: frozen values, resolved once, never changed.

1. `ClusterConfig` is the whole surface of `baton serve`; `cluster.config_sources` fills it from flags,
   environment, file and defaults, in this order of precedence.
2. `cluster.launch_plan` derives what each process is told from it (`cluster.role_config`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from cluster.request_config import BYTES, AtLeastOne, MiB, RequestConfig
from cluster.wire.messages import Role

MetricNames = Literal["baton", "baton+vllm"]
DtypeName = Literal["bf16", "fp32"]
BackendName = Literal["cpu", "triton", "auto", "reference"]
GgufWeightsName = Literal["auto", "small", "expand"]  # as `kernels.coded` spells them
CpuIsaName = Literal["auto", "simd", "avx512-bf16", "amx"]
GpuModeName = Literal["exact", "fast"]  # as `kernels.triton.tiles` spells them
QuantizationName = Literal["none", "int8", "int8-weights"]  # as `kernels.quantization` spells them
EdgeKind = Literal["auto", "shm", "gloo", "cuda_ipc", "nccl"]  # as `cluster.kv.edges` spells them
KvDtypeName = Literal["auto", "int8"]
LogLevel = Literal["debug", "info", "warning", "error"]
IdleCores = Literal["lend", "keep"]
LauncherName = Literal["auto", "ray", "local"]
LogFormat = Literal["text", "json"]
PlacementName = Literal["elastic", "remote"]
SpeculationName = Literal["auto", "off"]
RolesName = Literal["fixed", "planned"]

DEFAULT_GPU_MEMORY_SHARE: Final = 0.9
DEFAULT_KV_BYTES: Final = {Role.PREFILL: 256 * MiB, Role.DECODE: 512 * MiB}  # in host memory


class ClusterConfig(RequestConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a whole cluster, those of requests among them. The descriptions are the help texts of
    the command line."""

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
    roles: Annotated[
        RolesName,
        Meta(
            description="fixed: so many prefill and decode workers for good; planned: to begin with, then "
            "workers change roles when that is predicted to serve more"
        ),
    ] = "fixed"
    threads_per_worker: Annotated[
        AtLeastOne | None, Meta(description="compute threads of each worker (default: share the cores)")
    ] = None
    idle_cores: Annotated[
        IdleCores, Meta(description="whether a worker's cores help the others of this machine while it rests")
    ] = "lend"
    gpus_per_worker: Annotated[
        float,
        Meta(
            ge=0,
            description="GPUs that Ray reserves for each worker; 0: those there are, dealt out over workers "
            "that compute on one",
        ),
    ] = 0.0
    gpu_memory_share: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(
            description="of the GPU memory that weights and steps leave free, the share for a worker's KV "
            "where no size is given (default: 0.9; of equal parts where workers share a GPU)",
        ),
    ] = None
    dtype: Annotated[DtypeName, Meta(description="numeric type of weights and activations")] = "bf16"
    quantization: Annotated[
        QuantizationName,
        Meta(description="of matrices; int8: weights and activations in int8, int8-weights: weights only"),
    ] = "none"
    kv_dtype: Annotated[
        KvDtypeName,
        Meta(description="numeric type of KV; int8: a scale per token and head; auto: as `--dtype`"),
    ] = "auto"
    speculation: Annotated[
        SpeculationName,
        Meta(
            description="whether decode steps check guesses at a request's next tokens, taken from its own "
            "history; auto: on CPUs, where it pays; no token depends on it"
        ),
    ] = "auto"
    backend: Annotated[
        BackendName,
        Meta(description="kernel backend; triton: on a GPU; auto: on a GPU where a worker finds one"),
    ] = "cpu"
    gpu_mode: Annotated[
        GpuModeName,
        Meta(
            description="of the triton backend; exact: a request's tokens are its own, bit for bit; fast: "
            "the vendor's matrix products, tokens may depend on what else is computed"
        ),
    ] = "exact"
    cpu_isa: Annotated[
        CpuIsaName,
        Meta(description="instructions of matrix products; auto: AMX, else AVX-512 BF16, else fp32"),
    ] = "auto"
    gguf_weights: Annotated[
        GgufWeightsName,
        Meta(
            description="matrices of GGUF files (Q4_0, Q4_1, Q5_0, Q8_0), with the same results: small: as "
            "codes of 5 or 8.5 bits; expand: as bf16; auto: codes, of small models both (AVX-512 BF16, AMX)"
        ),
    ] = "auto"
    block_size: Annotated[
        Literal[8, 16, 32, 64, 128], Meta(description="tokens per KV block; the same on all workers")
    ] = 32
    max_model_len: Annotated[
        AtLeastOne | None, Meta(description="longest prompt plus output in tokens (default: the model's)")
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
        AtLeastOne | None,
        Meta(
            extra=BYTES,
            description="KV memory of each prefill worker (default: 256MiB); on a GPU what "
            "`--gpu-memory-share` says",
        ),
    ] = None
    decode_kv_bytes: Annotated[
        AtLeastOne | None,
        Meta(
            extra=BYTES,
            description="KV memory of each decode worker (default: 512MiB); on a GPU what "
            "`--gpu-memory-share` says",
        ),
    ] = None
    kv_edge: Annotated[
        EdgeKind,
        Meta(
            description="how KV moves from prefill to decode; auto: shm on one host with KV in its memory, "
            "else gloo, and between GPUs cuda_ipc on one host, else nccl, else gloo; cuda_ipc: as auto does "
            "between GPUs; nccl: between GPUs of any hosts"
        ),
    ] = "auto"
    max_kv_edges: Annotated[
        AtLeastOne,
        Meta(
            description="nccl edges that a worker holds at once, each of some 100 MB of its GPU; edges of "
            "any kind are made before requests need them up to so many"
        ),
    ] = 16
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
    redis: Annotated[
        str | None,
        Meta(
            description="Redis through which several routers share the limits of API keys, e.g. "
            "redis://host:6379 (default: with several routers, one of our own on this machine)"
        ),
    ] = None
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
