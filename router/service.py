"""One router process, from its configuration to its end. Nothing here decides anything.

1. The control address is bound, where workers dial in; the tokenizer is loaded beside.
2. The HTTP server starts: `/health` answers, `/ready` says what is missing.
3. Workers register, the warm-up succeeds: `/ready` turns 200 and `on_ready` is called.
4. `stop` drains: no new requests; what runs finishes within the grace time or ends with an error event; the
   holders of what is left are told; streams and sockets close.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from cluster.allowed_hosts import host_names
from cluster.clock import Clock, MonotonicClock
from cluster.errors import InternalError, ModelError
from cluster.ids import RouterId
from cluster.latency_targets import LatencyTargets
from cluster.metrics import Metrics, new_metrics
from cluster.preflight import DISTRIBUTION
from cluster.redis_state import RedisState
from cluster.role_config import RouterConfig
from cluster.slo_classes import Targets
from cluster.tokenizer import Tokenizer
from cluster.tokenizer_config import read_json
from cluster.wire.kv_events import DiallerSays
from cluster.wire.stream import listen
from router.app import create_app
from router.aside import SWITCH_S
from router.conductor import Conductor
from router.config import ConductorConfig, PolicyConfig
from router.driver import ConductorDriver
from router.hosts import SideHosts
from router.limits import GatewayLimits
from router.model_info import ModelInfo, read_sampling_defaults
from router.page_feed import PageFeed
from router.quotas.sharing import Sharing
from router.readiness import ReadinessJudge
from router.role_shifts import RoleShifts
from router.role_watch import RoleWatch
from router.server import serve_http
from router.traces import RequestTraces, otlp_exporter

logger = logging.getLogger(__name__)

SHARED_TTL_S = 10.0  # a router that shared state has not heard of for so long has ended
SHARED_DEADLINE_S = 0.05  # of a call; a request waits for one at most


async def run(
    config: RouterConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    on_wish: Callable[[str, str], None] | None = None,
) -> None:
    """Serve until `stop` is set and the requests in flight are over. `on_wish` asks the launcher for a worker
    (first) in another role; without it roles stay as they are.

    Raises:
        ConfigError: the HTTP address cannot be used.
        WireError: the control address cannot be used.
        ModelError: the prepared model has no usable tokenizer.
        InternalError: the conductor broke; the process should be started anew.
    """
    clock = MonotonicClock()
    conductor = Conductor(_conductor_config(config))
    targets = LatencyTargets(config.slo_ttft_s, config.slo_tpot_s)
    feed = PageFeed(targets, conductor.summary, clock.now())
    traces = _traces(config, clock, conductor)
    roles = _roles(config, clock, on_wish)
    watchers = [one.observe for one in (feed, traces, roles) if one is not None]
    driver = ConductorDriver(
        config.router,
        conductor,
        ReadinessJudge(needs_prefill=config.num_prefill > 0),
        clock,
        block_size=config.block_size,
        heartbeat_interval_s=config.heartbeat_interval_s,
        watchers=watchers,
    )
    listener = await listen(config.control_address, config.token, DiallerSays, driver.links.on_stream)
    logger.info("workers dial %s", listener.address)
    ending = asyncio.Event()  # of the HTTP server: asked to stop, or broken
    listening = asyncio.Event()
    watches = [
        asyncio.create_task(_end(stop, driver, ending)),
        asyncio.create_task(_end(driver.broken, driver, ending)),
        asyncio.create_task(_announce((driver.became_ready, listening), on_ready)),
    ]
    version = _version()
    metrics = new_metrics(
        version,
        config.served_model_name,
        targets,
        policy=config.placement,
        block_size=config.block_size,
        vllm_names=config.metric_names == "baton+vllm",
    )
    sharing = _sharing(config, clock, metrics)
    if sharing is not None:
        watches.append(asyncio.create_task(sharing.run()))
    if roles is not None:
        watches.append(asyncio.create_task(roles.run(lambda: driver.cluster().workers)))
    try:
        tokenizer = await asyncio.to_thread(_load_tokenizer, Path(config.model_dir))
        model = _model_info(config, tokenizer)
        limits = GatewayLimits.of(config.requests)
        app = create_app(
            driver,
            driver,
            tokenizer,
            model,
            metrics,
            version=version,
            limits=limits,
            clock=clock,
            launcher_pid=config.launcher_pid,
            feed=feed,
            sharing=sharing,
            hosts=_hosts(config),
            roles=roles,
        )

        sys.setswitchinterval(SWITCH_S)

        def on_listening(host: str, port: int) -> None:
            logger.info("serving %s on %s port %d", model.name, host, port)
            listening.set()

        finished = await serve_http(
            app,
            app.state.in_flight,
            config.host,
            config.port,
            stop=ending,
            grace_s=config.drain_grace_s,
            max_header_bytes=limits.max_header_bytes,
            arrival_s=limits.request_arrival_s,
            shares_port_when=driver.became_ready if config.shares_port else None,
            on_listening=on_listening,
            admin=None if config.admin_port is None else (config.admin_host, config.admin_port),
            on_admin_listening=lambda host, port: logger.info("admin on %s port %d", host, port),
        )
        if not finished:
            logger.warning("drained: some requests did not finish within %g s", config.drain_grace_s)
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        driver.close()
        await listener.close()
        if sharing is not None:
            await sharing.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)
    if driver.broken.is_set():
        raise InternalError("The conductor broke; its log has the cause.")


async def _end(cause: asyncio.Event, driver: ConductorDriver, ending: asyncio.Event) -> None:
    await cause.wait()
    driver.start_draining()
    ending.set()


async def _announce(needed: Iterable[asyncio.Event], on_ready: Callable[[], None] | None) -> None:
    """Workers that are there already can be ready before the HTTP server is."""
    for event in needed:
        await event.wait()
    if on_ready is not None:
        on_ready()


def _conductor_config(config: RouterConfig) -> ConductorConfig:
    return ConductorConfig(
        max_attempts=config.max_attempts,
        lease_ttl_s=config.lease_ttl_s,
        recovery_wait_s=config.recovery_wait_s,
        max_queued=config.requests.max_queued,
        policy=PolicyConfig(always_remote=config.placement == "remote"),
        slo=_targets(config),
    )


def _hosts(config: RouterConfig) -> SideHosts:
    """The admin address asks nobody for a key."""
    allowed, has_keys = config.requests.allowed_hosts, config.requests.api_keys_file is not None
    return SideHosts(
        host_names(config.host, allowed, asks_for_key=has_keys),
        host_names(config.admin_host, allowed, asks_for_key=False),
    )


def _traces(config: RouterConfig, clock: Clock, conductor: Conductor) -> RequestTraces | None:
    if config.otlp_endpoint is None:
        return None
    exporter = otlp_exporter(config.otlp_endpoint)
    return RequestTraces(exporter, config.served_model_name, _version(), clock, conductor.summary)


def _sharing(config: RouterConfig, clock: Clock, metrics: Metrics) -> Sharing | None:
    """Under a name that no other router has, nor this one's next life: what it held ends with it."""
    if config.redis is None:
        return None
    name = RouterId(f"{config.router}-{uuid.uuid4().hex[:12]}")
    state = RedisState(config.redis, name, ttl_s=SHARED_TTL_S, deadline_s=SHARED_DEADLINE_S)
    return Sharing(state, clock, metrics)


def _roles(
    config: RouterConfig, clock: Clock, on_wish: Callable[[str, str], None] | None
) -> RoleWatch | None:
    if not config.plans_roles or on_wish is None:
        return None
    shifts = RoleShifts(_targets(config), config.num_prefill + config.num_decode)
    return RoleWatch(shifts, on_wish, clock)


def _targets(config: RouterConfig) -> Targets:
    gap_s = math.inf if config.slo_gap_s is None else config.slo_gap_s
    return Targets(config.slo_ttft_s, config.slo_tpot_s, gap_s)


def _version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def _load_tokenizer(directory: Path) -> Tokenizer:
    """Ready for the first chat too: its template machinery takes a second to load."""
    tokenizer = Tokenizer.load(directory)
    tokenizer.warm_up()
    return tokenizer


def _model_info(config: RouterConfig, tokenizer: Tokenizer) -> ModelInfo:
    """What clients are told of the model before workers say more."""
    directory = Path(config.model_dir)
    values = read_json(directory / "config.json")
    sizes = [
        value
        for name in ("max_position_embeddings", "sliding_window")
        if isinstance(value := values.get(name), int) and value > 0
    ]
    if not sizes:
        raise ModelError(f"no `max_position_embeddings` in {directory / 'config.json'}")
    vocab_size = values.get("vocab_size")
    return ModelInfo(
        name=config.served_model_name,
        root=config.served_model_name,
        created=int(time.time()),
        vocab_size=vocab_size if isinstance(vocab_size, int) else tokenizer.vocab_size,
        max_model_len=min(sizes),
        defaults=read_sampling_defaults(directory),
    )
