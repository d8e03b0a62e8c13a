"""From a plan to each client process's share: JSON made ready, chats kept together, rates kept smooth."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from bench.load.frames import Job
from bench.load.plan import Plan, PlannedRequest

MAX_BATCH_BYTES = 8 << 20


def split_plan(plan: Plan, num_processes: int) -> list[list[Job]]:
    """Chains (a chat, or one request alone) are dealt to the processes in turn, in plan order."""
    shares: list[list[Job]] = [[] for _ in range(num_processes)]
    last_turns: dict[int, int] = {}
    for request in plan.requests:
        if request.session is not None:
            last_turns[request.session] = max(request.turn, last_turns.get(request.session, 0))
    share_of: dict[int, list[Job]] = {}
    num_chains = 0
    for request in plan.requests:
        share = share_of.get(request.session) if request.session is not None else None
        if share is None:
            share = shares[num_chains % num_processes]
            num_chains += 1
            if request.session is not None:
                share_of[request.session] = share
        has_next = request.session is not None and request.turn < last_turns[request.session]
        share.append(make_job(plan, request, has_next))
    return shares


def make_job(plan: Plan, request: PlannedRequest, has_next_turn: bool) -> Job:
    """A chat's messages are kept apart from the rest, since its later turns begin with its earlier ones."""
    body = plan.shared_body | request.body
    messages: bytes | None = None
    if request.session is not None and "messages" in body:
        messages = orjson.dumps(body.pop("messages"))[1:-1]
    return Job(
        index=request.index,
        scheduled_s=request.scheduled_s,
        body=orjson.dumps(body),
        messages=messages,
        session=request.session,
        turn=request.turn,
        think_s=request.think_s,
        has_next_turn=has_next_turn,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        prefix_group=request.prefix_group,
    )


def share_slots(num_slots: int | None, num_processes: int) -> list[int | None]:
    """Closed loop: the slots of each process; they differ by one at most."""
    if num_slots is None:
        return [None] * num_processes
    return [
        num_slots // num_processes + (process < num_slots % num_processes) for process in range(num_processes)
    ]


def batches(jobs: list[Job]) -> Iterator[list[Job]]:
    """Cut so that a frame stays around `MAX_BATCH_BYTES`."""
    batch: list[Job] = []
    num_bytes = 0
    for job in jobs:
        batch.append(job)
        num_bytes += len(job.body) + len(job.messages or b"")
        if num_bytes >= MAX_BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
