"""The page's feed: lanes stay consistent and memory bounded whatever happens; figures are right."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import RequestId, WorkerId
from cluster.latency_targets import LatencyTargets
from cluster.request import LifecycleEvent
from router.conductor_io import Ended, Lifecycle
from router.delivery import ClusterSnapshot, RequestSummary
from router.lanes import MAX_SPANS, End, Stage
from router.page_feed import MAX_ENDED, MAX_LIVE, PageFeed
from router.page_picture import PictureDiffer, picture
from router.page_window import (
    NUM_SLICES,
    SLICE_S,
    LatencyWindow,
    Sample,
    bin_of,
    percentile,
    value_of,
)

E = LifecycleEvent
P, D = WorkerId("prefill-0"), WorkerId("decode-0")
SUMMARY = RequestSummary(
    cached_tokens=4, attempts=1, prefill_worker=P, decode_worker=D,
    queue_s=0.2, prefill_s=0.3, kv_transfer_s=0.1, decode_s=0.9, ttft_s=0.5,
)  # fmt: skip
NO_WORKERS = ClusterSnapshot("ready", 0, (), {})


def life(
    request: str, event: LifecycleEvent, at: float, worker: WorkerId | None = None, tokens: int = 0
) -> Lifecycle:
    return Lifecycle(RequestId(request), event, at, worker=worker, num_tokens=tokens)


def play(feed: PageFeed, request: str, start: float, *, tokens: int = 11) -> None:
    """One request on a pair, from arrival to its end 1.5 s later."""
    for event, after, worker, number in (
        (E.ARRIVED, 0.0, None, 7),
        (E.PLACED, 0.05, D, 0),
        (E.GRANTED, 0.1, D, 0),
        (E.PREFILL_SENT, 0.1, P, 0),
        (E.FIRST_TOKEN, 0.5, P, 0),
        (E.DECODE_STARTED, 0.6, D, 0),
        (E.LAST_TOKEN, 1.5, None, tokens),
        (E.FINISHED, 1.5, None, tokens),
    ):
        feed.observe(life(request, event, start + after, worker, number))
    feed.observe(Ended(RequestId(request), SUMMARY))


def spans(feed: PageFeed) -> list[tuple[str, float]]:
    [lane] = feed.lanes()
    return [(span.stage.value, round(span.at, 3)) for span in lane.spans]


def test_a_request_goes_through_its_stages() -> None:
    feed = PageFeed(look_up=lambda request: SUMMARY)
    play(feed, "a", 10.0)
    # The prefill began when its worker came to it, 0.2 s after arrival, not when it was sent there.
    assert spans(feed) == [("queue", 10.0), ("prefill", 10.2), ("transfer", 10.5), ("decode", 10.6)]
    [lane] = feed.lanes()
    assert (lane.prefill, lane.decode, lane.num_prompt_tokens) == (P, D, 7)
    assert (lane.end, lane.ended_at, lane.num_tokens) == (End.FINISHED, 11.5, 11)
    assert feed.counts.num_live == 0
    totals = feed.window.totals(11.5)
    assert totals.num_finished == totals.num_good == 1
    assert totals.ttft_s[50] == pytest.approx(0.5, rel=0.04)
    assert totals.tpot_s[99] == pytest.approx(0.1, rel=0.04)  # (0.1 + 0.9) / 10


def test_a_local_prefill_has_no_transfer() -> None:
    feed = PageFeed()
    feed.observe(life("a", E.ARRIVED, 1.0))
    feed.observe(life("a", E.PREFILL_SENT, 1.5, D))
    feed.observe(life("a", E.FIRST_TOKEN, 2.0, D))
    feed.observe(life("a", E.DECODE_STARTED, 2.0, D))
    assert spans(feed) == [("queue", 1.0), ("prefill", 1.5), ("decode", 2.0)]


def test_kv_that_is_there_before_the_first_token_stays_decoding() -> None:
    feed = PageFeed()
    feed.observe(life("a", E.ARRIVED, 1.0))
    feed.observe(life("a", E.PREFILL_SENT, 1.5, P))
    feed.observe(life("a", E.DECODE_STARTED, 2.0, D))
    feed.observe(life("a", E.FIRST_TOKEN, 2.1, P))
    assert spans(feed)[-1] == ("decode", 2.0)


def test_a_retry_queues_again_and_resumes_decoding() -> None:
    feed = PageFeed()
    feed.observe(life("a", E.ARRIVED, 1.0))
    for start in (1.0, 3.0):
        feed.observe(life("a", E.PREFILL_SENT, start + 0.5, P))
        feed.observe(life("a", E.DECODE_STARTED, start + 1, D))
        feed.observe(life("a", E.RETRIED, start + 2))
    assert spans(feed) == [
        ("queue", 1.0), ("prefill", 1.5), ("decode", 2.0),
        ("queue", 3.0), ("prefill", 3.5), ("decode", 4.0), ("queue", 5.0),
    ]  # fmt: skip
    [lane] = feed.lanes()
    assert lane.num_attempts == 3
    assert feed.counts.num_retried == 2


def test_what_began_before_anybody_watched_is_left_out() -> None:
    feed = PageFeed()
    feed.observe(life("early", E.FIRST_TOKEN, 1.0, P))
    feed.observe(Ended(RequestId("early"), SUMMARY))
    assert list(feed.lanes()) == []
    assert feed.counts.num_ended == 0


def test_requests_beyond_the_lanes_still_count() -> None:
    feed = PageFeed()
    for number in range(MAX_LIVE + 5):
        feed.observe(life(f"r{number}", E.ARRIVED, 1.0))
    assert feed.num_without_lane == 5
    feed.observe(life(f"r{MAX_LIVE}", E.FINISHED, 2.0, tokens=3))
    feed.observe(Ended(RequestId(f"r{MAX_LIVE}"), SUMMARY))
    assert feed.num_without_lane == 4
    assert feed.window.totals(2.0).num_finished == 1


EVENTS = st.sampled_from([event for event in E if event is not E.ARRIVED])
STEPS = st.lists(
    st.tuples(st.integers(0, 5), EVENTS, st.floats(0, 2), st.booleans()), min_size=1, max_size=120
)


@given(STEPS)
def test_lanes_stay_consistent_whatever_comes(steps: list[tuple[int, LifecycleEvent, float, bool]]) -> None:
    """Any order of events, repeated and missing ones included."""
    feed = PageFeed(look_up=lambda request: SUMMARY)
    now, live = 0.0, set()
    for number, event, after, ends in steps:
        now += after
        name = f"r{number}"
        if name not in live:
            live.add(name)
            feed.observe(life(name, E.ARRIVED, now, tokens=9))
        feed.observe(life(name, event, now, D, tokens=3))
        if ends:
            feed.observe(life(name, E.FINISHED, now, tokens=3))
            feed.observe(Ended(RequestId(name), SUMMARY))
            live.remove(name)
        for lane in feed.lanes():
            stages = [span.stage for span in lane.spans]
            times = [span.at for span in lane.spans]
            assert stages[0] is Stage.QUEUE
            assert all(before is not after_ for before, after_ in itertools.pairwise(stages))
            assert times == sorted(times)
            assert times[-1] <= now
            assert len(stages) <= MAX_SPANS
            assert (lane.end is None) == (lane.ended_at is None)
            assert lane.ended_at is None or times[-1] <= lane.ended_at <= now
    assert feed.counts.num_live == len(live)
    assert {lane.request for lane in feed.lanes() if lane.end is None} == live


@given(st.lists(st.integers(0, 400), min_size=1, max_size=30))
def test_a_viewer_that_takes_every_change_has_the_whole(bursts: list[int]) -> None:
    """Lanes sent since the last number, put together by id, are what a new viewer gets."""
    feed, differ, copy = PageFeed(), PictureDiffer(), {}
    now, number = 0.0, 0
    for burst in bursts:
        for _ in range(burst % 7):
            now, number = now + 0.3, number + 1
            if burst % 3:
                play(feed, f"r{number}", now)
            else:
                feed.observe(life(f"r{number}", E.ARRIVED, now))
        part = differ.update(picture(feed, NO_WORKERS, "m", "1", now, differ.since))
        copy.update({lane["id"]: lane for lane in part.get("lanes", ())})
    whole = picture(feed, NO_WORKERS, "m", "1", now)
    assert [copy[lane["id"]] for lane in whole["lanes"]] == whole["lanes"]
    assert differ.update(picture(feed, NO_WORKERS, "m", "1", now, differ.since)) == {}


def test_memory_is_bounded_by_constants() -> None:
    feed = PageFeed()
    for number in range(3000):
        play(feed, f"r{number}", number * 0.5)
    assert len(list(feed.lanes())) == MAX_ENDED
    assert len(feed.window._slices) <= NUM_SLICES
    whole = picture(feed, NO_WORKERS, "m", "1", 1500.0)
    assert len(whole["series"]["points"]) == NUM_SLICES
    assert sum(point[0] for point in whole["series"]["points"]) == whole["window"]["finished"]


def test_a_picture_holds_no_text_of_anybody() -> None:
    """Only ids of ours, names of workers, stages, numbers."""
    feed = PageFeed()
    play(feed, "chatcmpl-1", 1.0)
    whole = picture(feed, NO_WORKERS, "m", "1", 2.0)
    [lane] = whole["lanes"]
    assert set(lane) == {
        *("id", "prompt", "cached", "tokens", "attempts", "prefill", "decode"),
        *("kv_bytes", "spans", "end", "ended_at"),
    }
    assert all(isinstance(lane[name], int) for name in ("prompt", "cached", "tokens"))


# ---- the window ----------------------------------------------------------------------------------

SECONDS = st.floats(1e-4, 900)


@given(SECONDS, SECONDS)
def test_bins_keep_order_and_value(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert bin_of(low) <= bin_of(high)
    assert value_of(bin_of(low)) == pytest.approx(low, rel=0.041)


@given(st.lists(SECONDS, min_size=1, max_size=60), st.sampled_from([1, 50, 95, 99, 100]))
def test_percentiles_are_nearest_rank_within_a_bin(values: list[float], percent: int) -> None:
    window = LatencyWindow(LatencyTargets())
    for value in values:
        window.record(Sample(End.FINISHED, 5, value, None), 1.0)
    exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
    assert percentile(window._totals.ttft, percent) == pytest.approx(exact, rel=0.041)


SAMPLES = st.builds(
    Sample,
    end=st.sampled_from(End),
    num_tokens=st.integers(0, 50),
    ttft_s=st.none() | st.floats(0, 5),
    tpot_s=st.none() | st.floats(0, 0.3),
)


@given(st.lists(st.tuples(SAMPLES, st.floats(0, 40)), max_size=80))
def test_totals_equal_a_fresh_count_of_what_is_young_enough(pairs: list[tuple[Sample, float]]) -> None:
    window, now, kept = LatencyWindow(LatencyTargets()), 0.0, []
    for sample, after in pairs:
        now += after
        window.record(sample, now)
        kept.append((sample, now))
    oldest = int(now // SLICE_S) - NUM_SLICES + 1
    young = [sample for sample, at in kept if int(at // SLICE_S) >= oldest]
    fresh = LatencyWindow(LatencyTargets())
    for sample in young:
        fresh.record(sample, now)
    assert replace(window.totals(now), seconds=0) == replace(fresh.totals(now), seconds=0)
    judged = [sample for sample in young if sample.end is not End.LEFT]
    good = [
        sample
        for sample in judged
        if sample.end is End.FINISHED
        and sample.ttft_s is not None
        and sample.ttft_s <= 2
        and (sample.tpot_s or 0) <= 0.1
    ]
    assert window.totals(now).attainment == (len(good) / len(judged) if judged else None)
    assert sum(point.num_ended for point in window.series(now)) == len(young)


def test_a_window_empties_with_time() -> None:
    window = LatencyWindow(LatencyTargets())
    window.record(Sample(End.FINISHED, 5, 1.0, 0.05), 3.0)
    assert window.totals(3.0 + (NUM_SLICES - 1) * SLICE_S).num_finished == 1
    late = window.totals(3.0 + NUM_SLICES * SLICE_S)
    assert (late.num_finished, late.attainment, late.ttft_s[50]) == (0, None, None)
