"""Work that takes long, beside the event loop: tokenizing prompts, compiling schemas, writing large answers.

1. `run` puts the work on a thread. Work that may take a second and more has threads of its own, so
   that a page of text never waits for a book, nor for a schema: one less than the cores this process may
   use, at least one.
2. On Linux these threads give way to the event loop's by priority, so that on one core, too, a token is
   forwarded while a prompt of a megabyte is cut up. Further work waits for a thread, in order.
3. Where the work holds the interpreter's lock, the event loop waits for it, `SWITCH_S` at a time. The
   tokenizer lets go of it for long texts.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

MAX_THREADS = 4
SWITCH_S = 0.001  # the interpreter's own is five times as long
NICER = 5  # than the event loop's thread: about a third of its share of a core
LONG_BYTES = 256 * 2**10  # of a request, from which on its work is long

P = ParamSpec("P")
T = TypeVar("T")


class Aside:
    """Owns the threads; they start when they are needed."""

    def __init__(self, num_threads: int | None = None) -> None:
        """`num_threads`: of each of the two kinds."""
        if num_threads is None:
            num_threads = min(MAX_THREADS, max(1, _num_cores() - 1))
        self._short = ThreadPoolExecutor(num_threads, thread_name_prefix="aside", initializer=_give_way)
        self._long = ThreadPoolExecutor(num_threads, thread_name_prefix="aside-long", initializer=_give_way)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises. Log lines of it name the request, as here."""
        return await _run(self._short, functools.partial(work, *args, **kwargs))

    async def run_sized(self, num_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, of work on so many bytes."""
        pool = self._long if num_bytes > LONG_BYTES else self._short
        return await _run(pool, functools.partial(work, *args, **kwargs))

    async def run_long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, of work that may take long whatever its size, such as compiling a schema."""
        return await _run(self._long, functools.partial(work, *args, **kwargs))


async def _run(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, context.run, work)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER)
