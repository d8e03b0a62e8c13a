import pytest

from bench.load.figures.metrics import summarize
from bench.load.figures.slo import parse_slos
from bench.load.figures.validity import Validity, judge, max_send_lag_s
from bench.load.figures.window import Window, resolve
from bench.load.records import ClientReport, RunRecord, Status
from tests.bench.load.load_values import answer, run_of, skipped, steady_run


def judged(run: RunRecord, slos: str = "", window: Window | None = None) -> Validity:
    return judge(run, summarize(run, parse_slos(slos) if slos else (), window or Window()))


def lagging(lag_s: float) -> RunRecord:
    return run_of([answer(float(i), [i + 1.0], lag_s=lag_s) for i in range(20)])


def test_a_good_run_is_valid() -> None:
    assert judged(steady_run(), "ttft=200ms") == Validity((), ())


@pytest.mark.parametrize(
    ("lag_s", "slos", "is_valid"),
    [
        (0.009, "", True),
        (0.011, "", False),
        (0.009, "ttft=200ms", True),
        (0.011, "ttft=200ms", False),
        (0.045, "ttft=1s", True),
        (0.055, "ttft=1s,tpot=10ms", False),
        (0.011, "tpot=1s", False),
    ],
)
def test_send_lag(lag_s: float, slos: str, is_valid: bool) -> None:
    found = judged(lagging(lag_s), slos)
    assert found.valid is is_valid
    if not is_valid:
        (reason,) = found.invalid_reasons
        assert "20 of 20 requests" in reason
        assert f"p99 {lag_s * 1e3:.2f} ms" in reason
        assert f"{max_send_lag_s(parse_slos(slos) if slos else ()) * 1e3:.2f} ms" in reason


@pytest.mark.parametrize(
    ("num", "num_late", "lag_s", "is_valid"),
    [
        (5, 1, 0.012, True),  # one late wake-up says nothing about the client
        (5, 2, 0.012, False),
        (5, 1, 0.051, False),  # but it must not be gross
        (60, 3, 0.012, True),
        (60, 4, 0.012, False),
        (99, 1, 0.051, False),
        (200, 2, 0.5, True),  # p99 from 100 on, however late the rest
        (200, 3, 0.012, False),
    ],
)
def test_how_many_may_be_sent_late(num: int, num_late: int, lag_s: float, is_valid: bool) -> None:
    records = [answer(float(i), [i + 1.0], lag_s=lag_s if i < num_late else 0.001) for i in range(num)]
    found = judged(run_of(records))
    assert found.valid is is_valid
    if not is_valid:
        assert f"{num_late} of {num} requests is above 10.00 ms" in found.invalid_reasons[0]


def test_advice_fits_what_is_known_of_the_client() -> None:
    run = lagging(0.1)
    run.clients[0].cpu_s, run.clients[0].wall_s = 0.06, 10.0
    (reason,) = judged(run).invalid_reasons
    assert "it used at most 0.6% of a core" in reason
    assert "keep a core free for the client" in reason
    run.clients[0].cpu_s = 7.0
    (reason,) = judged(run).invalid_reasons
    assert "used 70% of a core: use more client processes, or offer less load" in reason


def frozen(run: RunRecord, *stalls_s: tuple[float, float]) -> RunRecord:
    run.clients[0].stalls_s = list(stalls_s)
    return run


def streams(num: int, ends_s: float = 4.0) -> RunRecord:
    """Answers side by side, a chunk every 50 ms."""
    return run_of([answer(0.0, [0.05 * k for k in range(1, int(ends_s / 0.05))]) for _ in range(num)])


@pytest.mark.parametrize(
    ("slos", "is_valid"),
    [
        ("ttft=1s", True),  # the first chunks came before
        ("gap=100ms", False),
        ("gap=10s", True),
        ("tpot=30ms", True),  # of 79 tokens: 400 ms is 5 ms a token
        ("itl=30ms", True),
        ("e2e=5s", True),
        ("", False),
        ("ttft=1s,gap=100ms", False),
    ],
)
def test_a_frozen_client_spoils_the_figures_that_it_can(slos: str, is_valid: bool) -> None:
    """The chunks of 400 ms were read at its end, as when the process was stopped."""
    run = streams(20)
    for record in run.records:
        record.chunk_times_s = sorted(1.4 if 1.0 < one < 1.4 else one for one in record.chunk_times_s)
    found = judged(frozen(run, (1.0, 1.4)), slos)
    assert found.valid is is_valid
    if not is_valid:
        (reason,) = found.invalid_reasons
        assert "The client stood still: in 20 of 20 answers" in reason
        assert "400 ms" in reason


@pytest.mark.parametrize(("slos", "end_s"), [("ttft=200ms", 0.06), ("tpot=10ms", 3.96), ("e2e=200ms", 3.96)])
def test_a_stall_at_the_first_or_last_chunk(slos: str, end_s: float) -> None:
    run = frozen(streams(20), (end_s - 0.5, end_s))
    assert not judged(run, slos).valid or slos == "tpot=10ms"
    if slos == "tpot=10ms":  # 500 ms over 78 gaps is 6 ms
        assert "20 of 20" in " ".join(judged(run, slos).invalid_reasons)


def test_a_stall_in_which_nothing_came_does_no_harm() -> None:
    run = frozen(steady_run(num=20, rate=1.0), *((i + 0.4, i + 0.9) for i in range(20)))
    assert judged(run, "ttft=200ms,gap=50ms") == Validity((), ())


def test_one_rare_stall_in_a_long_run_is_a_caution() -> None:
    run = frozen(steady_run(num=1000), (50.0, 50.105))
    found = judged(run, "ttft=200ms")
    assert found.valid
    (caution,) = found.cautions
    assert "in 1 of 1000 answers a figure may be off by more than 25% of its SLO bound" in caution


def test_a_stall_of_another_process_is_not_ours() -> None:
    run = frozen(streams(20), (1.0, 1.4))
    run.clients[0].process = 7
    assert judged(run, "gap=100ms") == Validity((), ())


def test_stalls_outside_the_window_do_not_count() -> None:
    run = frozen(steady_run(num=100), (0.0, 3.0))
    assert not judged(run, "gap=50ms").valid
    assert judged(run, "gap=50ms", Window(warmup_s=4.0)) == Validity((), ())


def test_requests_that_were_sent_twice_are_a_caution() -> None:
    run = steady_run(num=4)
    run.records[1].num_retries = 1
    found = judged(run)
    assert found.valid
    (caution,) = found.cautions
    assert caution.startswith("1 of 4 requests were sent a second time")


def test_send_lag_outside_the_window_does_not_count() -> None:
    records = [answer(float(i), [i + 1.0], lag_s=0.5 if i < 5 else 0.0) for i in range(20)]
    assert not judged(run_of(records)).valid
    assert judged(run_of(records), window=Window(warmup_s=6.0)).valid


def test_a_client_short_of_cpu() -> None:
    run = steady_run()
    run.clients = [
        ClientReport(process=0, cpu_s=8.0, wall_s=10.0),
        ClientReport(process=1, cpu_s=9.5, wall_s=10.0),
        ClientReport(process=2, cpu_s=0.0, wall_s=0.0),
    ]
    (reason,) = judged(run).invalid_reasons
    assert "Client process 1" in reason
    assert "95%" in reason
    assert "90%" in reason


def test_other_lengths_than_planned() -> None:
    run = steady_run(num=10)
    for record in run.records:
        record.planned_output_tokens = 10
    run.records[3].output_tokens = 9
    run.records[4].input_tokens = 11
    run.records[5].input_tokens, run.records[5].status = (
        99,
        Status.TIMEOUT,
    )  # not an answer: no length to check
    one, two = judged(run).invalid_reasons
    assert "1 of 9 answers had another input length" in one
    assert "request 4: 11 tokens" in one
    assert "1 of 9 answers had another output length" in two
    assert "request 3: 9 tokens by the server's usage, 10 planned" in two


def test_lengths_that_were_not_planned_are_not_checked() -> None:
    run = steady_run(num=4)
    for record in run.records:
        record.planned_input_tokens = record.planned_output_tokens = None
        record.output_tokens = 3
    assert judged(run) == Validity((), ())


def test_missing_usage_is_a_caution() -> None:
    run = steady_run(num=4)
    for record in run.records:
        record.planned_output_tokens = 10
        record.input_tokens = record.output_tokens = None
    found = judged(run)
    assert found.valid
    assert [caution.split(",")[0] for caution in found.cautions] == [
        "4 of 4 answers carried no usage",
        "4 of 4 answers carried no usage",
        "The output of 4 of 4 answers was counted as one token per chunk.",
    ]


def test_an_incomplete_run_says_why() -> None:
    records = [answer(0.0, [0.5]), answer(1.0, [], status=Status.CANCELLED, end_s=1.1), skipped(9.0)]
    (reason,) = judged(run_of(records, is_complete=False, notes=["Client process 1 died."])).invalid_reasons
    assert "Client process 1 died." in reason
    assert "2 of 3 requests" in reason
    (reason,) = judged(run_of(records, is_complete=False)).invalid_reasons
    assert "interrupted" in reason


@pytest.mark.parametrize(
    ("window", "told"),
    [
        (Window(warmup_s=100.0), "The warm-up of 100 s left none of the 100 requests"),
        (Window(cooldown_s=99.0), "The cool-down of 99 s left none of the 100 requests"),
        (
            Window(warmup_s=6.0, cooldown_s=7.0),
            "The warm-up of 6 s and the cool-down of 7 s left none of the 100 requests",
        ),
    ],
)
def test_an_empty_window_is_not_valid(window: Window, told: str) -> None:
    run = steady_run()
    (reason,) = judged(run, window=window).invalid_reasons
    assert reason.startswith(told)
    span = resolve(window, run)
    assert span.start_s <= span.end_s
    assert "scheduled from" not in span.rule
    assert not any(span.contains(record) for record in run.records)


@pytest.mark.parametrize(("warmup_s", "told"), [(9.85, "left only 1 of the 100 requests"), (5.0, None)])
def test_a_window_with_very_few_requests_is_a_caution(warmup_s: float, told: str | None) -> None:
    cautions = judged(steady_run(), window=Window(warmup_s=warmup_s)).cautions
    assert [told in one for one in cautions] == [True] if told else not cautions


def test_failures_are_a_result_and_not_a_fault_of_the_run() -> None:
    run = run_of([answer(float(i), [], status=Status.REFUSED, end_s=i + 0.1) for i in range(3)])
    assert judged(run).valid


def test_reasons_are_single_lines() -> None:
    run = lagging(1.0)
    run.is_complete = False
    run.records[0].output_tokens, run.records[0].planned_output_tokens = 3, 4
    reasons = judged(run).invalid_reasons
    assert len(reasons) == 3
    assert all("\n" not in reason and reason.endswith((".", "rate.")) for reason in reasons)
