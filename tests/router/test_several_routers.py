"""Router processes on one port, with limits that they share through one Redis."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
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

from cluster.errors import ConfigError
from cluster.ids import RouterId
from cluster.request_config import RequestConfig
from cluster.role_config import RouterConfig, dump_config, load_config
from cluster.wire.messages import Role
from router.address import bind
from router.asgi import Receive, Scope, Send
from router.generation import InFlight
from router.server import serve_http
from tests.router.conductor_peers import make_register
from tests.router.service_peers import Host, LiveWorker
from tests.router.test_service_process import LIMIT_S, START_S, expected_text, write_config
from tests.support.gateway import running_gateway
from tests.support.local_cluster import free_port
from tests.support.plain_http import plain_async_client
from tests.support.redis_world import RedisWorld, redis_world
from tests.support.scripted_cluster import Script, ScriptedCluster

KEYS = {"sk-few": "name=few requests-per-min=12", "sk-free": "name=free"}


@dataclass
class Router:
    process: asyncio.subprocess.Process
    host: Host
    admin: httpx.AsyncClient
    workers: list[LiveWorker]

    async def readiness(self) -> int | None:
        """The status; None where it does not listen yet, or has just closed this connection."""
        try:
            return (await self.admin.get("/ready")).status_code
        except httpx.TransportError:
            assert self.process.returncode is None
            return None

    async def kill(self) -> None:
        await self.host.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@dataclass
class Routers:
    """`url` is that of all of them."""

    url: str
    redis: RedisWorld
    all: list[Router]

    async def ask(self, key: str, **fields: object) -> httpx.Response:
        """Over a connection of its own, so either may get it."""
        body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, **fields}
        async with plain_async_client(base_url=self.url, timeout=LIMIT_S) as client:
            headers = {"authorization": f"Bearer {key}"}
            return await client.post("/v1/completions", json=body, headers=headers)

    async def num_losses(self) -> float:
        """How often any of them gave Redis up."""
        pages = [(await router.admin.get("/metrics")).text for router in self.all]
        lines = [line for page in pages for line in page.splitlines()]
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("baton_shared_state_losses_total")
        )

    async def num_answered(self, number: int) -> int:
        """Responses of one router to `/v1/completions`."""
        page = await self.all[number].admin.get("/metrics")
        lines = [line for line in page.text.splitlines() if line.startswith("baton_http_responses_total")]
        return sum(int(float(line.split()[-1])) for line in lines if '"/v1/completions"' in line)


async def listens(address: str) -> bool:
    """A socket's file is there a moment before anybody listens."""
    try:
        _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


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
    admin = plain_async_client(
        base_url=f"http://127.0.0.1:{admin_port}",
        headers={"authorization": "Bearer sk-free"},
        timeout=LIMIT_S,
    )
    router = Router(process, Host(config.control_address), admin, [])
    try:
        async with asyncio.timeout(START_S):
            while not await listens(config.control_address):
                assert process.returncode is None
                await asyncio.sleep(0.02)
            for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
                router.workers.append(await router.host.start(make_register(name, role)))
            while await router.readiness() != 200:
                await asyncio.sleep(0.02)
    except BaseException:  # nobody else knows of it yet
        await router.kill()
        raise
    return router


@pytest_asyncio.fixture
async def routers(tmp_path: Path) -> AsyncIterator[Routers]:
    keys = tmp_path / "keys"
    keys.write_text(
        "\n".join(f"sha256:{sha256(key.encode()).hexdigest()} {rest}" for key, rest in KEYS.items())
    )
    port = free_port()
    with redis_world() as world:
        starts = (start(tmp_path / str(number), number, port, world.url, keys) for number in range(3))
        routers = Routers(f"http://127.0.0.1:{port}", world, await asyncio.gather(*starts))
        yield routers
        for router in routers.all:
            await router.kill()
            await router.admin.aclose()


class Stream:
    """A reply under way, and the router that has it."""

    def __init__(self, routers: Routers) -> None:
        self._client = plain_async_client(base_url=routers.url, timeout=LIMIT_S)
        self._routers = routers
        self.seen = ""

    async def begin(self, running: list[int]) -> int:
        """Up to its first token; the rest waits for `end`. Returns which router it is."""
        before = [await self._routers.num_answered(number) for number in running]
        for number in running:
            self._routers.all[number].workers[1].steps = False
        body = {"prompt": "A stream", "max_tokens": 60, "temperature": 0, "stream": True}
        headers = {"authorization": "Bearer sk-free"}
        request = self._client.build_request("POST", "/v1/completions", json=body, headers=headers)
        self._response = await self._client.send(request, stream=True)
        self._lines = self._response.aiter_lines()
        while not self.seen:
            self.seen += _text(await anext(self._lines))
        after = [await self._routers.num_answered(number) for number in running]
        self._number = next(n for n, b, a in zip(running, before, after, strict=True) if a > b)
        for number in set(running) - {self._number}:
            self._go_on(number)
        return self._number

    async def end(self) -> None:
        self._go_on(self._number)
        async for line in self._lines:
            self.seen += _text(line)
        assert self.seen == expected_text("A stream", 60)[0]
        await self._response.aclose()
        await self._client.aclose()

    def _go_on(self, number: int) -> None:
        decode = self._routers.all[number].workers[1]
        decode.steps = True
        decode.wake.set()


async def test_one_port_one_limit_and_no_router_takes_the_others_streams(routers: Routers) -> None:
    # Each answers, and all admit together what the key may have.
    began = time.monotonic()
    statuses = [(await routers.ask("sk-few")).status_code for _ in range(60)]
    most = 12 * (1 + (time.monotonic() - began) / 60)
    assert set(statuses) <= {200, 429}
    if await routers.num_losses() == 0:  # else a busy machine let Redis answer late
        assert 12 <= statuses.count(200) <= most + 1
    assert [await routers.num_answered(number) > 0 for number in range(3)] == [True] * 3
    # Redis stands still: they go on, each with its part.
    routers.redis.freeze()
    try:
        for _ in range(6):
            assert (await routers.ask("sk-free")).status_code == 200
        assert {(await routers.ask("sk-few")).status_code for _ in range(4)} <= {200, 429}
    finally:
        routers.redis.thaw()
    # B132: one is asked to end. Its stream is finished, clients that come reach the others.
    stream = Stream(routers)
    leaving = await stream.begin([0, 1, 2])
    process = routers.all[leaving].process
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(LIMIT_S):
        while await routers.all[leaving].readiness() != 503:
            await asyncio.sleep(0.01)
    for _ in range(12):
        assert (await routers.ask("sk-free")).status_code == 200
    await stream.end()
    assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
    # One dies: what another streams goes on, and it takes the clients that come.
    others = sorted({0, 1, 2} - {leaving})
    stream = Stream(routers)
    holder = await stream.begin(others)
    (victim,) = set(others) - {holder}
    await routers.all[victim].kill()
    await stream.end()
    for _ in range(5):
        assert (await routers.ask("sk-free")).status_code == 200


def _text(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    assert "error" not in event
    text: str = event["choices"][0]["text"]
    return text


def test_b132_a_server_that_leaves_a_shared_port_finishes_what_runs(tokenizer_dir: Path) -> None:
    cluster = ScriptedCluster(script=Script(token_ids=tuple(b"x" * 20), delay_s=0.03))
    with running_gateway(tokenizer_dir, cluster, shares_port=True) as gateway:
        body = {"prompt": "Hi", "max_tokens": 20, "stream": True}
        with gateway.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            seen = _text(next(lines))
            with bind("127.0.0.1", gateway.port, is_shared=True) as other:
                other.listen()
                other.settimeout(LIMIT_S)
                gateway.stop()
                deadline = time.monotonic() + LIMIT_S
                while not gateway.app.state.in_flight.draining:
                    assert time.monotonic() < deadline
                    time.sleep(0.005)  # the server runs on a thread of its own
                for _ in range(8):
                    with socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT_S):
                        other.accept()[0].close()
            assert seen + "".join(map(_text, lines)) == "x" * 20


@pytest.mark.parametrize("shares", [True, False])
async def test_only_those_that_share_a_port_can_have_it_twice(shares: bool) -> None:
    first = bind("127.0.0.1", 0, is_shared=shares)
    port = first.getsockname()[1]
    try:
        if shares:
            first.listen()
            bind("127.0.0.1", port, is_shared=True).close()
        with pytest.raises(ConfigError, match="in use"):
            bind("127.0.0.1", port)
    finally:
        first.close()


async def test_a_router_that_shares_a_port_listens_once_it_can_serve() -> None:
    """Until then all clients reach the others."""
    can_serve, stop, listening = asyncio.Event(), asyncio.Event(), asyncio.Event()
    with bind("127.0.0.1", 0, is_shared=True) as other:
        other.listen()
        port = other.getsockname()[1]

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        serving = asyncio.create_task(
            serve_http(
                app,
                InFlight(),
                "127.0.0.1",
                port,
                stop=stop,
                shares_port_when=can_serve,
                on_listening=lambda host, port: listening.set(),
            )
        )
        for _ in range(8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            other.settimeout(LIMIT_S)
            accepted, _ = await asyncio.to_thread(other.accept)
            accepted.close()
            writer.close()
        assert not listening.is_set()
        other.close()
        can_serve.set()
        async with asyncio.timeout(LIMIT_S):
            await listening.wait()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 204")
            writer.close()
            stop.set()
            assert await serving


async def test_a_shared_port_that_somebody_took_alone_is_one_sentence() -> None:
    can_serve = asyncio.Event()
    with bind("127.0.0.1", 0, is_shared=True) as ours:
        port = ours.getsockname()[1]

        async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

        serving = asyncio.create_task(
            serve_http(app, InFlight(), "127.0.0.1", port, stop=asyncio.Event(), shares_port_when=can_serve)
        )
        await asyncio.sleep(0)
        ours.close()
        with bind("127.0.0.1", port):
            can_serve.set()
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(ConfigError, match="in use"):
                    await serving
