"""One role's configuration from the options of its own command: a pure map, for clusters started by hand.

Settings have the names, defaults and sources that they have in `baton serve` (flags, `BATON_*`, a file), so
one file can serve every process of a cluster; a role looks at what concerns it. What a launcher would know
beside them comes with the command: a name, where routers are, how often this worker has been started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from cluster.admin_address import is_loopback
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.ids import Epoch
from cluster.launch_plan import Site, choose_edge, router_config, worker_config
from cluster.request_config import RequestConfig
from cluster.role_config import KV_ADDRESS_BY_ROUTE, RouterConfig, WorkerConfig
from cluster.wire.address import TcpAddress, parse_address
from cluster.wire.messages import Role

ROUTER: Final = "router"
ROUTER_ADDRESS: Final = "tcp:127.0.0.1:8500"

_EVERY_ROLE: Final = (
    *("model", "served_model_name", "dtype", "quantization", "gguf_weights"),
    *("backend", "gpu_mode", "cpu_isa", "cache_dir"),
    *("block_size", "slo_ttft_ms", "slo_tpot_ms", "slo_gap_ms", "drain_grace_s", "start_timeout_s"),
    *("cluster_token_file", "log_dir", "log_level", "log_format"),
)
_EVERY_WORKER: Final = (
    *(*_EVERY_ROLE, "kv_dtype", "kv_edge", "max_kv_edges"),
    *("threads_per_worker", "gpu_memory_share", "max_model_len", "max_num_seqs"),
)
SETTINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        ROUTER: (
            *("host", "port", "admin_host", "admin_port", "prefill", "decode", *_EVERY_ROLE),
            *("placement", "max_attempts", "recovery_wait_s", "heartbeat_interval_s", "lease_ttl_s", "redis"),
            *("metric_names", "otlp_endpoint", *RequestConfig.__struct_fields__),
        ),
        Role.PREFILL.value: (*_EVERY_WORKER, "prefill_chunk", "prefill_kv_bytes"),
        Role.DECODE.value: (*_EVERY_WORKER, "local_chunk", "decode_kv_bytes", "speculation"),
    }
)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ByHand:
    """What no setting says. `routers` are where this worker dials in, or the one address where the router
    listens; `epoch` grows with every start of a worker of this name."""

    name: str
    routers: tuple[str, ...] = (ROUTER_ADDRESS,)
    epoch: int = 1
    kv_address: str = KV_ADDRESS_BY_ROUTE


def config_by_hand(
    role: str, config: ClusterConfig, hand: ByHand, *, model_name: str, token: str, num_cores: int
) -> RouterConfig | WorkerConfig:
    """The configuration of one process of `role`; a router's `model_dir` is still missing.

    Raises:
        ConfigError: a name or address that cannot be one.
    """
    if not _NAME.fullmatch(hand.name):
        raise ConfigError(f"--name: letters, digits, `.`, `_` and `-` make a name, not `{hand.name}`")
    if len(set(hand.routers)) < len(hand.routers):
        raise ConfigError(f"--router names an address twice: {', '.join(hand.routers)}")
    parsed = [parse_address(address) for address in hand.routers]
    site = Site(
        served_model_name=config.served_model_name or model_name,
        runtime_dir="",
        log_dir=config.log_dir,
        cluster_token=token,
        num_cores=num_cores,
        router_host="by hand",  # each process may be on another machine
    )
    if role == ROUTER:
        alone = msgspec.structs.replace(config, routers=1)  # others by hand have ports of their own
        return router_config(alone, site, hand.name, 0, hand.routers[0])
    if hand.kv_address != KV_ADDRESS_BY_ROUTE:
        parse_address(hand.kv_address)
    is_one_host = all(not isinstance(one, TcpAddress) or is_loopback(one.host) for one in parsed)
    kind = Role(role)
    own = worker_config(
        config, site, kind, hand.name, config.threads_per_worker or num_cores, None, hand.routers
    )
    return msgspec.structs.replace(
        own,
        epoch=Epoch(hand.epoch),
        kv_address=hand.kv_address if kind is Role.DECODE else None,
        kv_edge=choose_edge(config, is_one_host),
        join_timeout_s=config.start_timeout_s,
    )
