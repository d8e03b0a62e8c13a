"""A worker gives a second stream to whoever holds it, and ends it after the first."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cluster.ids import RouterId
from cluster.wire.kv_events import DiallerSays
from cluster.wire.messages import Lifeline, Register, Welcome
from cluster.wire.stream import Stream, listen
from tests.cluster.test_worker_join import LIMIT_S, TOKEN, run, worker


class Held:
    """The descriptor, kept open until closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)


class Router:
    """Welcomes workers to link `link` and notes what comes in and what ends."""

    def __init__(self, link: int) -> None:
        self._link = link
        self.main: Stream[DiallerSays] | None = None
        self.events: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, stream: Stream[DiallerSays]) -> None:
        name = "nobody"
        async for message in stream:
            if isinstance(message, Register):
                name, self.main = "main", stream
                stream.post(
                    Welcome(router=RouterId("router-0"), heartbeat_interval_s=LIMIT_S, link=self._link)
                )
                self.events.put_nowait("main")
            elif isinstance(message, Lifeline):
                name = f"lifeline of {message.link}"
                self.events.put_nowait(name)
        self.events.put_nowait(f"end of {name}")

    async def next(self) -> str:
        return await asyncio.wait_for(self.events.get(), LIMIT_S)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/r.sock"


async def test_the_lifeline_names_the_link_and_ends_after_it(address: str) -> None:
    router, stop = Router(7), asyncio.Event()
    listener = await listen(address, TOKEN, DiallerSays, router.serve)
    serving = asyncio.create_task(run(worker(address, keep_lifeline=Held), stop))
    assert [await router.next(), await router.next()] == ["main", "lifeline of 7"]
    await asyncio.sleep(0.1)
    assert router.events.empty()
    stop.set()
    await asyncio.wait_for(serving, LIMIT_S)
    assert [await router.next(), await router.next()] == ["end of main", "end of lifeline of 7"]
    await listener.close()


async def test_a_link_that_breaks_takes_its_lifeline_along_and_the_next_has_its_own(address: str) -> None:
    router, stop = Router(7), asyncio.Event()
    listener = await listen(address, TOKEN, DiallerSays, router.serve)
    serving = asyncio.create_task(run(worker(address, keep_lifeline=Held), stop))
    assert [await router.next(), await router.next()] == ["main", "lifeline of 7"]
    assert router.main is not None
    router.main.abort()
    ends = {await router.next(), await router.next()}
    assert ends == {"end of main", "end of lifeline of 7"}
    assert [await router.next(), await router.next()] == ["main", "lifeline of 7"]
    stop.set()
    await asyncio.wait_for(serving, LIMIT_S)
    await listener.close()


@pytest.mark.parametrize(("link", "keeps"), [(0, True), (7, False)])
async def test_where_one_end_cannot_there_is_none(address: str, link: int, keeps: bool) -> None:
    """A router that takes none (link 0) gets none; a system that holds none serves without."""
    asked: list[int] = []

    def keep(descriptor: int) -> None:
        asked.append(descriptor)

    router, stop = Router(link), asyncio.Event()
    listener = await listen(address, TOKEN, DiallerSays, router.serve)
    serving = asyncio.create_task(run(worker(address, keep_lifeline=Held if keeps else keep), stop))
    assert await router.next() == "main"
    if not keeps:
        assert await router.next() == "end of nobody", "a lifeline that ends is the end of its worker"
        assert len(asked) == 1
    await asyncio.sleep(0.1)
    assert router.events.empty()
    assert not serving.done()
    stop.set()
    await asyncio.wait_for(serving, LIMIT_S)
    assert await router.next() == "end of main"
    await listener.close()
