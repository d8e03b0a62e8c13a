"""An edge's thread: order, errors, cancelling and ending."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from cluster.errors import EdgeError
from cluster.kv.edge_thread import EdgeThread


async def test_jobs_run_in_order_in_one_other_thread() -> None:
    thread = EdgeThread("t")
    seen: list[tuple[int, int]] = []

    def job(number: int) -> int:
        seen.append((number, threading.get_ident()))
        return number

    futures = [thread.run(lambda number=number: job(number)) for number in range(20)]  # type: ignore[misc]
    results = await asyncio.gather(*futures)
    assert results == [number for number, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen} | {threading.get_ident()}) == 2
    await thread.join(20)


async def test_an_error_reaches_its_caller_and_the_thread_goes_on() -> None:
    thread = EdgeThread("t")

    def bad() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await thread.run(bad)
    assert await thread.run(lambda: 7) == 7
    await thread.join(20)


async def test_cancelling_drops_a_job_that_has_not_begun_and_lets_a_running_one_end() -> None:
    thread, begun, gate, ran = EdgeThread("t"), threading.Event(), threading.Event(), []
    running = asyncio.ensure_future(thread.run(lambda: (begun.set(), gate.wait(20), ran.append(1))))
    waiting = asyncio.ensure_future(thread.run(lambda: ran.append(2)))
    assert await asyncio.to_thread(begun.wait, 20)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    gate.set()
    await thread.join(20)
    assert ran == [1]


async def test_join_is_bounded_and_may_be_tried_again() -> None:
    thread, gate = EdgeThread("t"), threading.Event()
    thread.submit(lambda: gate.wait(20))
    with pytest.raises(EdgeError, match=r"`t` did not end within 0\.05 s"):
        await thread.join(0.05)
    with pytest.raises(EdgeError, match="closed"):
        thread.submit(lambda: None)
    gate.set()
    await thread.join(20)
    await thread.join(20)


async def test_neither_results_nor_errors_keep_what_a_job_used() -> None:
    class Resource:
        pass

    thread = EdgeThread("t")

    def use(fail: bool) -> weakref.ref[Resource]:
        resource = Resource()
        seen.append(weakref.ref(resource))
        if fail:
            raise EdgeError("broken") from ValueError("cause")
        return seen[-1]

    seen: list[weakref.ref[Resource]] = []
    with pytest.raises(EdgeError) as kept:
        await thread.run(lambda: use(fail=True))
    await thread.run(lambda: use(fail=False))
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
    assert kept.value.__traceback__ is not None
    await thread.join(20)
