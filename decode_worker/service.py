"""The decode worker as a process: engine, shared pool, core, driver, edges, from start to drain."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from cluster.clock import MonotonicClock
from cluster.engine.pacing import default_targets
from cluster.engine.worker_engine import open_engine
from cluster.errors import ConfigError, EdgeError
from cluster.kv.block_manager import BlockManager
from cluster.kv.edge import EdgeName, KVReceiver
from cluster.kv.edge_fallback import accepted
from cluster.kv.edge_limit import EdgeLimit
from cluster.kv.edges import check_kind, check_memory, edge_kind, make_receiver
from cluster.kv.layout import single_edge
from cluster.role_config import KV_ADDRESS_BY_ROUTE, WorkerConfig
from cluster.wire.address import TcpAddress, own_host_towards, parse_address
from cluster.wire.kv_messages import EdgeHello, EdgeWelcome
from cluster.wire.messages import Register, Role
from cluster.worker_driver import WorkerDriver
from cluster.worker_io import Peer
from decode_worker.core import DecodeConfig, DecodeCore
from decode_worker.live_edges import DecodeEdges


async def run(
    config: WorkerConfig, *, stop: asyncio.Event, on_ready: Callable[[], None] | None = None
) -> None:
    """Serve until `stop`, then drain. `on_ready` is called once the model is loaded.

    Raises:
        BatonError: the model or the settings cannot work, or the worker cannot go on.
    """
    if config.kv_address is None:
        raise ConfigError(f"decode worker `{config.worker}` was given no KV address")
    kind, limit = edge_kind(config.kv_edge), EdgeLimit(config.max_kv_edges)
    check_kind(kind)
    engine = await asyncio.to_thread(open_engine, config)
    check_memory(kind, engine.backend.device.type)
    fingerprint = engine.fingerprint
    geometry = engine.layout.to_geometry()
    pool = engine.make_pool(shared=kind.in_ds_pool)
    mover = await asyncio.to_thread(engine.make_mover, pool.whole) if kind.on_gpu else None
    blocks = BlockManager(engine.layout.num_blocks, config.block_size, fingerprint)
    core = DecodeCore(
        DecodeConfig(
            block_bytes=engine.layout.bytes_per_block,
            max_num_seqs=config.max_num_seqs,
            max_chunk_tokens=config.max_chunk_tokens,
            targets=default_targets(config),
        ),
        blocks,
    )
    driver = WorkerDriver(
        core=core,
        make_runner=engine.make_runner(pool.whole),
        calibrate=engine.calibrate(pool.tensor),
        cache=blocks,
        keep_lifeline=engine.keep_lifeline,
        token=config.token,
        router_addresses=config.router_addresses,
        clock=MonotonicClock(),
        step_timeout_s=config.step_timeout_s,
        join_timeout_s=config.join_timeout_s,
    )

    kinds = [one.value for one in accepted(kind)]

    def check_hello(hello: EdgeHello) -> str | None:
        if hello.geometry.dtype != geometry.dtype:
            return (
                f"it keeps KV in {hello.geometry.dtype}, this worker in {geometry.dtype}: start both with "
                "the same `--dtype` and `--kv-dtype`"
            )
        if hello.fingerprint != fingerprint:
            return "it runs another model, dtype, backend or instruction set: bits would differ"
        if hello.kind not in kinds:
            return f"it speaks the KV edge `{hello.kind}`, this worker `{config.kv_edge}`"
        try:
            single_edge(hello.geometry, geometry)
        except EdgeError as error:
            return str(error)
        return None

    def make_welcome(receiver: KVReceiver) -> EdgeWelcome:
        return EdgeWelcome(
            worker=config.worker, epoch=config.epoch, geometry=geometry, endpoint=receiver.endpoint()
        )

    kv_address = config.kv_address
    if kv_address == KV_ADDRESS_BY_ROUTE:
        kv_address = str(TcpAddress(own_host_towards(config.router_addresses[0]), 0))
    # Network edges listen where the KV stream listens; beside a unix socket that is this host only.
    address = parse_address(kv_address)
    edge_host = address.host if isinstance(address, TcpAddress) else "127.0.0.1"

    def receiver_for(hello: EdgeHello) -> KVReceiver:
        name = EdgeName(hello.worker, hello.epoch, config.worker, config.epoch)
        spoken = edge_kind(hello.kind)
        return make_receiver(
            spoken, pool, name=name, peer=hello.geometry, host=edge_host, limit=limit, mover=mover
        )

    edges = DecodeEdges(
        make_welcome=make_welcome,
        me=Peer(config.worker, config.epoch),
        check_hello=check_hello,
        make_receiver=receiver_for,
        token=config.token,
        dispatch=driver.dispatch,
        is_busy=lambda: not core.idle,
        on_device_lost=driver.device_lost,
    )
    try:
        await driver.loaded()
        register = Register(
            worker=config.worker,
            role=Role.DECODE,
            epoch=config.epoch,
            pid=os.getpid(),
            model=config.served_model_name,
            fingerprint=fingerprint,
            max_model_len=engine.max_model_len,
            max_num_seqs=config.max_num_seqs,
            geometry=geometry,
            kv_address=await edges.start(kv_address),
        )
        if on_ready is not None:
            on_ready()
        await driver.run(register, edges, stop, config.drain_grace_s)
    finally:
        await edges.close()
        pool.close()
