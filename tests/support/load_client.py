"""Plans of scripted requests, and a load client in the test's own event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from bench.load.client.frames import Job, Setup
from bench.load.client.jobs import share_slots, split_plan
from bench.load.client.load_client import LoadClient
from bench.load.client.target import Target
from bench.load.client.tls import tls_context
from bench.load.plan import Arrival, Plan, PlannedRequest
from bench.load.records import RequestRecord

DEADLINE_S = 20.0
SHARED = {"model": "mock", "stream": True, "stream_options": {"include_usage": True}}


def request(index: int, scheduled_s: float = 0.0, *, max_tokens: int = 4, **script: Any) -> PlannedRequest:
    """A completion of `max_tokens`; its script is labelled with its index."""
    body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "mock": {"label": str(index), **script}}
    return PlannedRequest(
        index=index, scheduled_s=scheduled_s, body=body, input_tokens=3, output_tokens=max_tokens
    )


def turn(
    index: int,
    session: int,
    number: int,
    text: str,
    *,
    scheduled_s: float = 0.0,
    think_s: float = 0.0,
    **script: Any,
) -> PlannedRequest:
    """One turn of a chat."""
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 2, "mock": {"label": str(index), **script}}
    return PlannedRequest(
        index=index, scheduled_s=scheduled_s, body=body, session=session, turn=number, think_s=think_s
    )


def plan(
    requests: Sequence[PlannedRequest],
    *,
    closed_loop: int | None = None,
    is_chat: bool = False,
    shared: dict[str, Any] = SHARED,
) -> Plan:
    kind = "constant" if closed_loop is None else "closed-loop"
    return Plan(
        endpoint="/v1/chat/completions" if is_chat else "/v1/completions",
        shared_body=shared,
        requests=tuple(requests),
        arrival=Arrival(kind=kind, seed=0, closed_loop=closed_loop),
        workload={},
    )


def make_setup(
    target: Target, offered: Plan, *, timeout_s: float = 10.0, stall_s: float | None = None
) -> Setup:
    [slots] = share_slots(offered.arrival.closed_loop, 1)
    return Setup(
        process=0,
        host=target.host,
        port=target.port,
        is_tls=target.is_tls,
        verify_tls=target.verify_tls,
        head=target.head(offered.endpoint),
        num_slots=slots,
        timeout_s=timeout_s,
        stall_s=timeout_s if stall_s is None else stall_s,
        keep_text=True,
        core=None,
        num_jobs=len(offered.requests),
    )


class Run:
    """A load client in this loop; `start_ns` is its time 0."""

    def __init__(self, setup: Setup, jobs: Sequence[Job]) -> None:
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = loop.create_future()
        context = tls_context(setup.verify_tls) if setup.is_tls else None
        self.client = LoadClient(loop, setup, jobs, context, self._end, self._fail)
        self.start_ns = 0

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _fail(self, fault: BaseException) -> None:
        if not self.over.done():
            self.over.set_exception(fault)

    async def start(self) -> None:
        await self.client.connections.resolve()
        self.start_ns = time.perf_counter_ns()
        self.client.start(self.start_ns)

    async def records(self) -> list[RequestRecord]:
        """Wait for the end; records in plan order."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self.over
            return sorted(self.client.tick().records, key=lambda record: record.index)
        finally:
            self.client.close()


async def offer(target: Target, offered: Plan, **limits: Any) -> tuple[list[RequestRecord], int]:
    """(records in plan order, time 0 on the `perf_counter_ns` clock)."""
    [jobs] = split_plan(offered, 1)
    run = Run(make_setup(target, offered, **limits), jobs)
    await run.start()
    return await run.records(), run.start_ns
