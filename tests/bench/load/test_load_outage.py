"""A server that dies while it is measured: found in the records, told once, and no ground for a bracket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.figures.metrics import summarize
from bench.load.figures.outage import find_outage, may_be_gone, was_unreachable
from bench.load.figures.slo import parse_slos
from bench.load.figures.validity import judge
from bench.load.goodput.probing import find_max_goodput, server_lost
from bench.load.goodput.values import Probe, SearchSettings
from bench.load.records import RequestRecord, RunRecord, Status
from bench.load.runner import Measurement
from tests.bench.load.load_values import answer, plan_of, run_of, skipped, steady_run


def refused(at_s: float) -> RequestRecord:
    """Nobody listens at that moment."""
    record = answer(at_s, [], end_s=at_s, status=Status.CONNECTION, error="cannot connect to `h:1`: refused")
    record.is_unreachable = True
    return record


def cut(at_s: float, end_s: float) -> RequestRecord:
    return answer(at_s, [at_s + 0.1], end_s=end_s, status=Status.CONNECTION, error="the connection broke")


def dying(num_ok: int = 5, num_after: int = 4, *, comes_back: bool = False) -> RunRecord:
    """A request a second, answered in half of one; dead within the last of them at x.25 s."""
    records = [answer(float(i), [i + 0.2, i + 0.5]) for i in range(num_ok)]
    records.append(cut(float(num_ok), num_ok + 0.25))
    records += [refused(float(num_ok + 1 + i)) for i in range(num_after)]
    if comes_back:
        later = float(num_ok + 1 + num_after)
        records.append(answer(later, [later + 0.2]))
    return run_of(records)


def gone(run: RunRecord) -> RunRecord:
    """It was asked after the run, and did not answer."""
    run.server_gone = "nothing listens at `http://h:1`"
    return run


def test_a_death_is_dated_by_the_streams_it_cut() -> None:
    outage = find_outage(dying().records)
    assert outage is not None
    assert (outage.start_s, outage.end_s) == (5.25, None)
    assert (outage.num_ok_before, outage.num_refused, outage.num_offered_after) == (5, 4, 4)


def test_a_server_that_came_back() -> None:
    outage = find_outage(dying(comes_back=True).records)
    assert outage is not None
    assert outage.end_s == pytest.approx(10.2)
    assert outage.num_offered_after == 5


@pytest.mark.parametrize(
    "records",
    [
        [],
        [answer(0.0, [0.1])],
        [refused(0.0), refused(1.0)],
        [refused(0.0), answer(1.0, [1.1])],
        [answer(0.0, [0.1]), cut(1.0, 1.5), answer(2.0, [2.1])],
        [answer(0.0, [0.1]), answer(1.0, [], status=Status.REFUSED, end_s=1.1)],
    ],
    ids=["nothing", "fine", "never there", "there later", "streams cut, connections open", "HTTP says no"],
)
def test_what_is_no_outage(records: list[RequestRecord]) -> None:
    assert find_outage(records) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["ok", "cut", "refused", "skipped"]), st.floats(0, 100), st.floats(0, 10)),
        max_size=12,
    )
)
def test_an_outage_lies_between_an_answer_and_a_refusal(drawn: list[tuple[str, float, float]]) -> None:
    make = {
        "ok": lambda at_s, life_s: answer(at_s, [at_s + life_s]),
        "cut": lambda at_s, life_s: cut(at_s, at_s + life_s),
        "refused": lambda at_s, _: refused(at_s),
        "skipped": lambda at_s, _: skipped(at_s),
    }
    records = [make[kind](at_s, life_s) for kind, at_s, life_s in drawn]
    outage = find_outage(records)
    refusals = [one.scheduled_s for one in records if one.is_unreachable]
    ends = [one.end_s or 0.0 for one in records if one.status is Status.OK]
    is_one = bool(refusals) and any(end_s <= min(refusals) for end_s in ends)
    assert (outage is not None) is is_one
    if outage is not None:
        assert max(end_s for end_s in ends if end_s <= min(refusals)) <= outage.start_s <= min(refusals)
        assert outage.end_s is None or outage.end_s > max(refusals)
        assert outage.num_offered_after >= len(refusals) == outage.num_refused


def test_a_server_that_died_for_good_makes_the_run_invalid() -> None:
    """All of its requests are accounted for, and when it died and how many came after is told."""
    run = gone(dying())
    found = judge(run, summarize(run, parse_slos("ttft=1s")))
    assert not found.valid
    (reason,) = found.invalid_reasons
    assert reason.startswith("The server went away after 5.2 s, when 5 requests had succeeded")
    assert "did not come back (nothing listens at `http://h:1`): 4 connections" in reason
    assert "4 of the 10 offered requests were due after that moment" in reason
    assert not found.cautions


def test_a_server_that_came_back_was_measured_with_its_absence() -> None:
    for run, until in (
        (dying(), "until the end, and then it answered again"),
        (dying(comes_back=True), "answers came again after 10.2 s"),
    ):
        found = judge(run, summarize(run))
        assert found.valid
        (caution,) = found.cautions
        assert until in caution
        assert "the figures count them all" in caution


def frozen(at_s: float) -> RequestRecord:
    """A stopped process: the kernel takes the connection, and nothing comes."""
    record = answer(at_s, [], status=Status.TIMEOUT, end_s=at_s + 9.0)
    record.connected_s = at_s
    return record


@pytest.mark.parametrize(
    ("records", "when", "num_ok", "num_after"),
    [
        ([refused(1.0), refused(2.0)], "before it had answered at all", "0 requests", 2),
        ([answer(0.0, [0.1]), frozen(1.0), frozen(2.0)], "after 0.1 s", "1 request", 2),
        ([answer(0.0, [0.1]), cut(1.0, 1.5)], "after 1.5 s", "1 request", 0),
        ([cut(0.0, 2.5), cut(1.0, 2.6), refused(3.0), refused(4.0)], "after 2.5 s", "0 requests", 2),
        ([frozen(0.5), frozen(1.0)], "before it had answered at all", "0 requests", 2),
    ],
    ids=["never there", "frozen", "died at the end", "killed before a success", "frozen from the start"],
)
def test_a_server_that_stopped_answering_in_any_way_makes_the_run_invalid(
    records: list[RequestRecord], when: str, num_ok: str, num_after: int
) -> None:
    run = gone(run_of(records))
    (reason,) = judge(run, summarize(run)).invalid_reasons
    assert reason.startswith(f"The server stopped answering {when} (nothing listens at `http://h:1`)")
    assert f"when {num_ok} had succeeded" in reason
    assert f"{num_after} of the {len(records)} offered requests were due after that moment" in reason


def test_a_server_that_was_late_is_told_too() -> None:
    run = run_of([refused(1.0), refused(2.0), answer(3.0, [3.1])])
    (caution,) = judge(run, summarize(run)).cautions
    assert caution.startswith("2 of 3 requests could open no connection, the first one due after 1.0 s")


def test_what_the_client_could_not_send_makes_the_run_invalid() -> None:
    run = steady_run(10)
    lacking = "the client could not open a connection: Too many open files"
    for record in run.records[6:]:
        record.status, record.error, record.sent_s, record.chunk_times_s = Status.CLIENT, lacking, None, []
    (reason,) = judge(run, summarize(run)).invalid_reasons
    assert "could not send 4 of 10 requests" in reason
    assert "Too many open files" in reason
    assert "ulimit -n" in reason


def test_answers_without_a_token_are_counted_in_a_caution() -> None:
    run = run_of([answer(float(i), [i + 0.1] if i % 2 else [], end_s=i + 0.2) for i in range(6)])
    summary = summarize(run, parse_slos("tpot=1s,gap=1s"))
    assert summary.goodput is not None
    assert summary.goodput.attainment == 0.5
    (caution,) = [one for one in judge(run, summary).cautions if "no token" in one]
    assert caution.startswith("3 of 6 answers")


def test_what_a_lost_server_is() -> None:
    assert server_lost(steady_run(5)) is None
    assert not may_be_gone(steady_run(5))  # a run in which all went well gives no cause to ask
    assert not was_unreachable(steady_run(5))
    cut_short = run_of([answer(0.0, [0.1]), cut(1.0, 1.5)])
    assert may_be_gone(cut_short)
    assert server_lost(cut_short) is None  # a stream broke, and the server is there
    assert "nothing listens" in (server_lost(gone(cut_short)) or "")
    assert "answers again" in (server_lost(dying()) or "")
    hung = run_of([answer(0.0, [0.1]), answer(1.0, [], status=Status.TIMEOUT, end_s=9.0)])
    assert may_be_gone(hung)


@pytest.mark.parametrize("dies_at", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("how", ["refuses", "cuts", "comes back"])
def test_a_search_ends_where_its_server_died(dies_at: int, how: str) -> None:
    """The dead probe makes no bracket: the answers are those of the probes before it."""
    settings = SearchSettings(start_rate=1.0, seeds=(0,), max_probes=20)

    def measure(probe: Probe, number: int) -> Measurement:
        run = steady_run(20, ttft_s=0.1 if probe.rate <= 3 else 2.0)
        if number == dies_at:
            run = run_of([cut(0.0, 0.2)]) if how == "cuts" else dying(2, 2)
            run = run if how == "comes back" else gone(run)
        return Measurement(plan_of(run), run, summarize(run, parse_slos("ttft=1s")), {"valid": True})

    reported: list[Probe] = []
    found, measured = find_max_goodput(settings, measure, lambda probe, *_: reported.append(probe))
    assert not found["is_complete"]
    assert len(measured) == dies_at + 1
    assert len(found["probes"]) == len(reported) == dies_at
    before, _ = find_max_goodput(
        SearchSettings(start_rate=1.0, seeds=(0,), max_probes=max(1, dies_at)),
        lambda probe, _: measure(probe, -1),
        lambda *_: None,
    )
    if dies_at:
        assert found["answers"][0]["bracket_high"] == before["answers"][0]["bracket_high"]
        assert found["answers"][0]["rate"] == before["answers"][0]["rate"]
    else:
        assert found["answers"][0]["rate"] is None
        assert found["answers"][0]["bracket_high"] is None
    assert "proves nothing" in found["notes"][-1]
    assert ("answers again" if how == "comes back" else "nothing listens") in found["notes"][-1]
    assert found["incomplete_reasons"] == found["notes"][-1:]
