"""A real gateway over loopback in a thread of its own, in front of a scripted cluster."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from cluster.clock import Clock
from cluster.metrics import Metrics
from cluster.tokenizer import Tokenizer
from router.app import create_app
from router.hosts import SideHosts
from router.limits import GatewayLimits
from router.model_info import ModelInfo, SamplingDefaults
from router.server import serve_http
from tests.support.byte_tokenizer import VOCAB_SIZE
from tests.support.plain_http import plain_client
from tests.support.scripted_cluster import ScriptedCluster
from tests.support.sse import strict_json

MODEL = "byte-model"
MAX_MODEL_LEN = 2048
LIMIT_S = 20.0  # for what has to come at all, however busy the machine


@dataclass
class RunningGateway:
    """`loop` is the server's; `stop` begins its graceful end."""

    cluster: ScriptedCluster
    client: httpx.Client
    url: str
    port: int
    app: Any
    loop: asyncio.AbstractEventLoop
    stop_event: asyncio.Event
    admin_port: int | None = None

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.stop_event.set)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post(
            "/v1/chat/completions", **{"messages": [{"role": "user", "content": "Hi"}], **fields}
        )

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", **{"prompt": "Hi", **fields})

    def check_alive(self) -> None:
        """ALIVE: the next plain request is answered. A test that is held up may miss the time in which it has
        to arrive, where that is short: it comes again."""
        for _ in range(20):
            response = self.complete(max_tokens=5)
            if response.status_code != 408:
                break
        assert response.status_code == 200, response.text

    def until_idle(self) -> None:
        """Wait for the server's side of replies that are over for the client."""
        deadline = time.monotonic() + LIMIT_S
        while self.client.get("/cluster").json()["in_flight"]:
            assert time.monotonic() < deadline, "a request is still in flight"


def model_info(defaults: SamplingDefaults | None = None) -> ModelInfo:
    return ModelInfo(
        name=MODEL,
        root="models/byte-model",
        created=1_700_000_000,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        defaults=defaults or SamplingDefaults(),
    )


@contextmanager
def running_gateway(
    tokenizer_dir: Path,
    cluster: ScriptedCluster | None = None,
    *,
    limits: GatewayLimits | None = None,
    model: ModelInfo | None = None,
    grace_s: float = 5.0,
    clock: Clock | None = None,
    shares_port: bool = False,
    arrival_s: float = 60.0,
    hosts: SideHosts | None = None,
    admin: bool = False,
) -> Iterator[RunningGateway]:
    """Serve until the block ends; fails if the server does not stop."""
    cluster = cluster or ScriptedCluster()
    tokenizer = Tokenizer.load(tokenizer_dir)
    listening = threading.Event()
    parts: dict[str, Any] = {}

    async def serve() -> None:
        stop = asyncio.Event()
        metrics = Metrics(CollectorRegistry(), version="test", model=MODEL)
        app = create_app(
            cluster,
            cluster,
            tokenizer,
            model or model_info(),
            metrics,
            version="test",
            limits=limits,
            clock=clock,
            hosts=hosts,
        )

        def on_listening(host: str, port: int) -> None:
            parts.update(app=app, stop=stop, port=port, loop=asyncio.get_running_loop())
            listening.set()

        can_serve = asyncio.Event()
        can_serve.set()
        await serve_http(
            app,
            app.state.in_flight,
            "127.0.0.1",
            0,
            stop=stop,
            grace_s=grace_s,
            max_header_bytes=(limits or GatewayLimits()).max_header_bytes,
            shares_port_when=can_serve if shares_port else None,
            arrival_s=arrival_s,
            on_listening=on_listening,
            admin=("127.0.0.1", 0) if admin else None,
            on_admin_listening=lambda host, port: parts.update(admin_port=port),
        )

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert listening.wait(LIMIT_S), "the gateway does not listen"
    url = f"http://127.0.0.1:{parts['port']}"
    with plain_client(base_url=url, timeout=LIMIT_S) as client:
        gateway = RunningGateway(
            cluster,
            client,
            url,
            parts["port"],
            parts["app"],
            parts["loop"],
            parts["stop"],
            parts.get("admin_port"),
        )
        yield gateway
    gateway.stop()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "the gateway does not stop"


def until_quotas_are_quiet(gateway: RunningGateway) -> None:
    """Wait for the server's side of replies that are over for the client: nothing is held of any quota."""
    quiet = threading.Event()

    def look() -> None:
        if gateway.app.state.quotas.quiet():
            quiet.set()
        else:
            gateway.loop.call_later(0.005, look)

    gateway.loop.call_soon_threadsafe(look)
    assert quiet.wait(LIMIT_S)


def check_error(
    response: httpx.Response, status: int, *, param: str | None = None, code: str | None = None
) -> str:
    """ERR(status, code, param): the OpenAI shape, a request id, nothing internal; returns the message."""
    assert response.status_code == status, response.text
    body = strict_json(response.content)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    assert response.headers["x-request-id"]
    for secret in ("Traceback", "/work", "/home", "/root", ".py", "0x", "object at", "<class"):
        assert secret not in response.text, response.text
    message: str = error["message"]
    return message
