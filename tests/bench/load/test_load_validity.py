import pytest

from bench.load.metrics import summarize
from bench.load.records import ClientReport, RunRecord, Status
from bench.load.slo import parse_slos
from bench.load.validity import Validity, judge, max_send_lag_s
from bench.load.window import Window
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
        assert f"{lag_s * 1e3:.2f} ms over 20 requests" in reason
        assert f"{max_send_lag_s(parse_slos(slos) if slos else ()) * 1e3:.2f} ms" in reason


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


def test_an_empty_window_is_not_valid() -> None:
    (reason,) = judged(steady_run(), window=Window(warmup_s=100.0)).invalid_reasons
    assert "No request was scheduled in the window" in reason
    assert "100 offered" in reason


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
