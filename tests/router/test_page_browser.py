"""The page in headless Chromium, in front of a real router with scripted workers, under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, Browser, browser
from tests.support.page_world import PageWorld, page_world

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

# How many pixels of the canvas are drawn in the colour of each stage (it is drawn over nothing: exact).
COUNT_PIXELS = """(() => {
  const canvas = document.getElementById("lanes");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const probe = document.body.appendChild(document.createElement("i"));
  const found = {};
  for (const stage of ["queue", "prefill", "transfer", "decode"]) {
    probe.style.setProperty("color", `var(--${stage})`);
    const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
    found[stage] = 0;
    for (let at = 0; at < pixels.length; at += 4) {
      const near = Math.abs(pixels[at] - r) + Math.abs(pixels[at + 1] - g) + Math.abs(pixels[at + 2] - b);
      if (pixels[at + 3] > 100 && near < 8) found[stage] += 1;
    }
  }
  return found;
})()"""


@contextlib.asynccontextmanager
async def under_load(world: PageWorld, num_clients: int) -> AsyncIterator[None]:
    """Each client asks again as soon as it has its answer."""

    async def keep_asking(number: int) -> None:
        turn = 0
        while True:
            turn += 1
            response = await world.ask(f"client {number} turn {turn} " + "x" * (number * 9), 20 + 7 * number)
            assert response.status_code == 200, response.text

    clients = [asyncio.create_task(keep_asking(number)) for number in range(num_clients)]
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        results = await asyncio.gather(*clients, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * num_clients, results


async def check_names(page: Browser) -> None:
    """What a screen reader is told of: every control has a name."""
    tree = await page.call("Accessibility.getFullAXTree")
    controls = [
        node
        for node in tree["nodes"]
        if not node.get("ignored") and node["role"]["value"] in ("button", "textbox", "spinbutton", "image")
    ]
    assert len(controls) > 8
    assert [node for node in controls if not node.get("name", {}).get("value")] == []


async def test_the_page_under_load(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser(tmp_path / "profile") as page, under_load(world, 8):
        await page.open(world.url)
        await page.until("document.getElementById('state').dataset.state === 'ready'")
        await page.until("document.querySelectorAll('.worker').length === 3")
        await page.until("document.querySelector('#tpot [data-p=\"p99\"]').textContent !== '–'")
        assert await page.text("#model") == "scripted"
        workers = await page.eval("[...document.querySelectorAll('.worker h4')].map((e) => e.innerText)")
        assert [name.split()[0] for name in workers] == ["prefill-0", "decode-0", "decode-1"]
        assert all(name.split()[1] == "ready" for name in workers)
        assert re.fullmatch(r"\d+ in flight, \d+ queued · [\d.k]+ requests/s · [\d.k]+ tokens/s",
                            await page.text("#flow"))  # fmt: skip
        # The figures are those that the router tells.
        picture = (await world.client.get("/page/picture")).json()
        assert picture["window"]["finished"] > 0
        assert picture["window"]["failed"] == 0
        assert (await page.text("#attainment")).endswith("%")

        # The stages are to be seen in the lanes, in their colours (nothing queues for long here).
        await page.until("document.querySelectorAll('.worker.decode .cells i.on').length > 0")
        drawn = await page.eval(COUNT_PIXELS)
        for stage in ("prefill", "transfer", "decode"):
            assert drawn[stage] > 0, (stage, drawn)
        assert await page.eval("document.querySelector('#ttft .line').getAttribute('d').length") > 0
        await page.screenshot(tmp_path / "load.png")

        # The same in words.
        await page.click("#as-table")
        await page.until("document.querySelectorAll('#request-rows tr').length > 8")
        states = await page.eval(
            "[...document.querySelectorAll('#request-rows tr')].map((row) => row.children[1].textContent)"
        )
        assert "finished" in states
        assert {"queue", "prefill", "transfer", "decode"} & set(states), states
        await check_names(page)
        assert page.complaints == []


async def test_a_chat(tmp_path: Path) -> None:
    async with page_world(tmp_path, step_s=0.02) as world, browser(tmp_path / "profile") as page:
        await page.open(world.url)
        await page.until("document.getElementById('state').dataset.state === 'ready'")
        await page.eval("document.getElementById('max-tokens').value = '40'")
        await page.eval("document.getElementById('question').focus()")
        await page.type("Hello there")
        await page.press("Enter", 13, "\r")
        await page.until("document.querySelector('.answer .timing .parts') !== null")
        timing = await page.text(".answer .timing")
        assert re.search(
            r"first token [\d.]+ m?s · [\d.]+ m?s per token \([\d.]+/s\) · \d+ tokens? in", timing
        )
        for part in (
            r"queue",
            r"prefill [\d.]+ m?s on prefill-0",
            r"transfer",
            r"decode [\d.]+ m?s on decode-",
        ):
            assert re.search(part, timing), timing
        assert await page.text(".turn.user .text") == "Hello there"
        assert len(await page.text(".answer .text")) > 0
        assert (await page.text("#said")).startswith("Answer complete. first token")
        assert await page.eval("document.activeElement.id") == "question"

        # The next turn tells the whole conversation; Escape stops it, and what came stays.
        await page.eval("document.getElementById('max-tokens').value = '1500'")
        await page.type("Go on")
        await page.press("Enter", 13, "\r")
        last = "[...document.querySelectorAll('.answer')].at(-1)"
        await page.until(
            "document.querySelectorAll('.answer').length === 2 && !document.getElementById('stop').hidden"
        )
        await page.press("Escape", 27)
        await page.until(f"{last}.getAttribute('aria-busy') === 'false'")
        assert await page.eval("document.getElementById('stop').hidden")
        picture = (await world.client.get("/page/picture")).json()
        assert picture["cluster"]["in_flight"] == 0 or await idle(world)
        # Nothing that was typed or answered is in the feed.
        assert "Hello" not in json.dumps(picture)

        await page.click("#new-chat")
        assert await page.eval("document.querySelectorAll('.turn').length") == 0
        assert not await page.eval("document.getElementById('welcome').hidden")
        assert page.complaints == []


async def idle(world: PageWorld) -> bool:
    """The router heard of the client that left."""
    async with asyncio.timeout(20):
        while (await world.client.get("/page/picture")).json()["cluster"]["in_flight"]:
            await asyncio.sleep(0.02)
    return True


async def test_an_error_is_told_in_the_servers_words(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, browser(tmp_path / "profile") as page:
        await page.open(world.url)
        await page.until("document.getElementById('state').dataset.state === 'ready'")
        await page.eval("document.getElementById('max-tokens').value = '100000'")
        await page.eval("document.getElementById('question').focus()")
        await page.type("Hello")
        await page.press("Enter", 13, "\r")
        await page.until("document.querySelector('.answer .error') !== null")
        assert "tokens" in await page.text(".answer .error")
        assert (await page.text("#said")).startswith("No answer: ")
        for complaint in page.complaints:  # the browser notes the status itself
            assert "400" in complaint


async def test_dark_narrow_and_without_the_cluster(tmp_path: Path) -> None:
    """At the public address the page chats, and says where the cluster is shown."""
    async with page_world(tmp_path, with_admin_port=True) as world, browser(tmp_path / "profile") as page:
        await page.open(world.url, width=420, height=900)
        await page.media(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
        ground = "getComputedStyle(document.body).backgroundColor"
        await page.until(f"{ground} === 'rgb(19, 21, 25)'")
        await page.until("!document.getElementById('notice').hidden")
        assert "admin address" in await page.text("#notice")
        assert await page.eval("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        await page.click("#theme")
        assert await page.eval(ground) == "rgb(246, 245, 241)"
        assert await page.eval("document.getElementById('theme').ariaLabel") == "Colour scheme: light"
        await page.eval("document.getElementById('question').focus()")
        await page.eval("document.getElementById('max-tokens').value = '20'")
        await page.type("Hello")
        await page.press("Enter", 13, "\r")
        await page.until("document.querySelector('.answer .timing .parts') !== null")
        await page.screenshot(tmp_path / "narrow.png")


async def test_the_admin_address_shows_the_cluster(tmp_path: Path) -> None:
    async with page_world(tmp_path, with_admin_port=True) as world, browser(tmp_path / "profile") as page:
        await page.open(world.admin_url)
        await page.until("document.querySelectorAll('.worker').length === 3")
        for width in (1200, 700, 390):
            await page.resize(width, 900)
            await page.until(f"innerWidth === {width}")
            assert await page.eval("document.documentElement.scrollWidth <= innerWidth"), width
        assert page.complaints == []
