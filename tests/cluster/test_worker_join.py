"""A worker that finds no router ends after its deadline, with the reason; one that did goes on without."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cluster.clock import MonotonicClock
from cluster.engine.batch import StepOutput, StepPlan
from cluster.errors import ConfigError
from cluster.ids import Epoch, RouterId, WorkerId
from cluster.kv.block_manager import BlockManager
from cluster.wire.kv_events import WorkerSays
from cluster.wire.messages import KVGeometry, Register, Role, Welcome
from cluster.wire.stream import Stream, listen
from cluster.worker_driver import Held, WorkerDriver
from cluster.worker_io import Action
from prefill_worker.core import PrefillConfig, PrefillCore

TOKEN = b"a-token-of-the-cluster"
LIMIT_S = 30.0


class NoEdges:
    def carry(self, action: Action) -> None:
        raise AssertionError(action)

    async def close(self) -> None:
        return


class NoRunner:
    def run(self, plan: StepPlan, await_history: object = None) -> StepOutput:
        raise AssertionError(plan)


REGISTER = Register(
    worker=WorkerId("prefill-0"),
    role=Role.PREFILL,
    epoch=Epoch(1),
    pid=os.getpid(),
    model="m",
    fingerprint="f",
    max_model_len=64,
    max_num_seqs=1,
    geometry=KVGeometry(
        first_layer=0,
        num_layers=1,
        first_head=0,
        num_heads=1,
        head_dim=8,
        block_size=16,
        num_blocks=4,
        dtype="float32",
    ),
)


def worker(
    address: str,
    token: bytes = TOKEN,
    join_timeout_s: float | None = LIMIT_S,
    keep_lifeline: Callable[[int], Held | None] | None = None,
) -> WorkerDriver:
    blocks = BlockManager(4, 16, "f")
    return WorkerDriver(
        core=PrefillCore(PrefillConfig(block_bytes=64, max_step_tokens=16), blocks),
        make_runner=NoRunner,
        cache=blocks,
        keep_lifeline=keep_lifeline,
        token=token,
        router_addresses=[address],
        clock=MonotonicClock(),
        step_timeout_s=LIMIT_S,
        join_timeout_s=join_timeout_s,
    )


async def run(driver: WorkerDriver, stop: asyncio.Event) -> None:
    await driver.run(REGISTER, NoEdges(), stop, 0.0)


def router(joined: Callable[[], object]) -> Callable[[Stream[WorkerSays]], Awaitable[None]]:
    async def serve(stream: Stream[WorkerSays]) -> None:
        async for message in stream:
            if isinstance(message, Register):
                stream.post(Welcome(router=RouterId("router-0"), heartbeat_interval_s=LIMIT_S))
                joined()

    return serve


async def test_without_a_router_it_ends_with_the_reason(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/none.sock"
    with pytest.raises(ConfigError) as raised:
        await asyncio.wait_for(run(worker(address, join_timeout_s=0.1), asyncio.Event()), LIMIT_S)
    assert str(raised.value).startswith(f"no router within 0.1 s: cannot connect to {address}: ")
    assert str(raised.value).endswith("; start one, or correct its address")


async def test_with_another_token_it_ends_with_the_reason(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/r.sock"
    listener = await listen(address, TOKEN, WorkerSays, router(lambda: None))
    try:
        driver = worker(address, b"another-token-of-one")
        running = asyncio.create_task(run(driver, asyncio.Event()))
        async with asyncio.timeout(LIMIT_S):
            while not driver._last_failure:
                await asyncio.sleep(0.01)
        driver._check_joined()  # its time is over
        with pytest.raises(ConfigError, match=r"no router within 30 s: .*token"):
            await asyncio.wait_for(running, LIMIT_S)
    finally:
        await listener.close()


async def test_a_router_that_comes_up_later_is_found_and_may_go_again(tmp_path: Path) -> None:
    address, stop, joined = f"unix:{tmp_path}/r.sock", asyncio.Event(), asyncio.Event()
    driver = worker(address)
    early = asyncio.create_task(run(driver, stop))
    patient = asyncio.create_task(run(worker(f"unix:{tmp_path}/none.sock", join_timeout_s=None), stop))
    await asyncio.sleep(0)  # they dial before anybody listens
    listener = await listen(address, TOKEN, WorkerSays, router(joined.set))
    await asyncio.wait_for(joined.wait(), LIMIT_S)
    while not driver._has_joined:  # the welcome is on its way
        await asyncio.sleep(0.01)
    await listener.close()
    driver._check_joined()  # its time is over: that it has joined once is enough
    await asyncio.sleep(0.1)
    assert not early.done()
    assert not patient.done()
    stop.set()
    await asyncio.wait_for(asyncio.gather(early, patient), LIMIT_S)
