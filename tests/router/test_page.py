"""The page's routes: what they answer, what they keep to themselves, and how a stream of changes behaves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.wire.messages import Role, WorkerLoad
from router import page
from router.generation import InFlight
from router.page import CSP, STATIC, PageEvents, PageSource
from router.page_feed import PageFeed
from router.public_side import PRIVATE_PATHS
from tests.support.gateway import LIMIT_S, RunningGateway, check_error
from tests.support.page_world import page_world
from tests.support.plain_http import plain_async_client
from tests.support.scripted_cluster import ScriptedCluster, worker

LOAD = WorkerLoad(running=2, waiting=1, blocks_used=5, blocks_cached=3, blocks_free=92, decode_step_s=0.0123)


def test_the_page_and_its_files(gateway: RunningGateway) -> None:
    shown = gateway.client.get("/")
    assert shown.status_code == 200
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert shown.headers["x-request-id"]
    names = re.findall(r"page/([\w.]+)", shown.text)
    assert {"style.css", "app.js", "baton.svg"} <= set(names)
    for file in STATIC.iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        answer = gateway.client.get(path)
        assert answer.content == file.read_bytes(), path
        assert answer.headers["content-security-policy"] == CSP
        assert answer.headers["x-content-type-options"] == "nosniff"
        kept = gateway.client.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (kept.status_code, kept.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/page/index.html", "/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/app.js/", "/page/x.js"],
)
def test_nothing_else_can_be_asked_for(gateway: RunningGateway, path: str) -> None:
    check_error(gateway.client.get(path), 404, code="not_found")


def test_the_policy_allows_nothing_inline_and_nothing_foreign() -> None:
    rules = dict(rule.strip().partition(" ")[::2] for rule in CSP.split(";"))
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in CSP


def test_the_picture(gateway: RunningGateway) -> None:
    gateway.cluster.workers = (worker("decode-0", Role.DECODE, load=LOAD),)
    answer = gateway.client.get("/page/picture")
    assert answer.headers["cache-control"] == "no-store"
    picture = answer.json()
    assert picture["about"]["model"] == "byte-model"
    assert picture["about"]["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1}
    assert picture["cluster"]["state"] == "ready"
    [shown] = picture["workers"]
    assert shown["kv"] == {"used": 5, "cached": 3, "free": 92}
    assert (shown["id"], shown["role"], shown["running"], shown["step_ms"]) == ("decode-0", "decode", 2, 12.3)
    assert picture["lanes"] == []
    assert len(picture["series"]["points"]) == 60


# ---- the stream ----------------------------------------------------------------------------------


class OpenReply:
    """Of a reply that is being written, what `InFlight` needs."""

    def close(self) -> None:
        return None


MAX_VIEWERS = 3


class Viewer:
    """The far side of one stream, without a server: ASGI messages in and out."""

    def __init__(self, events: PageEvents) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._left = asyncio.Event()
        self.task = asyncio.create_task(events({"type": "http", "method": "GET"}, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.sent.put(message)

    def leave(self) -> None:
        self._left.set()

    async def next(self) -> bytes:
        message = await asyncio.wait_for(self.sent.get(), LIMIT_S)
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            return await self.next()
        body: bytes = message["body"]
        return body

    async def part(self) -> dict[str, Any]:
        body = await self.next()
        assert body.startswith(b"data: "), body
        assert body.endswith(b"\n\n")
        part: dict[str, Any] = json.loads(body[6:])
        return part


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> PageSource:
    """Events every 10 ms, and a clock that stands still: nothing changes by itself."""
    monkeypatch.setattr(page, "PICTURE_S", 0.01)
    cluster = ScriptedCluster()
    return PageSource(PageFeed(), cluster, InFlight(), "m", "1", lambda: 1.0)


async def test_a_stream_tells_the_whole_and_then_what_changes(source: PageSource) -> None:
    viewer = Viewer(PageEvents(source, MAX_VIEWERS))
    whole = await viewer.part()
    assert set(whole) == {"now", "about", "cluster", "workers", "window", "series"}
    cluster = source.status
    assert isinstance(cluster, ScriptedCluster)
    cluster.workers = (worker("decode-0", Role.DECODE, load=LOAD),)
    part = await viewer.part()
    assert set(part) == {"now", "workers"}
    with source.in_flight.hold([OpenReply()]):  # type: ignore[list-item]
        source.in_flight.draining = True
        part = await viewer.part()
        assert part["cluster"]["state"] == "draining"
    assert await viewer.next() == b""  # the server stops and nothing runs: so ends the stream
    await viewer.task


async def test_silence_is_broken_by_a_comment(source: PageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PING_S", 0.03)
    viewer = Viewer(PageEvents(source, MAX_VIEWERS))
    await viewer.part()
    assert await viewer.next() == b": ping\n\n"
    viewer.leave()
    await viewer.task


async def test_viewers_are_limited_and_make_room(source: PageSource) -> None:
    events = PageEvents(source, MAX_VIEWERS)
    viewers = [Viewer(events) for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        await viewer.part()
    refused = Viewer(events)
    await refused.task
    assert (await refused.sent.get())["status"] == 503
    assert b"at most 3 viewers" in (await refused.sent.get())["body"]
    for viewer in viewers:
        viewer.leave()
        await viewer.task
    again = Viewer(events)
    assert "about" in await again.part()
    again.leave()
    await again.task


async def test_a_viewer_that_does_not_read_is_let_go(
    source: PageSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "STALLED_S", 0.05)
    events = PageEvents(source, MAX_VIEWERS)

    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async with asyncio.timeout(LIMIT_S):
        await events({"type": "http", "method": "GET"}, receive, never)
    assert events._num_viewers == 0


# ---- a real router -------------------------------------------------------------------------------


async def parts(url: str) -> AsyncIterator[dict[str, Any]]:
    async with plain_async_client(timeout=LIMIT_S) as client, client.stream("GET", url) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


async def test_requests_become_lanes(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world:
        stream = parts(f"{world.url}/page/events")
        first = await anext(stream)
        assert first["cluster"]["arrived"] == 0  # the warm-up is nobody's request
        response = await world.ask("A secret prompt", 30)
        reply_id = response.json()["id"]
        lanes: dict[str, Any] = {}
        async for part in stream:
            lanes |= {lane["id"]: lane for lane in part.get("lanes", ())}
            assert "secret" not in json.dumps(part)
            if lanes and lanes[reply_id]["end"]:
                break
        await stream.aclose()
        lane = lanes[reply_id]
        assert (lane["end"], lane["tokens"], lane["prefill"]) == ("finished", 30, "prefill-0")
        assert lane["prompt"] == len("A secret prompt")
        stages = [stage for stage, _ in lane["spans"]]
        assert stages == ["queue", "prefill", "transfer", "decode"]
        times = [at for _, at in lane["spans"]] + [lane["ended_at"]]
        assert times == sorted(times)


async def test_a_stop_ends_the_streams_of_viewers(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world:
        stream = parts(f"{world.url}/page/events")
        await anext(stream)
        world.stop.set()
        async with asyncio.timeout(LIMIT_S):
            seen = [part async for part in stream]
        assert all("now" in part for part in seen)


async def test_b155_the_public_side_keeps_the_cluster_to_itself(tmp_path: Path) -> None:
    async with page_world(tmp_path, with_admin_port=True) as world:
        for path in PRIVATE_PATHS:
            check_error(await world.client.get(path), 404, code="not_found")
        for path in ("//cluster", "/cluster/", "/%63luster", "/CLUSTER", "/page/../cluster", "/cluster?x=1"):
            assert (await world.client.get(world.url + path)).status_code == 404, path  # B155
        assert (await world.client.head("/metrics")).status_code == 404
        assert (await world.client.get("/")).status_code == 200
        assert (await world.client.get("/ready")).status_code == 200
        assert (await world.ask("Hi", 3)).status_code == 200
        async with plain_async_client(base_url=world.admin_url) as admin:
            assert (await admin.get("/cluster")).json()["state"] == "ready"
            assert "baton_ready 1.0" in (await admin.get("/metrics")).text
            assert (await admin.get("/page/picture")).json()["cluster"]["arrived"] == 1
            assert (await admin.get("/v1/models")).status_code == 200
