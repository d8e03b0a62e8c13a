"""Offers a plan: splits it over client processes, starts them at one moment, and brings every record home.

1. Spawn the client processes; each gets its share and says when it is ready. A process that cannot start is
   an error: nothing was measured yet.
2. One start moment, a little ahead, on the clock that all processes share.
3. Ticks come in; `on_progress` is called a few times a second.
4. An interrupt (`StopSwitch.stop`, or a signal) ends the run with what was measured; a second one ends the
   client processes at once.
5. The run ends when every process has finished or is lost: then every planned request has its record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from bench.load.client.frames import Job, Setup
from bench.load.client.gather import Gathering
from bench.load.client.gather import Progress as Progress
from bench.load.client.handle import ClientHandle
from bench.load.client.interrupts import StopSwitch as StopSwitch
from bench.load.client.interrupts import signals_to
from bench.load.client.jobs import share_slots, split_plan
from bench.load.client.open_files import certain_connections, check_open_files, file_limits
from bench.load.client.target import Target
from bench.load.plan import Plan
from bench.load.records import RunRecord
from cluster.errors import ConfigError

LEAD_S = 0.05  # from the start command to time 0
PROGRESS_S = 0.25
STOP_S = 10.0  # to wind up after an interrupt
DEFAULT_TIMEOUT_S = 600.0
NS = 1_000_000_000


def run_plan(
    plan: Plan,
    target: Target,
    num_processes: int = 1,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: Callable[[Progress], None] | None = None,
    keep_text: bool = False,
    *,
    stall_s: float | None = None,
    cores: Sequence[int] = (),
    stop: StopSwitch | None = None,
) -> RunRecord:
    """
    Args:
        timeout_s: limit of one request, from the moment its sending began.
        stall_s: limit of the time without a byte from the server; None: only `timeout_s` holds.
        cores: client process i is pinned to `cores[i % len(cores)]`; empty: not pinned.
        stop: whoever holds it owns the signals; without one they end the run.

    Raises:
        ConfigError: a setting that cannot work, or more requests at once than this machine lets a process
            open.
        BatonError: a client process could not start.
    """
    if num_processes < 1:
        raise ConfigError(f"{num_processes} client processes: at least one is needed")
    if not timeout_s > 0 or not (stall_s is None or stall_s > 0):
        raise ConfigError("time limits must be above zero")
    num_slots = plan.arrival.closed_loop
    if num_slots is not None and num_slots < 1:
        raise ConfigError(f"closed loop with {num_slots} slots: at least one is needed")
    num_processes = min(num_processes, len(plan.requests) or 1, num_slots or num_processes)
    shares = split_plan(plan, num_processes)
    slots_of = share_slots(num_slots, num_processes)
    check_open_files(
        [certain_connections(*work) for work in zip(shares, slots_of, strict=True)], *file_limits()
    )
    setups = [
        Setup(
            process=process,
            host=target.host,
            port=target.port,
            is_tls=target.is_tls,
            verify_tls=target.verify_tls,
            head=target.head(plan.endpoint),
            num_slots=slots,
            timeout_s=timeout_s,
            stall_s=timeout_s if stall_s is None else stall_s,
            keep_text=keep_text,
            core=cores[process % len(cores)] if cores else None,
            num_jobs=len(shares[process]),
        )
        for process, slots in enumerate(slots_of)
    ]
    switch = stop or StopSwitch()
    with signals_to(switch.stop) if stop is None else nullcontext():
        return asyncio.run(_run(setups, shares, on_progress, switch))


async def _run(
    setups: list[Setup],
    shares: list[list[Job]],
    on_progress: Callable[[Progress], None] | None,
    switch: StopSwitch,
) -> RunRecord:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    handles: list[ClientHandle] = []

    def wake() -> None:
        loop.call_soon_threadsafe(stopped.set)

    with switch.connected(wake):
        try:
            for setup in setups:
                handles.append(await ClientHandle.spawn(setup.process))
            works = zip(handles, setups, shares, strict=True)
            await asyncio.gather(*(handle.load(setup, share) for handle, setup, share in works))
            run = await _offer(handles, Gathering(shares), on_progress, stopped, switch)
        except BaseException:
            for handle in handles:
                handle.kill()
            raise
        finally:
            await asyncio.gather(*(handle.close() for handle in handles))
    return run


async def _offer(
    handles: list[ClientHandle],
    gathering: Gathering,
    on_progress: Callable[[Progress], None] | None,
    stopped: asyncio.Event,
    switch: StopSwitch,
) -> RunRecord:
    start_ns = time.perf_counter_ns() + round(LEAD_S * NS)
    start_unix_s = time.time() + LEAD_S
    for handle in handles:
        handle.start(start_ns)
    followers = [asyncio.create_task(handle.follow(gathering, start_ns)) for handle in handles]
    stopping = asyncio.create_task(_stop_when_told(handles, gathering, stopped, switch))
    try:
        pending: set[asyncio.Task[None]] = {*followers, stopping}
        while not all(follower.done() for follower in followers):
            done, pending = await asyncio.wait(
                pending, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            if on_progress is not None:
                on_progress(gathering.progress(max(0.0, (time.perf_counter_ns() - start_ns) / NS)))
    finally:
        tasks = [*followers, stopping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return gathering.run_record(start_unix_s, start_ns)


async def _stop_when_told(
    handles: list[ClientHandle], gathering: Gathering, stopped: asyncio.Event, switch: StopSwitch
) -> None:
    """At the first stop the clients wind up; at the second, or when that takes too long, they are killed."""
    await stopped.wait()
    gathering.note("the run was interrupted")
    for handle in handles:
        handle.stop()
    try:
        async with asyncio.timeout(STOP_S):
            while switch.num_stops < 2:
                stopped.clear()
                await stopped.wait()
    except TimeoutError:
        gathering.note(f"client processes did not wind up within {STOP_S:g} s")
    for handle in handles:
        handle.kill()
