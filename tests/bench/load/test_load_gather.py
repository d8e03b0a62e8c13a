import pytest

from bench.load.client.frames import Job, Tick
from bench.load.client.gather import MAX_GAPS, RECENT_S, Gathering, newest_gaps, p99
from bench.load.records import ClientReport, RequestRecord, Status


def job(index: int, scheduled_s: float = 0.0, turn: int = 0) -> Job:
    return Job(index, scheduled_s, b"{}", session=1 if turn else None, turn=turn)


def ok(index: int, end_s: float, *times: float, tokens: int | None = None) -> RequestRecord:
    return RequestRecord(
        index=index,
        scheduled_s=0.0,
        status=Status.OK,
        end_s=end_s,
        chunk_times_s=list(times),
        output_tokens=tokens,
    )


def test_records_come_home_in_plan_order_from_all_processes() -> None:
    gathering = Gathering([[job(0), job(2)], [job(1)]])
    gathering.take_tick(0, Tick([(0, 0.0), (2, 0.0)], 0, 0, [ok(2, 3.0), ok(0, 1.0)]))
    gathering.take_tick(1, Tick([(1, 0.0)], 0, 0, [ok(1, 2.0)]))
    for process in (1, 0):
        gathering.take_report(ClientReport(process=process, cpu_s=1.0, wall_s=3.0))
    run = gathering.run_record(1234.5, 77)
    assert [record.index for record in run.records] == [0, 1, 2]
    assert [client.process for client in run.clients] == [0, 1]
    assert (run.start_unix_s, run.start_ns, run.wall_s) == (1234.5, 77, 3.0)
    assert run.is_complete
    assert run.notes == []


def test_a_lost_process_loses_no_request() -> None:
    gathering = Gathering([[job(0), job(1, 0.2), job(2, 5.0), job(3, turn=1)], [job(4)]])
    gathering.take_tick(0, Tick([(0, 0.0), (1, 0.2)], 1, 3, [ok(0, 1.0)]))
    gathering.take_tick(1, Tick([(4, 0.0)], 0, 0, [ok(4, 1.0)]))
    gathering.lost(0, "was killed by SIGKILL", 2.0)
    run = gathering.run_record(0.0, 0)
    by_index = {record.index: record for record in run.records}
    assert len(by_index) == 5
    assert by_index[0].status is Status.OK
    assert by_index[1].status is Status.CANCELLED
    assert by_index[1].error == "in flight when client process 0 was killed by SIGKILL"
    assert (by_index[1].scheduled_s, by_index[1].end_s) == (0.2, 2.0)
    assert by_index[2].status is Status.SKIPPED
    assert by_index[2].error == "not sent: client process 0 was killed by SIGKILL"
    assert by_index[2].scheduled_s == 5.0
    assert by_index[3].scheduled_s == 2.0  # a later turn never had a moment
    assert not run.is_complete
    assert run.notes == ["client process 0 was killed by SIGKILL"]


def test_a_request_without_a_record_is_a_fault_of_ours() -> None:
    with pytest.raises(KeyError):
        Gathering([[job(0)]]).run_record(0.0, 0)


def test_a_note_is_kept_once() -> None:
    gathering = Gathering([[]])
    gathering.note("x")
    gathering.note("x")
    assert gathering.run_record(0.0, 0).notes == ["x"]


def test_progress_counts_and_medians_of_what_ended_lately() -> None:
    gathering = Gathering([[job(index) for index in range(4)]])
    first = gathering.progress(0.0)
    assert (first.num_planned, first.num_offered, first.recent_ttft_s, first.recent_itl_s) == (
        4,
        0,
        None,
        None,
    )
    records = [ok(0, 1.0, 0.5, 0.6, 0.8, tokens=10), ok(1, 2.0, 1.5, 1.7)]
    gathering.take_tick(0, Tick([(0, 0.0), (1, 0.0), (2, 0.0)], 1, 7, records))
    progress = gathering.progress(2.0)
    assert progress.num_offered == 3
    assert progress.num_in_flight == 1
    assert progress.num_ended == {Status.OK: 2}
    assert progress.num_output_tokens == 10 + 2 + 7
    assert progress.recent_ttft_s == 1.0
    assert progress.recent_ttft_p99_s == pytest.approx(1.49)  # between 0.5 and 1.5
    assert progress.recent_itl_s == pytest.approx(0.2)
    assert progress.recent_tokens_per_s == pytest.approx(9.5)
    later = gathering.progress(2.0 + RECENT_S + 0.1)
    assert later.recent_ttft_s is None
    assert later.recent_ttft_p99_s is None
    assert later.recent_tokens_per_s == 0.0


def test_the_display_looks_at_no_more_gaps_than_a_median_needs() -> None:
    old, new = ok(0, 1.0, *(0.001 * i for i in range(MAX_GAPS + 1))), ok(1, 2.0, 0.0, 0.5)
    assert len(newest_gaps([old, new])) == MAX_GAPS + 1
    assert newest_gaps([old, new])[0] == 0.5
    assert len(newest_gaps([ok(2, 0.5, 0.0, 0.1), old, new])) == MAX_GAPS + 1
    assert newest_gaps([]) == []


def test_p99_of_one_value_is_that_value() -> None:
    assert p99([0.5]) == 0.5
    assert p99([]) is None
