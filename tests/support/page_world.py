"""A router as it is, with scripted workers that take their time: what a browser looks at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from cluster.ids import RouterId
from cluster.role_config import RouterConfig
from cluster.wire.messages import FirstToken, Role, WorkerToRouter
from router import service
from tests.router.conductor_peers import BLOCK_SIZE, ScriptedPrefill, make_register
from tests.router.service_peers import TOKEN, Host, LiveWorker
from tests.support.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from tests.support.local_cluster import free_port
from tests.support.plain_http import plain_async_client

MODEL = "scripted"
START_S = 20.0


class PacedWorker(LiveWorker):
    """Each step takes `step_s`, as an engine's would, and KV comes as much later than the first token."""

    def __init__(self, *given: Any, step_s: float, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._step_s = step_s

    def post(self, message: WorkerToRouter) -> None:
        """With the times as they are: the scripted ones are made up."""
        if isinstance(message, FirstToken):
            message = msgspec.structs.replace(message, queue_s=0.0, prefill_s=self._step_s)
        super().post(message)

    async def _work(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            self._flush()
            while self.steps and self.peer.num_held > 0:
                await asyncio.sleep(self._step_s)
                before = len(self.peer.out)
                self.peer.step(asyncio.get_running_loop().time())
                if len(self.peer.out) == before:
                    break  # nothing to compute until something comes
                self._flush()
                if isinstance(self.peer, ScriptedPrefill):
                    await asyncio.sleep(self._step_s)
                    self._ship(self.peer)


@dataclass
class PageWorld:
    """`url` answers everything, or the API alone where `admin_url` is another."""

    url: str
    admin_url: str
    client: httpx.AsyncClient
    host: Host
    stop: asyncio.Event

    async def ask(self, prompt: str, max_tokens: int = 40) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        return await self.client.post("/v1/completions", json=body)


@asynccontextmanager
async def page_world(
    directory: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 2,
    step_s: float = 0.01,
    with_admin_port: bool = False,
    **settings: Any,
) -> AsyncIterator[PageWorld]:
    """A ready router in this process; stops within its grace time when the block ends."""
    model = write_byte_tokenizer(directory / "model")
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048, "sliding_window": None}
    (model / "config.json").write_text(json.dumps(sizes))
    port = free_port()
    admin_port = port + 1
    config = RouterConfig(
        cluster_token=TOKEN.decode(),
        served_model_name=MODEL,
        block_size=BLOCK_SIZE,
        heartbeat_interval_s=0.2,
        drain_grace_s=2.0,
        router=RouterId("router-0"),
        model_dir=str(model),
        host="127.0.0.1",
        port=port,
        control_address=f"unix:{directory}/control",
        num_prefill=num_prefill,
        num_decode=num_decode,
        admin_port=admin_port if with_admin_port else None,
        **settings,
    )
    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(service.run(config, stop=stop, on_ready=ready.set))
    host = Host(config.control_address)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(START_S):
            while not (directory / "control").exists():
                await asyncio.sleep(0.02)
            for role, number in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
                for index in range(number):
                    register = make_register(f"{role.value}-{index}", role, 1)
                    await PacedWorker(host, register, step_s=step_s).start()
            await ready.wait()
        async with plain_async_client(base_url=url, timeout=20.0) as client:
            admin_url = f"http://127.0.0.1:{admin_port}" if with_admin_port else url
            yield PageWorld(url, admin_url, client, host, stop)
    finally:
        stop.set()
        async with asyncio.timeout(START_S):
            await serving
        await host.close()
