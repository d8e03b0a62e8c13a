"""The decode worker as a process: engine, shared pool, core, driver, edges, from start to drain."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial

from cluster.clock import MonotonicClock
from cluster.engine.pacing import default_targets
from cluster.engine.worker_engine import WorkerEngine, open_engine
from cluster.errors import ConfigError, EdgeCrowded, EdgeError
from cluster.kv.block_manager import BlockManager
from cluster.kv.edge import EdgeName, KVReceiver
from cluster.kv.edge_backends import why_no_nccl
from cluster.kv.edge_fallback import AUTO, kinds_of, possible
from cluster.kv.edge_limit import EdgeLimit
from cluster.kv.edges import EdgeKind, check_kind, edge_kind, make_receiver
from cluster.kv.layout import single_edge
from cluster.kv.pool import KVPool
from cluster.process_place import process_place
from cluster.role_config import KV_ADDRESS_BY_ROUTE, WorkerConfig
from cluster.wire.address import TcpAddress, own_host_towards, parse_address
from cluster.wire.kv_messages import EdgeHello, EdgeWelcome
from cluster.wire.messages import Register, Role
from cluster.worker_driver import WorkerDriver
from cluster.worker_io import Peer
from decode_worker.core import DecodeConfig, DecodeCore
from decode_worker.live_edges import DecodeEdges

logger = logging.getLogger(__name__)


async def run(
    config: WorkerConfig, *, stop: asyncio.Event, on_ready: Callable[[], None] | None = None
) -> None:
    """Serve until `stop`, then drain. `on_ready` is called once the model is loaded.

    Raises:
        BatonError: the model or the settings cannot work, or the worker cannot go on.
    """
    if config.kv_address is None:
        raise ConfigError(f"decode worker `{config.worker}` was given no KV address")
    limit = EdgeLimit(config.max_kv_edges)
    if config.kv_edge != AUTO:
        check_kind(edge_kind(config.kv_edge))
    engine = await asyncio.to_thread(open_engine, config)
    kinds = kinds_of(config.kv_edge, engine.backend.device.type, why_no_nccl(os.environ))
    fingerprint = engine.fingerprint
    geometry = engine.layout.to_geometry()
    pool, kinds = _make_pool(engine, kinds, may_do_without=config.kv_edge == AUTO)
    mover = await asyncio.to_thread(engine.make_mover, pool.whole) if kinds[0].on_gpu else None
    blocks = BlockManager(engine.layout.num_blocks, config.block_size, fingerprint)
    speculates = config.speculation == "auto" and engine.can_speculate
    core = DecodeCore(
        DecodeConfig(
            block_bytes=engine.layout.bytes_per_block,
            max_num_seqs=config.max_num_seqs,
            max_chunk_tokens=config.max_chunk_tokens,
            targets=default_targets(config),
            speculates=speculates,
        ),
        blocks,
    )
    driver = WorkerDriver(
        core=core,
        make_runner=engine.make_runner(pool.whole, speculates=speculates),
        calibrate=engine.calibrate(pool.tensor),
        cache=blocks,
        keep_lifeline=engine.keep_lifeline,
        token=config.token,
        router_addresses=config.router_addresses,
        clock=MonotonicClock(),
        step_timeout_s=config.step_timeout_s,
        join_timeout_s=config.join_timeout_s,
    )

    place = process_place()

    def kinds_with(hello: EdgeHello) -> list[EdgeKind]:
        return possible(hello.kinds, kinds, is_one_host=place != "" and hello.place == place)

    def check_hello(hello: EdgeHello) -> str | None:
        if hello.geometry.dtype != geometry.dtype:
            return (
                f"it keeps KV in {hello.geometry.dtype}, this worker in {geometry.dtype}: start both with "
                "the same `--dtype` and `--kv-dtype`"
            )
        if hello.fingerprint != fingerprint:
            return "it runs another model, dtype, backend or instruction set: bits would differ"
        if not kinds_with(hello):
            theirs, own = ", ".join(hello.kinds), ", ".join(kind.value for kind in kinds)
            return f"it speaks the KV edge {theirs}, this worker {own}"
        try:
            single_edge(hello.geometry, geometry)
        except EdgeError as error:
            return str(error)
        return None

    kv_address = config.kv_address
    if kv_address == KV_ADDRESS_BY_ROUTE:
        kv_address = str(TcpAddress(own_host_towards(config.router_addresses[0]), 0))
    # Network edges listen where the KV stream listens; beside a unix socket that is this host only.
    address = parse_address(kv_address)
    edge_host = address.host if isinstance(address, TcpAddress) else "127.0.0.1"

    def may_close(peer: Peer) -> bool:
        return limit.holds(EdgeName(*peer, config.worker, config.epoch)) and not core.receives_from(peer)

    def answer(hello: EdgeHello, may_be_worse: bool) -> tuple[KVReceiver, EdgeWelcome]:
        name = EdgeName(hello.worker, hello.epoch, config.worker, config.epoch)
        able = kinds_with(hello)
        build = partial(
            make_receiver, pool=pool, name=name, peer=hello.geometry, host=edge_host, limit=limit, mover=mover
        )
        kind, receiver = first_that_can(able, build, may_be_worse=may_be_worse)
        welcome = EdgeWelcome(
            worker=config.worker,
            epoch=config.epoch,
            kind=kind.value,
            possible=[one.value for one in able],
            geometry=geometry,
            endpoint=receiver.endpoint(),
        )
        return receiver, welcome

    edges = DecodeEdges(
        me=Peer(config.worker, config.epoch),
        check_hello=check_hello,
        answer=answer,
        may_close=may_close,
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


def _make_pool(
    engine: WorkerEngine, kinds: tuple[EdgeKind, ...], *, may_do_without: bool
) -> tuple[KVPool, tuple[EdgeKind, ...]]:
    """The pool, and the kinds that can be with it. `may_do_without`: memory that prefill workers write into.

    Raises:
        ConfigError: there is not so much memory, or it cannot be shared and has to be.
    """
    try:
        return engine.make_pool(shared=kinds[0].in_ds_pool), kinds
    except ConfigError as error:
        others = tuple(kind for kind in kinds if not kind.in_ds_pool)
        if not may_do_without or len(others) == len(kinds):
            raise
        logger.warning("no KV edge will be `%s`: %s", kinds[0].value, error)
        return engine.make_pool(shared=False), others


def first_that_can(
    kinds: Sequence[EdgeKind], build: Callable[[EdgeKind], KVReceiver], *, may_be_worse: bool
) -> tuple[EdgeKind, KVReceiver]:
    """The first kind of which a receiver can be built now.

    Raises:
        EdgeCrowded: there is no room for the best one; only without `may_be_worse`.
        EdgeError: none; what the last one says.
    """
    *others, last = kinds
    for kind in others:
        try:
            return kind, build(kind)
        except EdgeError as error:
            if isinstance(error, EdgeCrowded) and not may_be_worse:
                raise
            logger.warning("a KV edge is no `%s` edge: %s", kind.value, error)
    return last, build(last)
