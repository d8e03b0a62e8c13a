"""A second process for the transfer checks, started and spoken to from the first.

1. `start` runs `python -m bench.gpu_check.peer` with one end of a socket pair, and waits until it is there.
   Nothing else is read from it, so whatever libraries print does not matter.
2. `ask` sends a command and waits for its answer, `tell` sends one without waiting.
3. `kill` ends it in the middle of whatever it does. `end` cleans up in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

import msgspec

from bench.gpu_check.peer_messages import Done, ToPeer

ANSWER_TIMEOUT_S = 180.0  # in the interpreter a prompt takes long
_ROOT = Path(__file__).resolve().parents[2]


class PeerDied(Exception):
    """It ended without an answer."""


class PeerProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, environment: dict[str, str]) -> PeerProcess:
        """`environment`: what it has beside this process's.

        Raises:
            PeerDied: it could not begin.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "bench.gpu_check.peer",
                str(theirs.fileno()),
                cwd=_ROOT,
                env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=(theirs.fileno(),),
            )
        peer = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            await peer.answer()
        except BaseException:
            await peer.end()
            raise
        return peer

    def tell(self, command: ToPeer) -> None:
        self._writer.write(msgspec.json.encode(command) + b"\n")

    async def answer(self) -> Done:
        """
        Raises:
            PeerDied: instead.
            TimeoutError: neither.
        """
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            line = await self._reader.readline()
        if not line:
            raise PeerDied(f"the second process ended with status {await self._process.wait()}")
        return msgspec.json.decode(line, type=Done)

    async def ask(self, command: ToPeer) -> Done:
        """
        Raises:
            RuntimeError: it could not do that.
        """
        self.tell(command)
        done = await self.answer()
        if done.error is not None:
            raise RuntimeError(f"the second process: {done.error}")
        return done

    def kill(self) -> None:
        """At once; what it was doing stays undone."""
        self._process.kill()

    async def end(self) -> None:
        """Idempotent."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._writer.close()
        with contextlib.suppress(OSError):  # what was still to be written is of no use to a dead process
            await self._writer.wait_closed()
