"""One client process: `python -m bench.load.client.process`, frames on stdin and stdout. Light to import.

1. Read the setup and all jobs; look the host up; freeze what was loaded, so that the garbage collector
   never walks it.
2. Say `Ready`; at `Start` the load client begins. `Tick` ten times a second, with the records of what ended.
3. When every job has its record, send the last `Tick` and `Finished`, and go. When stdin ends, the parent
   is gone: go.

While the run goes on, the collector runs only at ticks, and only over what is new since the last one (well
under a millisecond): never in the middle of a read. Interrupts of the terminal do not come here: the parent
says `Stop`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import time
from collections.abc import Callable

import msgspec

from bench.load.client.frames import (
    PREFIX_BYTES,
    Finished,
    FrameReader,
    FromClient,
    Job,
    Jobs,
    Ready,
    Setup,
    Start,
    Stop,
    ToClient,
    encode_frame,
    frame_length,
)
from bench.load.client.load_client import LoadClient
from bench.load.client.open_files import raise_file_limit
from bench.load.client.stalls import Stalls, StallWatch
from bench.load.client.tls import tls_context
from bench.load.records import ClientReport
from cluster.errors import ProtocolError

TICK_S = 0.1
FLUSH_S = 10.0
STDIN, STDOUT = 0, 1
DECODER: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


class _Commands(asyncio.Protocol):
    """Frames from the parent; its end is `on_message(None)`."""

    def __init__(self, on_message: Callable[[ToClient | None], None]) -> None:
        self._reader = FrameReader()
        self._on_message = on_message

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            self._on_message(DECODER.decode(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_message(None)


class _Reports(asyncio.Protocol):
    """The way out; `closed` is set once all is written."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


def read_exactly(num_bytes: int) -> bytes:
    """From stdin, before the event loop has it."""
    parts = []
    while num_bytes:
        part = os.read(STDIN, min(num_bytes, 1 << 20))
        if not part:
            raise ProtocolError("the parent closed the pipe before all jobs were sent")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def read_work() -> tuple[Setup, list[Job]]:
    setup: Setup | None = None
    jobs: list[Job] = []
    while setup is None or len(jobs) < setup.num_jobs:
        message = DECODER.decode(read_exactly(frame_length(read_exactly(PREFIX_BYTES))))
        if isinstance(message, Setup):
            setup = message
        elif isinstance(message, Jobs):
            jobs += message.jobs
        else:
            raise ProtocolError(f"`{type(message).__name__}` came before all jobs")
    return setup, jobs


class Session:
    """The run as this process lives it: commands in, ticks out, own CPU and lag."""

    def __init__(self, loop: asyncio.AbstractEventLoop, setup: Setup, jobs: list[Job]) -> None:
        self._loop = loop
        self._setup = setup
        self._over: asyncio.Future[None] = loop.create_future()
        context = tls_context(setup.verify_tls) if setup.is_tls else None
        self.client = LoadClient(loop, setup, jobs, context, self._end, self.fail)
        self._out: asyncio.WriteTransport | None = None
        self._start_ns = 0
        self._start_cpu_s = 0.0
        self._watch: StallWatch | None = None

    async def run(self) -> None:
        """Returns when all is said, or the parent is gone.

        Raises:
            OSError: the host's name is not known.
            Exception: whatever went wrong in a callback of this process.
        """
        await self.client.connections.resolve()
        out, reports = await self._loop.connect_write_pipe(_Reports, os.fdopen(STDOUT, "wb", 0))
        self._out = out
        await self._loop.connect_read_pipe(lambda: _Commands(self._on_message), os.fdopen(STDIN, "rb", 0))
        gc.collect()
        gc.freeze()
        gc.disable()
        self._say(Ready())
        try:
            await self._over
            self._say(self.client.tick())
            self._say(Finished(self._report()))
            self._out.close()
            await asyncio.wait_for(reports.closed.wait(), FLUSH_S)
        finally:
            self.client.close()

    def fail(self, fault: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(fault)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _say(self, message: FromClient) -> None:
        assert self._out is not None
        self._out.write(encode_frame(message))

    def _on_message(self, message: ToClient | None) -> None:
        if isinstance(message, Start):
            self._start_ns = message.start_ns
            self._start_cpu_s = cpu_s()
            self._watch = StallWatch(self._loop, message.start_ns)
            self._tick()
            self.client.start(message.start_ns)
        elif isinstance(message, Stop):
            self.client.stop()
        elif message is None:
            self.fail(ProtocolError("the parent closed the pipe"))
        else:
            self.fail(ProtocolError(f"`{type(message).__name__}` is no command of a run"))

    def _tick(self) -> None:
        if self._over.done():
            return
        self._say(self.client.tick())
        gc.collect(0)
        self._loop.call_later(TICK_S, self._tick)

    def _report(self) -> ClientReport:
        wall_s = (time.perf_counter_ns() - self._start_ns) / 1e9 if self._start_ns else 0.0
        used_s = cpu_s() - self._start_cpu_s if self._start_ns else 0.0
        stalls = Stalls()
        if self._watch is not None:
            self._watch.close()
            stalls = self._watch.stalls
        return ClientReport(
            process=self._setup.process,
            cpu_s=used_s,
            wall_s=wall_s,
            max_loop_lag_s=stalls.max_s,
            stalls_s=stalls.in_order(),
        )


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def run_session(setup: Setup, jobs: list[Job]) -> None:
    loop = asyncio.get_running_loop()
    session = Session(loop, setup, jobs)

    def on_fault(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        fault = context.get("exception")
        session.fail(fault if isinstance(fault, BaseException) else RuntimeError(str(context.get("message"))))

    loop.set_exception_handler(on_fault)
    await session.run()


def main() -> int:
    setup, jobs = read_work()
    if setup.core is not None:
        os.sched_setaffinity(0, {setup.core})
    raise_file_limit()
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(run_session(setup, jobs))
    except (OSError, ProtocolError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
