"""A thread of its own for what blocks on an edge, so that neither the event loop nor another edge waits.

Jobs run one at a time in the order they are submitted. Cancelling the coroutine that waits for a job leaves
a running job running; one that has not begun is dropped. The thread is a daemon: a job that the system
never returns from cannot keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from cluster.errors import EdgeError

T = TypeVar("T")


class EdgeThread:
    """Runs jobs in order; close it with `join`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closing = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; never waits.

        Raises:
            EdgeError: the thread was told to end.
        """
        if self._closing:
            raise EdgeError(f"`{self.name}` is closed")
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    async def run(self, job: Callable[[], T]) -> T:
        """Queue a job and wait for its result."""
        return await asyncio.wrap_future(self.submit(job))

    async def join(self, timeout_s: float) -> None:
        """End the thread after the jobs already queued; idempotent.

        Raises:
            EdgeError: it has not ended in time.
        """
        self._closing = True
        self._jobs.put(None)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(asyncio.wrap_future(self._ended))
        except TimeoutError:
            raise EdgeError(f"thread `{self.name}` did not end within {timeout_s:g} s") from None
        self._thread.join()

    def _main(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if future.set_running_or_notify_cancel():
                try:
                    result = job()
                except BaseException as error:
                    _clear_frames(error)
                    future.set_exception(error)
                    del error
                else:
                    future.set_result(result)
                    del result
            del entry, future, job  # an idle thread holds on to no tensor
        self._ended.set_result(None)


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables that the tracebacks hold: they may be connections or mapped memory, which
    would live as long as somebody keeps the error."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__
