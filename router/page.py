"""The page at `/` and what feeds it: static files, one JSON picture, one stream of changes.

1. The files of `router/static/` are read once, into memory; nothing else can be asked for.
2. `GET /page/picture`: the whole picture (`router.page_picture`), bounded, as JSON.
3. `GET /page/events`: server-sent events. The first carries the whole picture, later ones what changed
   since, at most one every `PICTURE_S` however much happens, so a viewer costs the same idle or under load.
   A stream ends when its viewer leaves or stops reading, and with the server.

No prompt, no answer, no client's label is in any of it. The page loads nothing from elsewhere and runs no
inline script: `CSP` says so to the browser.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.asgi import HeaderList, Receive, Scope, Send, send_bytes, until_disconnect
from router.delivery import ClusterStatus
from router.generation import InFlight
from router.openai_errors import error_body, error_headers, http_error
from router.page_feed import PageFeed
from router.page_picture import PictureDiffer, picture

PICTURE_S: Final = 0.5  # between two events
PING_S: Final = 15.0  # of silence, then a comment: proxies cut idle streams
STALLED_S: Final = 30.0  # a viewer that does not read for so long is let go

CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
SAFE_HEADERS: Final = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_EVENT_HEADERS: Final[HeaderList] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    *((name.encode(), value.encode()) for name, value in SAFE_HEADERS.items()),
]
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
STATIC: Final = Path(__file__).parent / "static"

PAGE_PATHS: Final = ("/", "/page/picture", "/page/events")
FEED_PATHS: Final = ("/page/picture", "/page/events")  # what they tell is for those who run the cluster


@dataclass(frozen=True, slots=True)
class PageSource:
    """Where pictures come from; reading is a look at memory."""

    feed: PageFeed
    status: ClusterStatus
    in_flight: InFlight
    model: str
    version: str
    now: Callable[[], float]

    def picture(self, since: int = 0) -> dict[str, Any]:
        snapshot = self.status.cluster()
        whole = picture(self.feed, snapshot, self.model, self.version, self.now(), since)
        if self.in_flight.draining:
            whole["cluster"]["state"] = "draining"
        return whole

    @property
    def is_over(self) -> bool:
        """The server stops and has answered everybody."""
        return self.in_flight.draining and not len(self.in_flight)


def page_routes(source: PageSource, max_viewers: int, directory: Path = STATIC) -> list[Route]:
    """Routes for an application of starlette."""

    async def show_picture(request: Request) -> Response:
        headers = {**SAFE_HEADERS, "cache-control": "no-store"}
        return Response(orjson.dumps(source.picture()), media_type="application/json", headers=headers)

    files = [_static_route(file) for file in _files(directory)]
    return [
        *files,
        Route("/page/picture", show_picture, methods=["GET"]),
        Route("/page/events", PageEvents(source, max_viewers), methods=["GET"]),
    ]


@functools.cache
def page_files(directory: Path = STATIC) -> frozenset[str]:
    """The paths of the page's own files: no secret is in any of them."""
    return frozenset(_path_of(file) for file in _files(directory))


def _files(directory: Path) -> list[Path]:
    return [file for file in sorted(directory.iterdir()) if file.suffix in _TYPES]


def _path_of(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/page/{file.name}"


def _static_route(file: Path) -> Route:
    body = file.read_bytes()
    etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**SAFE_HEADERS, "cache-control": "no-cache", "etag": etag}
    media_type = _TYPES[file.suffix]

    async def show(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    return Route(_path_of(file), show, methods=["GET"])


class PageEvents:
    """An ASGI application: the stream of changes, for up to `max_viewers` at a time."""

    def __init__(self, source: PageSource, max_viewers: int) -> None:
        self._source = source
        self._max_viewers = max_viewers
        self._num_viewers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            await send({"type": "http.response.body", "body": b""})
            return
        if self._num_viewers >= self._max_viewers:
            error = http_error(503, f"This router has at most {self._max_viewers} viewers at a time.")
            await send_bytes(send, error.status, error_headers(error), error_body(error))
            return
        self._num_viewers += 1
        try:
            async with asyncio.timeout(STALLED_S):
                await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            await self._watch(receive, send)
        except TimeoutError:
            return  # it does not read; the server closes the connection
        finally:
            self._num_viewers -= 1

    async def _watch(self, receive: Receive, send: Send) -> None:
        differ = PictureDiffer()
        silent_s = 0.0
        while not self._source.is_over:
            part = differ.update(self._source.picture(differ.since))
            silent_s = 0.0 if part else silent_s + PICTURE_S
            if part or silent_s >= PING_S:
                silent_s = 0.0
                event = b"data: " + orjson.dumps(part) + b"\n\n" if part else b": ping\n\n"
                async with asyncio.timeout(STALLED_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            if await _left_within(receive, PICTURE_S):
                return
        async with asyncio.timeout(STALLED_S):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left_within(receive: Receive, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await until_disconnect(receive)
    except TimeoutError:
        return False
    return True
