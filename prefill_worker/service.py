"""The prefill worker as a process: engine, pool, core, driver, edges, from start to drain."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from cluster.clock import MonotonicClock
from cluster.engine.pacing import default_targets
from cluster.engine.worker_engine import open_engine
from cluster.ids import Epoch, WorkerId
from cluster.kv.block_manager import BlockManager
from cluster.kv.edge import EdgeName, KVSender
from cluster.kv.edge_backends import why_no_nccl
from cluster.kv.edge_fallback import AUTO, KindBook, kinds_of
from cluster.kv.edge_limit import EdgeLimit
from cluster.kv.edges import check_kind, edge_kind, make_sender
from cluster.process_place import process_place
from cluster.role_config import WorkerConfig
from cluster.wire.kv_messages import EdgeHello, EdgeWelcome
from cluster.wire.messages import Register, Role
from cluster.worker_driver import WorkerDriver
from cluster.worker_io import EdgeUp, Peer
from prefill_worker.core import PrefillConfig, PrefillCore
from prefill_worker.live_edges import PrefillEdges


async def run(
    config: WorkerConfig, *, stop: asyncio.Event, on_ready: Callable[[], None] | None = None
) -> None:
    """Serve until `stop`, then drain. `on_ready` is called once the model is loaded.

    Raises:
        BatonError: the model or the settings cannot work, or the worker cannot go on.
    """
    limit, clock = EdgeLimit(config.max_kv_edges), MonotonicClock()
    if config.kv_edge != AUTO:
        check_kind(edge_kind(config.kv_edge))
    engine = await asyncio.to_thread(open_engine, config)
    accepted = kinds_of(config.kv_edge, engine.backend.device.type, why_no_nccl(os.environ))
    geometry = engine.layout.to_geometry()
    pool = engine.make_pool(shared=False)
    mover = await asyncio.to_thread(engine.make_mover, pool.whole) if accepted[0].on_gpu else None
    blocks = BlockManager(engine.layout.num_blocks, config.block_size, engine.fingerprint)
    core = PrefillCore(
        PrefillConfig(
            block_bytes=engine.layout.bytes_per_block,
            max_step_tokens=config.max_chunk_tokens,
            targets=default_targets(config),
            worker=config.worker,
            warm_edges=config.max_kv_edges,
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
        clock=clock,
        step_timeout_s=config.step_timeout_s,
        join_timeout_s=config.join_timeout_s,
    )

    kinds, place = KindBook(accepted), process_place()

    def edge_to(decode: WorkerId, epoch: Epoch) -> EdgeName:
        return EdgeName(config.worker, config.epoch, decode, epoch)

    def hello_to(peer: Peer, uncapped: bool) -> EdgeHello:
        offered = kinds.offer(edge_to(*peer), clock.now(), uncapped=uncapped)
        return EdgeHello(
            worker=config.worker,
            epoch=config.epoch,
            decode_worker=peer.worker,
            decode_epoch=peer.epoch,
            pid=os.getpid(),
            fingerprint=engine.fingerprint,
            kinds=[kind.value for kind in offered],
            place=place,
            geometry=geometry,
        )

    async def sender_for(welcome: EdgeWelcome) -> KVSender:
        name = edge_to(welcome.worker, welcome.epoch)
        sender = make_sender(
            kinds.welcomed(name, welcome.kind, welcome.possible, clock.now()),
            pool,
            name=name,
            peer=welcome.geometry,
            endpoint=welcome.endpoint,
            limit=limit,
            mover=mover,
        )
        try:
            await sender.ready()
        except BaseException:
            await sender.close()
            raise
        kinds.up(name)
        return sender

    def describe(peer: Peer, sender: KVSender) -> EdgeUp:
        name = edge_to(*peer)
        return EdgeUp(peer, sender.in_place, kinds.better_after_s(name, clock.now()), limit.holds(name))

    edges = PrefillEdges(
        make_hello=hello_to,
        token=config.token,
        make_sender=sender_for,
        dispatch=driver.dispatch,
        judge=lambda peer, error: kinds.failed(edge_to(*peer), error, clock.now()),
        describe=describe,
        on_device_lost=driver.device_lost,
    )
    register = Register(
        worker=config.worker,
        role=Role.PREFILL,
        epoch=config.epoch,
        pid=os.getpid(),
        model=config.served_model_name,
        fingerprint=engine.fingerprint,
        max_model_len=engine.max_model_len,
        max_num_seqs=config.max_num_seqs,
        geometry=geometry,
        warm_edges=config.max_kv_edges,
    )
    try:
        await driver.loaded()
        if on_ready is not None:
            on_ready()
        await driver.run(register, edges, stop, config.drain_grace_s)
    finally:
        pool.close()
