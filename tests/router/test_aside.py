"""Work beside the event loop: its result, its errors, its context, and who goes first."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading

import pytest

from router.aside import LONG_BYTES, NICER, Aside

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")


async def test_results_and_errors_come_back() -> None:
    aside = Aside(1)
    assert await aside.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await aside.run(divmod, 7, 0)


async def test_work_knows_whose_it_is() -> None:
    NAME.set("r-1")
    assert await Aside(1).run(NAME.get) == "r-1"


async def test_the_loop_goes_on_and_further_work_waits_in_order() -> None:
    aside, gate, seen = Aside(1), threading.Event(), list[int]()

    def work(number: int) -> None:
        assert gate.wait(20)
        seen.append(number)

    tasks = [asyncio.create_task(aside.run(work, number)) for number in range(4)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert seen == []
    gate.set()
    await asyncio.gather(*tasks)
    assert seen == [0, 1, 2, 3]


async def test_a_book_never_holds_up_a_page() -> None:
    """Nor many of them: what may take seconds has threads of its own."""
    aside, gate = Aside(1), threading.Event()
    books = [asyncio.create_task(aside.run_sized(LONG_BYTES + 1, gate.wait, 20)) for _ in range(4)]
    books += [asyncio.create_task(aside.run_long(gate.wait, 20)) for _ in range(4)]  # schemas of any size
    async with asyncio.timeout(15):
        assert await aside.run_sized(LONG_BYTES, divmod, 7, 2) == (3, 1)
        assert await aside.run(divmod, 7, 2) == (3, 1)
    gate.set()
    assert all(await asyncio.gather(*books))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_its_threads_give_way() -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert await Aside(1).run(priority) == min(19, here + NICER)
    assert os.getpriority(os.PRIO_PROCESS, 0) == here
