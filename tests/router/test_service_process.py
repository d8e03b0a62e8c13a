"""The router as a process: configuration in, HTTP out, workers over a unix socket, signals at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from cluster.ids import RouterId
from cluster.request_config import RequestConfig
from cluster.role_config import RouterConfig, dump_config, load_config
from cluster.sampling import FinishReason, SamplingParams, finish_reason
from cluster.tokenizer import Tokenizer
from cluster.wire.messages import Register, Role
from router import service
from tests.router.conductor_peers import BLOCK_SIZE, make_register, scripted_token
from tests.router.service_peers import TOKEN, Host, LiveWorker
from tests.support.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from tests.support.local_cluster import free_port
from tests.support.plain_http import plain_async_client

START_S = 60.0
LIMIT_S = 20.0  # for what has to come at all, however busy the machine


class RouterProcess:
    def __init__(self, process: asyncio.subprocess.Process, host: Host, client: httpx.AsyncClient) -> None:
        self.process = process
        self.host = host
        self.client = client

    async def start(self, name: str, role: Role, *, epoch: int = 1, steps: bool = True) -> LiveWorker:
        register: Register = make_register(name, role, epoch)
        return await self.host.start(register, steps=steps)

    async def until_status(self, path: str, status: int, limit_s: float = LIMIT_S) -> httpx.Response:
        async with asyncio.timeout(limit_s):
            while True:
                response = await self.client.get(path)
                assert response.status_code in (200, 503)  # B135: nothing else, ever
                if response.status_code == status:
                    return response
                await asyncio.sleep(0.02)

    async def complete(self, prompt: str, **fields: object) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})


def write_config(directory: Path, port: int, grace_s: float = 30.0) -> Path:
    """Workers beat from the test's process: one that is held up for a while must not look dead."""
    model = write_byte_tokenizer(directory / "model")
    (model / "config.json").write_text(
        json.dumps({"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048, "sliding_window": None})
    )
    config = RouterConfig(
        cluster_token=TOKEN.decode(),
        served_model_name="scripted",
        block_size=BLOCK_SIZE,
        heartbeat_interval_s=2.0,
        drain_grace_s=grace_s,
        router=RouterId("router-0"),
        model_dir=str(model),
        host="127.0.0.1",
        port=port,
        control_address=f"unix:{directory}/control",
        num_prefill=1,
        num_decode=1,
    )
    path = directory / "router.json"
    path.write_bytes(dump_config(config))
    return path


@pytest_asyncio.fixture
async def router(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[RouterProcess]:
    port = free_port()
    path = write_config(tmp_path, port, getattr(request, "param", 30.0))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", str(path), stderr=asyncio.subprocess.PIPE
    )
    async with plain_async_client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
        running = RouterProcess(process, Host(f"unix:{tmp_path}/control"), client)
        async with asyncio.timeout(START_S):
            while True:
                try:
                    await client.get("/health")
                    break
                except httpx.TransportError:
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
        yield running
        await running.host.close()
        if process.returncode is None:
            process.kill()
        await process.communicate()


def expected_text(prompt: str, max_tokens: int) -> tuple[str, FinishReason]:
    history, outputs = list(prompt.encode()), list[int]()
    while (reason := finish_reason(SamplingParams(max_tokens=max_tokens), outputs)) is None:
        outputs.append(scripted_token([*history, *outputs]))
    return bytes(outputs).decode(), reason


async def test_b135_from_nothing_to_an_answer(router: RouterProcess) -> None:
    assert (await router.client.get("/ready")).json()["phase"] == "waiting_for_workers"
    refused = await router.complete("Hello")
    assert refused.status_code == 503
    await router.start("p0", Role.PREFILL)
    await router.start("d0", Role.DECODE)
    await router.until_status("/ready", 200)
    response = await router.complete("Hello", max_tokens=12, timings=True)
    assert response.status_code == 200, response.text
    body = response.json()
    text, reason = expected_text("Hello", 12)
    assert body["choices"][0]["text"] == text
    assert body["choices"][0]["finish_reason"] == reason.value
    assert body["timings"]["prefill_worker"] == "p0"
    assert body["timings"]["decode_worker"] == "d0"
    cluster = (await router.client.get("/cluster")).json()
    assert [(worker["id"], worker["state"]) for worker in cluster["workers"]] == [
        ("d0", "ready"),
        ("p0", "ready"),
    ]


async def test_b135_not_announced_before_http_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted router finds its workers there: they are warm before its tokenizer is loaded."""
    load_tokenizer = service._load_tokenizer

    def load_slowly(directory: Path) -> Tokenizer:
        time.sleep(1.0)
        return load_tokenizer(directory)

    monkeypatch.setattr(service, "_load_tokenizer", load_slowly)
    port = free_port()
    config = load_config(write_config(tmp_path, port).read_bytes())
    assert isinstance(config, RouterConfig)
    stop, announced = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(service.run(config, stop=stop, on_ready=announced.set))
    host = Host(config.control_address)
    async with asyncio.timeout(START_S):
        while not (tmp_path / "control").exists():
            await asyncio.sleep(0.01)
        await host.start(make_register("p0", Role.PREFILL, 1))
        await host.start(make_register("d0", Role.DECODE, 1))
        await announced.wait()
        async with plain_async_client() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
        stop.set()
        await serving
    await host.close()


async def test_the_operators_limits_and_names_are_at_work(tmp_path: Path) -> None:
    port = free_port()
    config = load_config(write_config(tmp_path, port).read_bytes())
    assert isinstance(config, RouterConfig)
    requests = RequestConfig(request_arrival_s=0.3, max_queued=7, max_fields=32, max_bodies_bytes=70_000)
    config = msgspec.structs.replace(config, requests=requests)
    assert service._conductor_config(config).max_queued == 7
    stop, url = asyncio.Event(), f"http://127.0.0.1:{port}"
    serving = asyncio.create_task(service.run(config, stop=stop))
    async with asyncio.timeout(START_S), plain_async_client() as client:

        async def ask(method: str, path: str, **given: Any) -> httpx.Response:
            """Again while it does not listen yet, or if this process was held up: it has 0.3 s to send."""
            while True:
                with contextlib.suppress(httpx.TransportError):
                    response = await client.request(method, f"{url}{path}", **given)
                    if response.status_code != 408:
                        return response
                await asyncio.sleep(0.02)

        assert (await ask("GET", "/v1/models")).status_code == 200
        refused = await ask("GET", "/v1/models", headers={"host": "evil.example"})
        assert refused.status_code == 403
        many = {"prompt": "x", **{f"x{index}": 1 for index in range(32)}}
        refused = await ask("POST", "/v1/completions", json=many)
        assert refused.json()["error"]["message"].startswith("A request may have at most 32 fields")
        refused = await ask("POST", "/tokenize", json={"prompt": "x" * 200_000})
        assert refused.status_code == 503  # no room for such a body
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
    stop.set()
    await serving


async def test_killed_decode_worker_in_a_stream(router: RouterProcess) -> None:
    await router.start("p0", Role.PREFILL)
    workers = [await router.start(f"d{i}", Role.DECODE) for i in range(2)]
    await router.until_status("/ready", 200)
    text, _ = expected_text("Some prompt", 60)
    for worker in workers:
        worker.steps = False
    seen, killed = "", False
    request = {"prompt": "Some prompt", "max_tokens": 60, "temperature": 0, "stream": True}
    async with router.client.stream("POST", "/v1/completions", json=request) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event
            seen += event["choices"][0]["text"]
            if seen and not killed:
                killed = True
                holder = next(worker for worker in workers if worker.peer.num_held > 0)
                other = next(worker for worker in workers if worker is not holder)
                await holder.kill()
                other.steps = True
                other.wake.set()
    assert killed
    assert seen == text


async def test_sigterm_finishes_what_runs_and_exits_0(router: RouterProcess) -> None:
    await router.start("p0", Role.PREFILL)
    decode = await router.start("d0", Role.DECODE)
    await router.until_status("/ready", 200)
    decode.steps = False
    running = asyncio.create_task(router.complete("Hello", max_tokens=12))
    async with asyncio.timeout(LIMIT_S):
        while decode.peer.num_held == 0:
            await asyncio.sleep(0.01)
    router.process.send_signal(signal.SIGTERM)
    await router.until_status("/ready", 503)
    assert (await router.complete("late")).status_code == 503
    decode.steps = True
    decode.wake.set()
    response = await running
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == expected_text("Hello", 12)[0]
    assert await asyncio.wait_for(router.process.wait(), LIMIT_S) == 0
    await asyncio.wait_for(decode.gone.wait(), LIMIT_S)


@pytest.mark.parametrize("router", [0.3], indirect=True)
async def test_sigterm_at_the_deadline_ends_with_an_error_and_frees_the_workers(
    router: RouterProcess,
) -> None:
    prefill = await router.start("p0", Role.PREFILL)
    decode = await router.start("d0", Role.DECODE)
    await router.until_status("/ready", 200)
    decode.steps = False
    running = asyncio.create_task(router.complete("Hello", max_tokens=12))
    async with asyncio.timeout(LIMIT_S):
        while decode.peer.num_held == 0:
            await asyncio.sleep(0.01)
    router.process.send_signal(signal.SIGTERM)
    response = await running
    assert response.status_code == 503
    assert "error" in response.json()
    assert await asyncio.wait_for(router.process.wait(), LIMIT_S) == 0
    assert decode.peer.num_held == 0
    assert prefill.peer.num_held == 0


def run_to_the_end(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "router", str(path)], capture_output=True, text=True, timeout=60, check=False
    )


def test_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run_to_the_end(write_config(tmp_path, taken.getsockname()[1]))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "in use" in last
    assert "Traceback" not in done.stderr


def test_model_without_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    path = write_config(tmp_path, free_port())
    (tmp_path / "model" / "tokenizer.json").unlink()
    done = run_to_the_end(path)
    assert done.returncode != 0
    assert "tokenizer" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_importing_the_router_leaves_torch_unloaded() -> None:
    code = "import sys, router.__main__, router.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
