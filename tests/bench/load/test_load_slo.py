import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.figures.latency import derive
from bench.load.figures.slo import (
    Slo,
    SloMetric,
    evaluate,
    format_slos,
    is_good,
    parse_slos,
    slos_from_ms,
    slos_to_ms,
)
from bench.load.records import Status
from cluster.errors import BatonError
from tests.bench.load.load_values import answer, skipped

SOME = (Slo(SloMetric.TTFT, 0.2), Slo(SloMetric.TPOT, 0.05))


@pytest.mark.parametrize(
    "text",
    [
        "ttft=200ms,tpot=50ms",
        "ttft:200 tpot:50",
        " ttft = 0.2s , tpot : 50000us ",
        "TTFT=200,TPOT=50 ms",
        "ttft=200 ms tpot=50 ms",
        "ttft=2e-1s,tpot=50000µs",
    ],
)
def test_forms_of_the_same_bounds(text: str) -> None:
    assert parse_slos(text) == SOME


def test_every_metric_and_unit() -> None:
    slos = parse_slos("e2e=2m,itl=.5s,gap=150ms,ttft=900us,tpot=7")
    assert [slo.metric.value for slo in slos] == ["e2e", "itl", "gap", "ttft", "tpot"]
    assert [slo.bound_s for slo in slos] == [120, 0.5, 0.15, 0.0009, 0.007]
    assert parse_slos("e2el:5000") == (Slo(SloMetric.E2E, 5.0),)


@pytest.mark.parametrize(
    ("text", "named", "remedy"),
    [
        ("", "empty", "ttft=200ms"),
        ("  ", "empty", "ttft=200ms"),
        ("ttft=200ms,", "empty", "ttft=200ms"),
        ("ttft=200ms,,tpot=50ms", "empty", "ttft=200ms"),
        ("ttft", "`ttft`", "metric=bound"),
        ("ttft=1=2", "`ttft=1=2`", "metric=bound"),
        ("ttft=", "`ttft=`", "200ms"),
        ("ttft=fast", "`ttft=fast`", "200ms"),
        ("ttft=nan", "`ttft=nan`", "200ms"),
        ("ttft=inf", "`ttft=inf`", "200ms"),
        ("ttft=1e999s", "`ttft=1e999s`", "above zero"),
        ("ttft=0", "`ttft=0`", "above zero"),
        ("ttft=1e-999s", "`ttft=1e-999s`", "above zero"),
        ("tpot=50ms,ttft=-5ms", "`ttft=-5ms`", "above zero"),
        ("ttft=5h", "unit `h`", "us, ms, s or m"),
        ("ttft=1s,ttft=2s", "`ttft=2s`", "one bound per metric"),
        ("e2e=1s,e2el=2s", "`e2el=2s`", "one bound per metric"),
        ("tptf=1s", "`tptf`", "ttft, tpot, itl, gap, e2e"),
        ("tfft=1s", "`tfft`", "did you mean `ttft`"),
        ("=1s", "unknown metric", "ttft, tpot, itl, gap, e2e"),
    ],
)
def test_bad_text_is_one_clear_line(text: str, named: str, remedy: str) -> None:
    with pytest.raises(BatonError) as caught:
        parse_slos(text)
    message = str(caught.value)
    assert "\n" not in message
    assert named in message
    assert remedy in message


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=30))
def test_any_text_parses_or_raises_our_error(text: str) -> None:
    try:
        slos = parse_slos(text)
    except BatonError:
        return
    assert all(slo.bound_s > 0 for slo in slos)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(SloMetric), st.floats(min_value=1e-9, max_value=1e9), min_size=1, max_size=5
    )
)
def test_format_is_read_back_exactly(bounds: dict[SloMetric, float]) -> None:
    slos = tuple(Slo(metric, bound_s) for metric, bound_s in bounds.items())
    assert parse_slos(format_slos(slos)) == slos


@settings(deadline=None, max_examples=60)
@given(st.integers(min_value=1, max_value=10**7))
def test_whole_milliseconds_survive_the_result_file(bound_ms: int) -> None:
    slos = parse_slos(f"gap={bound_ms}ms")
    assert slos_to_ms(slos) == {"gap": bound_ms}
    assert slos_from_ms(slos_to_ms(slos)) == slos


def test_format_is_short() -> None:
    assert format_slos(parse_slos("ttft=200,e2e=5s,gap=20us")) == "ttft=200ms,e2e=5s,gap=20us"


def verdict(text: str, *args: object, **kwargs: object) -> tuple[bool, ...]:
    record = answer(*args, **kwargs)  # type: ignore[arg-type]
    return evaluate(parse_slos(text), record.status, derive(record))


def test_a_bound_is_met_at_equality_and_broken_above() -> None:
    # ttft 0.5, gaps 0.25 and 1.0, end 1.75, so tpot 0.625, mean gap 0.625
    chunks = [0.5, 0.75, 1.75]
    assert all(verdict("ttft=500ms,tpot=625ms,itl=625ms,gap=1s,e2e=1750ms", 0.0, chunks))
    for tight in ("ttft=499ms", "tpot=624ms", "itl=624ms", "gap=999ms", "e2e=1749ms"):
        assert verdict(tight, 0.0, chunks) == (False,), tight


def test_one_token_meets_what_does_not_exist() -> None:
    assert verdict("tpot=1us,itl=1us,gap=1us,ttft=1s,e2e=1us", 0.0, [0.5]) == (True, True, True, True, False)


@pytest.mark.parametrize("metric", SloMetric, ids=lambda metric: metric.value)
@pytest.mark.parametrize("tokens", [None, 0, 1, 5])
def test_an_answer_without_a_token_meets_no_bound(metric: SloMetric, tokens: int | None) -> None:
    """However soon it ended, and whatever the server says it generated: nobody could read anything."""
    assert verdict(f"{metric.value}=1m", 0.0, [], end_s=0.1, tokens=tokens) == (False,)
    assert verdict(f"{metric.value}=1m", 0.0, [0.1], end_s=0.1, tokens=tokens) == (True,)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_a_failed_request_meets_nothing(status: Status) -> None:
    assert verdict("ttft=1m,e2e=1m,gap=1m", 0.0, [0.1, 0.2], status=status) == (False, False, False)
    assert not is_good(status, ())


def test_good_means_all_bounds() -> None:
    assert is_good(Status.OK, (True, True))
    assert not is_good(Status.OK, (True, False))
    assert is_good(Status.OK, ())


def test_a_skipped_request_has_no_times() -> None:
    latency = derive(skipped(1.0))
    assert latency.output_len == 0
    times = (latency.ttft_s, latency.tpot_s, latency.gap_s, latency.itl_s, latency.e2e_s, latency.send_lag_s)
    assert times == (None,) * 6
