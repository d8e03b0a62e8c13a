"""One client process as the parent holds it: start it, give it work, follow it to its end, always by a limit.

1. Spawned in a session of its own: the terminal's interrupt reaches the parent only.
2. `load` sends setup and jobs and waits for `Ready`.
3. `follow` reads ticks until `Finished`. A process that dies, or says nothing for `SILENCE_S`, is lost:
   killed if need be, noted, and its requests get their records.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from bench.load.client.frames import (
    PREFIX_BYTES,
    Finished,
    FromClient,
    Job,
    Jobs,
    Ready,
    Setup,
    Start,
    Stop,
    Tick,
    encode_frame,
    frame_length,
)
from bench.load.client.gather import Gathering
from bench.load.client.jobs import batches
from cluster.errors import BatonError, ProtocolError

LOAD_S = 60.0  # to start, read its jobs and look the host up
SILENCE_S = 30.0  # ticks come ten times a second
EXIT_S = 5.0
STDERR_LINES = 20
DECODER: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)


class ClientHandle:
    """Owner of one child process."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.number = number
        self.pid = process.pid
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._last_words: deque[str] = deque(maxlen=STDERR_LINES)
        self._listening = asyncio.create_task(self._listen(process.stderr))

    @classmethod
    async def spawn(cls, number: int) -> ClientHandle:
        """
        Raises:
            BatonError: the machine has no room for it.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.load.client.process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise BatonError(
                f"client process {number} could not be started ({error.strerror or error}): use fewer "
                "--processes"
            ) from None
        return cls(number, process)

    async def load(self, setup: Setup, jobs: Iterable[Job]) -> None:
        """
        Raises:
            BatonError: it could not start.
        """
        try:
            async with asyncio.timeout(LOAD_S):
                self._stdin.write(encode_frame(setup))
                for batch in batches(list(jobs)):
                    self._stdin.write(encode_frame(Jobs(batch)))
                    await self._stdin.drain()
                message = await self._read()
        except TimeoutError:
            raise BatonError(f"client process {self.number} was not ready within {LOAD_S:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            raise BatonError(
                f"client process {self.number} could not start: it {await self._death()}"
            ) from None
        if not isinstance(message, Ready):
            raise ProtocolError(
                f"client process {self.number} said `{type(message).__name__}` before it was ready"
            )

    def start(self, start_ns: int) -> None:
        self._say(Start(start_ns))

    def stop(self) -> None:
        self._say(Stop())

    async def follow(self, gathering: Gathering, start_ns: int) -> None:
        """Until it has finished or is lost; either way every request of it has its record then."""
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    message = await self._read()
                if isinstance(message, Tick):
                    gathering.take_tick(self.number, message)
                elif isinstance(message, Finished):
                    gathering.take_report(message.report)
                    return
        except TimeoutError:
            why = f"said nothing for {SILENCE_S:g} s and was ended"
        except (asyncio.IncompleteReadError, OSError):
            why = await self._death()
        except (msgspec.DecodeError, ProtocolError) as error:
            why = f"sent what cannot be read ({error}) and was ended"
        gathering.lost(self.number, why, (time.perf_counter_ns() - start_ns) / 1e9)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Wait for its exit; kill it if that takes too long."""
        self._stdin.close()
        try:
            async with asyncio.timeout(EXIT_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        await self._listening

    async def _read(self) -> FromClient:
        prefix = await self._stdout.readexactly(PREFIX_BYTES)
        return DECODER.decode(await self._stdout.readexactly(frame_length(prefix)))

    def _say(self, message: Start | Stop) -> None:
        if not self._stdin.is_closing():
            self._stdin.write(encode_frame(message))

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        async for line in stderr:
            self._last_words.append(line.decode(errors="replace").strip())

    async def _death(self) -> str:
        """How it went, once its pipe has broken."""
        try:
            async with asyncio.timeout(EXIT_S):
                code = await self._process.wait()
                await self._listening
        except TimeoutError:
            self.kill()
            return "closed its pipe and was ended"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"{how}: {self._last_words[-1]}" if self._last_words else how
