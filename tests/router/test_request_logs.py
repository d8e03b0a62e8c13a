"""Trouble with a request is logged under both of its names: the cluster's and the client's."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from cluster.wire.messages import Role
from tests.support.page_world import PageWorld, page_world


async def until_decoding(world: PageWorld) -> None:
    async with asyncio.timeout(10):
        while True:
            lanes = (await world.client.get("/page/picture")).json()["lanes"]
            if lanes and lanes[0]["spans"][-1][0] == "decode":
                return
            await asyncio.sleep(0.01)


async def test_a_retry_names_the_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.driver")
    async with page_world(tmp_path) as world:
        body = {"prompt": "Hi", "max_tokens": 200, "ignore_eos": True}
        asking = asyncio.create_task(
            world.client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        )
        await until_decoding(world)
        holder = next(
            worker
            for worker in world.host.workers.values()
            if worker.peer.register.role is Role.DECODE and worker.peer.num_held > 0
        )
        await holder.kill()
        answer = (await asking).json()
        picture = (await world.client.get("/page/picture")).json()
    told = [record for record in caplog.records if record.name == "router.driver" and "RE" in record.message]
    assert [record.message.split()[1] for record in told] == ["RETRIED", "RESUMED"]
    assert {(record.__dict__["request"], record.__dict__["request_id"]) for record in told} == {
        (answer["id"], "mine")
    }
    [lane] = picture["lanes"]
    assert (lane["attempts"], lane["tokens"], lane["end"]) == (2, 200, "finished")
    stages = [stage for stage, _ in lane["spans"]]
    assert stages == ["queue", "prefill", "transfer", "decode", "queue", "prefill", "decode"]
    assert picture["cluster"]["retried"] == 1
