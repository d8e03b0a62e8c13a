"""Headless Chromium for tests, over its debugging pipe: no driver, no port, no package.

Commands go in on descriptor 3 and answers come out on 4 as JSON, each ended by a zero byte. One page at a
time.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the page is our own; containers often have no user namespaces
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--no-first-run",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
# Plumbing: the shell puts the pipe's ends where Chromium looks for them.
_SHELL = 'exec 18<&"$1" 19>&"$2"; exec "$0" "${@:3}" 3<&18 4>&19 18<&- 19>&-'


class Browser:
    """One page. `complaints` are console errors, exceptions and violations of the page's policy."""

    def __init__(self, reader: asyncio.StreamReader, write_fd: int) -> None:
        self._reader = reader
        self._write_fd = write_fd
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._next_id = 0
        self.complaints: list[str] = []
        self._loaded = asyncio.Event()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        answer = self._answers[self._next_id] = asyncio.get_running_loop().create_future()
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(30):
            reply = await answer
        assert "error" not in reply, (method, reply["error"])
        result: dict[str, Any] = reply["result"]
        return result

    async def open(self, url: str, *, width: int = 1360, height: int = 900) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(30):
            await self._loaded.wait()

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    async def media(self, **features: str) -> None:
        """E.g. `prefers_color_scheme="dark"`."""
        values = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=values)

    async def eval(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, condition: str, limit_s: float = 20.0) -> None:
        """Until a JavaScript condition holds; the page itself watches for it, frame by frame."""
        milliseconds = int(limit_s * 1000)
        met = await self.eval(
            f"new Promise((done) => {{ const began = performance.now(); const look = () => "
            f"({condition}) ? done(true) : performance.now() - began > {milliseconds} ? done(false) "
            f": requestAnimationFrame(look); look(); }})"
        )
        assert met, f"not within {limit_s} s: {condition}"

    async def text(self, selector: str) -> str:
        return str(await self.eval(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "") -> None:
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def click(self, selector: str) -> None:
        await self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    async def screenshot(self, file: Path) -> bytes:
        shot = await self.call("Page.captureScreenshot", format="png")
        data = base64.b64decode(shot["data"])
        file.write_bytes(data)
        return data

    async def read(self) -> None:
        """Take answers and events until the pipe closes."""
        while True:
            try:
                raw = await self._reader.readuntil(b"\0")
            except asyncio.IncompleteReadError:
                return
            message = json.loads(raw[:-1])
            if (waiting := self._answers.pop(message.get("id"), None)) is not None:
                if not waiting.done():
                    waiting.set_result(message)
            else:
                self._on_event(message["method"], message["params"])

    def _on_event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(json.dumps(params["entry"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """A browser with an empty profile; it is gone when the block ends."""
    assert CHROMIUM is not None
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", _SHELL, CHROMIUM, str(command_read), str(answer_write)),
        *_FLAGS,
        f"--user-data-dir={profile}",
        pass_fds=(command_read, answer_write),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(command_read)
    os.close(answer_write)
    reader = asyncio.StreamReader(limit=64 << 20)
    pipe = os.fdopen(answer_read, "rb")
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    page = Browser(reader, command_write)
    reading = asyncio.create_task(page.read())
    try:
        yield page
    finally:
        os.close(command_write)  # Chromium ends when its pipe does
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        transport.close()
