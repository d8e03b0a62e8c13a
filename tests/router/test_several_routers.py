"""Two router processes on one port, with limits that they share through one Redis."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from cluster.config import RequestConfig, RouterConfig, dump_config, load_config
from cluster.ids import RouterId
from cluster.wire.messages import Role
from tests.router.conductor_peers import make_register
from tests.router.service_peers import Host, LiveWorker
from tests.router.test_service_process import START_S, expected_text, free_port, write_config
from tests.support.redis_world import RedisWorld, redis_world

KEYS = {"sk-few": "name=few requests-per-min=12", "sk-free": "name=free"}


@dataclass
class Router:
    process: asyncio.subprocess.Process
    host: Host
    admin: httpx.AsyncClient
    workers: list[LiveWorker]

    async def kill(self) -> None:
        await self.host.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@dataclass
class Pair:
    """`url` is that of both."""

    url: str
    redis: RedisWorld
    routers: list[Router]

    async def ask(self, key: str, **fields: object) -> httpx.Response:
        """Over a connection of its own, so either may get it."""
        body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, **fields}
        async with httpx.AsyncClient(base_url=self.url, timeout=20.0) as client:
            headers = {"authorization": f"Bearer {key}"}
            return await client.post("/v1/completions", json=body, headers=headers)

    async def num_losses(self) -> float:
        """How often any of them gave Redis up."""
        pages = [(await router.admin.get("/metrics")).text for router in self.routers]
        lines = [line for page in pages for line in page.splitlines()]
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("baton_shared_state_losses_total")
        )

    async def num_answered(self, number: int) -> int:
        """Responses of one router to `/v1/completions`."""
        page = await self.routers[number].admin.get("/metrics")
        lines = [line for line in page.text.splitlines() if line.startswith("baton_http_responses_total")]
        return sum(int(float(line.split()[-1])) for line in lines if '"/v1/completions"' in line)


async def start(directory: Path, number: int, port: int, redis: str, keys: Path) -> Router:
    directory.mkdir()
    config = load_config(write_config(directory, port).read_bytes())
    assert isinstance(config, RouterConfig)
    admin_port = free_port()
    config = msgspec.structs.replace(
        config,
        router=RouterId(f"router-{number}"),
        shares_port=True,
        admin_port=admin_port,
        redis=redis,
        requests=RequestConfig(api_keys_file=str(keys)),
    )
    path = directory / "config.json"
    path.write_bytes(dump_config(config))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", str(path), stderr=asyncio.subprocess.PIPE
    )
    admin = httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{admin_port}", headers={"authorization": "Bearer sk-free"}, timeout=20.0
    )
    host = Host(config.control_address)
    async with asyncio.timeout(START_S):
        while not Path(config.control_address.removeprefix("unix:")).exists():
            assert process.returncode is None
            await asyncio.sleep(0.02)
        workers = [await host.start(make_register("p0", Role.PREFILL))]
        workers.append(await host.start(make_register("d0", Role.DECODE)))
        while True:
            try:
                if (await admin.get("/ready")).status_code == 200:
                    break
            except httpx.TransportError:
                assert process.returncode is None
            await asyncio.sleep(0.02)
    return Router(process, host, admin, workers)


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    keys = tmp_path / "keys"
    keys.write_text(
        "\n".join(f"sha256:{sha256(key.encode()).hexdigest()} {rest}" for key, rest in KEYS.items())
    )
    port = free_port()
    with redis_world() as world:
        starts = (start(tmp_path / str(number), number, port, world.url, keys) for number in range(2))
        routers = await asyncio.gather(*starts)
        yield Pair(f"http://127.0.0.1:{port}", world, routers)
        for router in routers:
            await router.kill()
            await router.admin.aclose()


async def test_one_port_one_limit_and_no_router_takes_the_others_streams(pair: Pair) -> None:
    # Either answers, and both admit together what the key may have.
    began = time.monotonic()
    statuses = [(await pair.ask("sk-few")).status_code for _ in range(40)]
    most = 12 * (1 + (time.monotonic() - began) / 60)
    assert set(statuses) <= {200, 429}
    if await pair.num_losses() == 0:  # else a busy machine let Redis answer late
        assert 12 <= statuses.count(200) <= most + 1
    assert [await pair.num_answered(number) > 0 for number in range(2)] == [True, True]
    # Redis stands still: they go on, each with its part.
    pair.redis.freeze()
    try:
        for _ in range(6):
            assert (await pair.ask("sk-free")).status_code == 200
        assert {(await pair.ask("sk-few")).status_code for _ in range(4)} <= {200, 429}
    finally:
        pair.redis.thaw()
    # One dies: what the other streams goes on, and it takes the clients that come.
    text, _ = expected_text("A stream", 60)
    before = [await pair.num_answered(number) for number in range(2)]
    for router in pair.routers:
        router.workers[1].steps = False
    async with httpx.AsyncClient(base_url=pair.url, timeout=20.0) as client:
        request = {"prompt": "A stream", "max_tokens": 60, "temperature": 0, "stream": True}
        headers = {"authorization": "Bearer sk-free"}
        seen = ""
        async with client.stream("POST", "/v1/completions", json=request, headers=headers) as response:
            lines = response.aiter_lines()
            while not seen:
                seen += _text(await anext(lines))
            after = [await pair.num_answered(number) for number in range(2)]
            holder = 0 if after[0] > before[0] else 1
            await pair.routers[1 - holder].kill()
            decode = pair.routers[holder].workers[1]
            decode.steps = True
            decode.wake.set()
            async for line in lines:
                seen += _text(line)
    assert seen == text
    for _ in range(5):
        assert (await pair.ask("sk-free")).status_code == 200


def _text(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    assert "error" not in event
    text: str = event["choices"][0]["text"]
    return text


@pytest.mark.parametrize("shares", [True, False])
async def test_only_those_that_share_a_port_can_have_it_twice(shares: bool) -> None:
    from cluster.errors import ConfigError
    from router.server import bind

    first = bind("127.0.0.1", 0, is_shared=shares)
    port = first.getsockname()[1]
    try:
        if shares:
            bind("127.0.0.1", port, is_shared=True).close()
        with pytest.raises(ConfigError, match="in use"):
            bind("127.0.0.1", port)
    finally:
        first.close()
