"""Whole runs over real client processes: records come home whatever dies or is interrupted on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bench.load.client.pool import Progress, StopSwitch, run_plan
from bench.load.client.target import Target, probe
from bench.load.figures.metrics import summarize
from bench.load.figures.slo import parse_slos
from bench.load.figures.validity import judge
from bench.load.mock.process import read_truths, running_mock
from bench.load.mock.server import Truth
from bench.load.plan import PlannedRequest
from bench.load.records import RequestRecord, RunRecord, Status
from cluster.errors import BatonError, ConfigError
from tests.support.load_client import plan, request, turn

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with running_mock() as mock:
        yield mock.target


def truths_by_label(target: Target, prefix: str) -> dict[str, Truth]:
    return {truth.label: truth for truth in read_truths(target) if truth.label.startswith(prefix)}


def labelled(label: str, num_requests: int, gap_s: float, **script: object) -> list[PlannedRequest]:
    requests = [request(index, index * gap_s, **script) for index in range(num_requests)]
    for planned in requests:
        planned.body["mock"]["label"] = f"{label}{planned.index}"
    return requests


def test_a_mock_process_answers_a_probe(target: Target) -> None:
    info = probe(target)
    assert (info.model, info.version, info.max_model_len) == ("mock-8b-instruct", "mock-1", 32_768)


def lower_quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


def test_reported_moments_and_figures_are_the_true_ones(target: Target) -> None:
    """What a record says, against the moments at which the mock truly wrote: 1 ms or 1 %.

    The truth is the moment right before each write, so a delay of the mock on a busy machine is part of it.
    Two rules hold however busy the machine is. No chunk was read before it was written. And a fault of the
    client's clock or stamps would shift every moment, so a quarter of them being within the bound shows
    that there is none; the others may be as late as the machine's scheduler pleases.
    """
    requests = labelled("true", 24, 0.02, max_tokens=20, ttft_s=0.05, itl_s=0.01)
    run = run_plan(plan(requests), target, num_processes=2)
    assert {record.status for record in run.records} == {Status.OK}
    truths = truths_by_label(target, "true")
    late_ms: list[float] = []
    wrong_ttft: list[float] = []  # in units of the bound
    wrong_tpot: list[float] = []
    for record in run.records:
        truth = truths[f"true{record.index}"]
        true_s = [(moment_ns - run.start_ns) / 1e9 for moment_ns in truth.chunk_ns]
        assert len(record.chunk_times_s) == len(true_s) == 20
        late_ms += [(mine - true) * 1e3 for mine, true in zip(record.chunk_times_s, true_s, strict=True)]
        assert record.connected_s is not None
        assert record.connected_s < (truth.received_ns - run.start_ns) / 1e9
        true_ttft_s = true_s[0] - record.scheduled_s
        wrong_ttft.append(abs(record.chunk_times_s[0] - true_s[0]) / max(0.001, 0.01 * true_ttft_s))
        true_tpot_s = (true_s[-1] - true_s[0]) / 19
        tpot_s = (record.chunk_times_s[-1] - record.chunk_times_s[0]) / 19
        wrong_tpot.append(abs(tpot_s - true_tpot_s) / max(0.001, 0.01 * true_tpot_s))
    assert min(late_ms) > 0.0
    assert lower_quartile(late_ms) < 1.0
    assert lower_quartile(wrong_ttft) < 1.0
    assert lower_quartile(wrong_tpot) < 1.0


def check_accounting(run: RunRecord, num_requests: int) -> None:
    assert [record.index for record in run.records] == list(range(num_requests))
    assert run.wall_s >= max((record.end_s or 0.0) for record in run.records)
    for record in run.records:
        assert (record.error is None) == (record.status is Status.OK)


def test_a_run_over_two_processes(target: Target) -> None:
    seen: list[Progress] = []
    requests = [request(index, index * 0.02, ttft_s=0.02, itl_s=0.01) for index in range(30)]
    before_s = time.time()
    run = run_plan(plan(requests), target, 2, 10.0, seen.append, True)
    check_accounting(run, 30)
    assert {record.status for record in run.records} == {Status.OK}
    assert {record.text for record in run.records} == {" mock mock mock mock"}
    assert {record.process for record in run.records} == {0, 1}
    assert run.is_complete
    assert run.notes == []
    assert before_s <= run.start_unix_s <= time.time()
    assert [client.process for client in run.clients] == [0, 1]
    assert all(client.cpu_s > 0 and client.wall_s >= 0.58 for client in run.clients)
    assert seen[-1].num_ended == {Status.OK: 30}
    assert seen[-1].num_offered == 30
    assert seen[-1].num_in_flight == 0
    assert [record.scheduled_s for record in run.records] == [planned.scheduled_s for planned in requests]


def test_chats_over_processes_in_a_closed_loop(target: Target) -> None:
    requests = [
        turn(session * 2 + number, session, number, "a b", think_s=0.01)
        for session in range(6)
        for number in range(2)
    ]
    run = run_plan(plan(requests, is_chat=True, closed_loop=3), target, num_processes=2)
    check_accounting(run, 12)
    assert {record.status for record in run.records} == {Status.OK}
    assert [record.input_tokens for record in run.records] == [2, 6] * 6


def test_more_processes_than_slots_or_requests_are_not_started(target: Target) -> None:
    run = run_plan(plan([request(0), request(1)], closed_loop=1), target, num_processes=4)
    assert len(run.clients) == 1
    assert {record.status for record in run.records} == {Status.OK}


def test_an_empty_plan_is_a_complete_run(target: Target) -> None:
    run = run_plan(plan([]), target)
    assert (run.records, run.is_complete, run.wall_s) == ([], True, 0.0)


def test_a_stopped_run_keeps_what_it_measured(target: Target) -> None:
    switch = StopSwitch()
    requests = [request(0), request(1, stall_after=1), request(2, 60.0)]

    def stop_once(progress: Progress) -> None:
        if progress.num_ended and progress.num_in_flight and not switch.num_stops:
            switch.stop()

    run = run_plan(plan(requests), target, on_progress=stop_once, stop=switch)
    check_accounting(run, 3)
    assert [record.status for record in run.records] == [Status.OK, Status.CANCELLED, Status.SKIPPED]
    assert not run.is_complete
    assert run.notes == ["the run was interrupted"]


def test_a_second_stop_does_not_wait_for_a_client_that_hangs(target: Target) -> None:
    before = set(children(os.getpid()))
    switch = StopSwitch()

    def freeze_and_stop(progress: Progress) -> None:
        if progress.num_in_flight and not switch.num_stops:
            [client] = set(children(os.getpid())) - before
            os.kill(client, signal.SIGSTOP)
            switch.stop()
            switch.stop()

    run = run_plan(plan([request(0, stall_after=1)]), target, on_progress=freeze_and_stop, stop=switch)
    assert [record.status for record in run.records] == [Status.CANCELLED]
    assert run.notes == ["the run was interrupted", "client process 0 was killed by SIGKILL"]


def test_a_run_stopped_from_another_thread_before_it_began(target: Target) -> None:
    switch = StopSwitch()
    thread = threading.Thread(target=switch.stop)
    thread.start()
    thread.join()
    run = run_plan(plan([request(0, 60.0)]), target, stop=switch)
    assert [record.status for record in run.records] == [Status.SKIPPED]
    assert not run.is_complete


RUN_AND_PRINT = """
import sys
import msgspec
from bench.load.plan import Plan
from bench.load.plan import PlannedRequest
from bench.load.client.pool import run_plan
from bench.load.client.target import parse_target

def said(progress):
    if progress.num_in_flight:
        print("flying", flush=True)

offered = msgspec.json.decode(sys.argv[2], type=Plan)
run = run_plan(offered, parse_target(sys.argv[1]), on_progress=said)
print(msgspec.json.encode(run).decode(), flush=True)
"""


def test_an_interrupt_of_the_terminal_ends_the_run_in_good_order(target: Target) -> None:
    """The signal goes to the whole process group, as a terminal's does."""
    offered = plan([request(0, stall_after=0), request(1, 60.0)])
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_AND_PRINT, target.url, msgspec.json.encode(offered).decode()],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "flying\n"
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=20.0)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    run = msgspec.json.decode(rest.splitlines()[-1], type=RunRecord)
    assert [record.status for record in run.records] == [Status.CANCELLED, Status.SKIPPED]
    assert run.notes == ["the run was interrupted"]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_client_process_costs_its_own_requests_only(target: Target) -> None:
    before = set(children(os.getpid()))
    requests = [
        request(0, stall_after=1),
        request(1, ttft_s=0.6),
        request(2, 0.05),
        request(3, 1.0),
        request(4, 3.0),
    ]
    killed: list[int] = []

    def kill_first(progress: Progress) -> None:
        if progress.num_in_flight and progress.num_output_tokens and not killed:
            killed.append(min(set(children(os.getpid())) - before))
            os.kill(killed[0], signal.SIGKILL)

    run = run_plan(plan(requests), target, num_processes=2, on_progress=kill_first)
    check_accounting(run, 5)
    assert not run.is_complete
    [note] = run.notes
    victim = int(note.removeprefix("client process ").split()[0])
    assert note == f"client process {victim} was killed by SIGKILL"
    assert [client.process for client in run.clients] == [1 - victim]
    by_process: dict[int, list[RequestRecord]] = {0: [], 1: []}
    for record in run.records:
        by_process[record.index % 2].append(record)
    for record in by_process[1 - victim]:
        assert record.status is Status.OK
    lost = [record for record in by_process[victim] if record.status is not Status.OK]
    assert lost
    for record in lost:
        assert record.status in (Status.CANCELLED, Status.SKIPPED)
        assert note in (record.error or "")


def test_a_frozen_client_process_does_not_give_a_valid_run(target: Target) -> None:
    """It is stopped while all its streams run, after its last send: only the stall can tell."""
    before = set(children(os.getpid()))
    requests = labelled("frozen", 8, 0.0, max_tokens=400, ttft_s=0.01, itl_s=0.01)
    frozen: list[int] = []

    def freeze_once(progress: Progress) -> None:
        if progress.num_output_tokens > 80 and not frozen:
            frozen.append(min(set(children(os.getpid())) - before))
            os.kill(frozen[0], signal.SIGSTOP)
            time.sleep(0.4)
            os.kill(frozen[0], signal.SIGCONT)

    run = run_plan(plan(requests), target, on_progress=freeze_once)
    assert {record.status for record in run.records} == {Status.OK}
    [client] = run.clients
    assert client.max_loop_lag_s > 0.3
    assert max(end_s - start_s for start_s, end_s in client.stalls_s) == pytest.approx(client.max_loop_lag_s)
    reasons = judge(run, summarize(run, parse_slos("ttft=10s,gap=100ms"))).invalid_reasons
    assert any("The client stood still: in 8 of 8 answers" in reason for reason in reasons)


def test_a_server_that_dies_mid_run_costs_its_requests_and_not_the_run() -> None:
    with running_mock() as mock:
        requests = [
            *(request(0), request(1, ttft_s=0.01, stall_after=2)),
            *(request(index, 0.5 + index * 0.05) for index in range(2, 19)),
            request(19, 4.0),  # later than the end of the server, however late that is
        ]

        def kill_server(progress: Progress) -> None:
            if progress.num_output_tokens >= 6:
                os.kill(mock.pid, signal.SIGKILL)

        run = run_plan(plan(requests), mock.target, on_progress=kill_server)
    check_accounting(run, 20)
    assert run.is_complete  # all of it was offered; what became of it is in the records
    assert run.notes == []
    assert run.records[0].status is Status.OK
    assert run.records[1].status is Status.CONNECTION
    assert "after 2 chunks with content" in (run.records[1].error or "")
    assert run.records[19].status is Status.CONNECTION
    assert "Connection refused" in (run.records[19].error or "")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_processes": 0}, "at least one is needed"),
        ({"timeout_s": 0.0}, "above zero"),
        ({"stall_s": -1.0}, "above zero"),
    ],
)
def test_settings_that_cannot_work(target: Target, settings: dict[str, float], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run_plan(plan([request(0)]), target, **settings)
    with pytest.raises(ConfigError, match="at least one"):
        run_plan(plan([request(0)], closed_loop=0), target)


def test_a_host_that_is_not_known_is_one_line() -> None:
    with pytest.raises(
        BatonError, match="client process 0 could not start: it exited with status 1: gaierror"
    ):
        run_plan(plan([request(0)]), Target(host="no-such-host.invalid", port=1))


def test_a_client_process_is_light_to_import() -> None:
    code = (
        "import sys, bench.load.client.process\n"
        "heavy = {'numpy', 'torch', 'rich', 'typer', 'pydantic', 'http.client'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_a_client_process_ends_when_its_parent_is_gone() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.load.client.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        _, errors = process.communicate(b"", timeout=20.0)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert b"the parent closed the pipe" in errors
