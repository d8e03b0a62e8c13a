"""Work that takes long, beside the event loop: tokenizing long prompts, compiling schemas.

1. `run` puts the work on one of a few threads: one less than the cores this process may use, at least one.
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

P = ParamSpec("P")
T = TypeVar("T")


class Aside:
    """Owns the threads; they start when they are needed."""

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = min(MAX_THREADS, max(1, _num_cores() - 1))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="aside", initializer=_give_way)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises. Log lines of it name the request, as here."""
        context = contextvars.copy_context()
        call = functools.partial(context.run, work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER)
