"""A server that froze and came back is told; slow first tokens, long queues and idle times are not."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from bench.load.client.pool import Progress, run_plan
from bench.load.figures.freeze import Freeze, find_freezes
from bench.load.figures.metrics import summarize
from bench.load.figures.validity import judge
from bench.load.mock.process import running_mock
from bench.load.records import ClientReport, RequestRecord, Status
from tests.bench.load.load_values import answer, run_of, steady_run
from tests.support.load_client import plan, request


def served(
    at_s: float, ttft_s: float = 0.1, num: int = 10, tpot_s: float = 0.02, timeout_s: float = 100.0
) -> RequestRecord:
    """Chunks at a steady pace; what comes after the time limit is lost."""
    chunks = [at_s + ttft_s + k * tpot_s for k in range(num)]
    if chunks[-1] <= at_s + timeout_s:
        return answer(at_s, chunks)
    heard = [moment for moment in chunks if moment <= at_s + timeout_s]
    return answer(at_s, heard, status=Status.TIMEOUT, end_s=at_s + timeout_s)


def freezing(
    records: list[RequestRecord], from_s: float, to_s: float, timeout_s: float = 100.0
) -> list[RequestRecord]:
    """What would have come in that time comes at its end, or is lost to the time limit."""
    late = []
    for record in records:
        at_s, end_s = record.scheduled_s, record.scheduled_s + timeout_s
        moved = [to_s if from_s <= moment < to_s else moment for moment in record.chunk_times_s]
        heard = [moment for moment in moved if moment <= end_s]
        if heard == moved and record.status is Status.OK:
            late.append(answer(at_s, moved))
        else:
            late.append(answer(at_s, heard, status=Status.TIMEOUT, end_s=end_s))
    return late


def freezes_of(records: list[RequestRecord]) -> list[Freeze]:
    return find_freezes(run_of(records))


def test_a_freeze_with_time_limits_is_told_with_its_moment_its_length_and_whom_it_hit() -> None:
    """Four requests a second, 3.8 to 7.8 s nothing: the requests of that time run into their limit of 1 s."""
    run = run_of(freezing([served(i / 4) for i in range(40)], 3.8, 7.8, timeout_s=1.0))
    [found] = find_freezes(run)
    assert found.start_s == pytest.approx(3.78, abs=0.03)
    assert found.end_s == pytest.approx(7.8)
    timed_out = [record for record in run.records if record.status is Status.TIMEOUT]
    assert found.num_timed_out == len(timed_out) == 13
    assert found.num_in_flight > found.num_timed_out
    judged = judge(run, summarize(run))
    assert judged.valid
    [caution] = judged.cautions
    assert caution.startswith("The server stood still: nothing came from it for 4.0 s, from 3.8 s to 7.8 s")
    assert "(13 timed out in that time), and then it answered again." in caution


def test_a_freeze_that_nobody_s_time_limit_met_is_told_where_three_waited() -> None:
    [found] = freezes_of(freezing([served(i / 4) for i in range(40)], 3.8, 7.8))
    assert (found.num_timed_out, found.end_s) == (0, pytest.approx(7.8))
    streams = [served(0.0, num=300) for _ in range(3)]
    assert len(freezes_of(freezing(streams, 2.0, 4.0))) == 1
    assert freezes_of(freezing(streams[:2], 2.0, 4.0)) == []
    assert freezes_of(freezing(streams, 2.0, 2.9)) == []


def test_several_freezes_are_one_caution() -> None:
    records = [served(i / 4) for i in range(80)]
    for from_s, to_s in ((12.0, 15.0), (3.0, 5.0)):
        records = freezing(records, from_s, to_s, timeout_s=1.0)
    run = run_of(records)
    assert [round(one.end_s) for one in find_freezes(run)] == [5, 15]
    [caution] = judge(run, summarize(run)).cautions
    assert "from 12.0 s to 15.0 s" in caution
    assert "; 1 more such time in this run" in caution


def test_a_freeze_to_the_end_of_the_run_is_told_if_the_server_answered_after_that() -> None:
    run = run_of(freezing([served(i / 4) for i in range(30)], 3.8, 20.0, timeout_s=1.0))
    [found] = find_freezes(run)
    assert (found.is_to_the_end, found.num_timed_out, found.end_s) == (True, 15, run.wall_s)
    [caution] = judge(run, summarize(run)).cautions
    assert "and it answered again only when it was asked after the run." in caution
    run.server_gone = "no answer"
    assert find_freezes(run) == []
    run.server_gone, run.is_complete = None, False
    assert find_freezes(run) == []


def one_after_another(num: int, timeout_s: float = 100.0, ttft_s: float = 2.0) -> list[RequestRecord]:
    """A closed loop of one."""
    records: list[RequestRecord] = []
    for i in range(num):
        at_s = (records[-1].end_s or 0.0) if records else 0.0
        records.append(served(at_s, ttft_s=ttft_s + 0.2 * (i % 3), timeout_s=timeout_s))
    return records


@pytest.mark.parametrize(
    "records",
    [
        [],
        [answer(0.0, [0.1])],
        steady_run(50).records,
        one_after_another(20),
        one_after_another(20, timeout_s=2.5),
        [served(i * 5.0, ttft_s=2.0) for i in range(20)],
        [served(i * 30.0) for i in range(20)],
        [served(wave * 3.0, ttft_s=2.0) for wave in range(6) for _ in range(8)],
        [served(0.0, ttft_s=2.0) for _ in range(8)] + [served(3.0 + i / 4) for i in range(20)],
        [served(float(i), ttft_s=min(i + 1.0, 3.0), timeout_s=3.5) for i in range(30)],
        [answer(i * 1.0, [], status=Status.TIMEOUT, end_s=i + 0.9) for i in range(10)],
        [*steady_run(20).records, *(answer(1.0, [1.1], status=Status.TIMEOUT, end_s=9.0) for _ in range(5))],
    ],
    ids=[
        *("nothing", "one", "steady", "closed loop of one", "and its time limit"),
        *("slow first tokens", "idle", "waves of slow first tokens", "slow first prompts"),
        *("a long queue", "never an answer", "no answer to the last ones"),
    ],
)
def test_what_is_no_freeze(records: list[RequestRecord]) -> None:
    assert freezes_of(records) == []


def test_a_pause_of_the_client_or_of_a_dead_server_is_another_thing() -> None:
    records = freezing([served(i / 4) for i in range(40)], 3.8, 7.8)
    run = run_of(records)
    run.clients = [ClientReport(process=0, cpu_s=0.1, wall_s=10.0, stalls_s=[(3.9, 7.8)])]
    assert find_freezes(run) == []
    refused = answer(5.0, [], end_s=5.0, status=Status.CONNECTION)
    refused.is_unreachable = True
    assert freezes_of([*records, refused]) == []


def test_a_server_that_was_stopped_and_continued_is_told() -> None:
    """A real process: the kernel takes its connections while it stands."""
    requests = [request(i, i * 0.1, max_tokens=3, ttft_s=0.01, itl_s=0.01) for i in range(30)]
    with running_mock() as mock:
        go_on = threading.Timer(1.6, os.kill, (mock.pid, signal.SIGCONT))

        def stop_once(progress: Progress) -> None:
            if progress.num_ended and not go_on.ident:
                os.kill(mock.pid, signal.SIGSTOP)
                go_on.start()

        try:
            run = run_plan(plan(requests), mock.target, timeout_s=0.4, on_progress=stop_once)
        finally:
            go_on.cancel()
            os.kill(mock.pid, signal.SIGCONT)
    timed_out = sum(record.status is Status.TIMEOUT for record in run.records)
    [found] = find_freezes(run)
    assert found.length_s > 1.0
    assert 0 < found.num_timed_out <= timed_out
    assert any("The server stood still" in one for one in judge(run, summarize(run)).cautions)
