"""A small streaming client for the baseline measurements: raw sockets, one task per request.

Open-loop arrivals, traces and goodput belong to the load test; this one only times a few streams.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

REQUEST_TIMEOUT_S = 600.0


@dataclass(slots=True)
class StreamTimes:
    """Moments of one stream, in seconds since its request was sent."""

    token_times_s: list[float] = field(default_factory=list)  # one per content chunk
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]


async def stream_completion(host: str, port: int, body: dict[str, Any]) -> StreamTimes:
    """POST /v1/completions with `stream`; every chunk is timed when its bytes are read.

    Raises:
        RuntimeError: a status other than 200, or an error event in the stream.
    """
    payload = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
    )
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            start = time.perf_counter()
            writer.write(head.encode() + payload)
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode()}")
            return await _read_events(reader, start)
        finally:
            writer.close()


async def _read_events(reader: asyncio.StreamReader, start: float) -> StreamTimes:
    times = StreamTimes()
    async for line in reader:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        now_s = time.perf_counter() - start
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        if event["choices"] and event["choices"][0].get("finish_reason") is None:
            times.token_times_s.append(now_s)
        times.usage = event.get("usage") or times.usage
        times.timings = event.get("timings") or times.timings
        times.end_s = now_s
    return times
