"""What is put for a request is taken once and in order, however the reader changes between its two ways."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.errors import WorkerLost
from cluster.ids import RequestId
from cluster.sampling import FinishReason, TokenOutput
from router.conductor_io import ClientFinished, Event
from router.delivery import Delivery, Failed, NewTokens
from router.live_stream import LiveStream
from tests.support.scripted_cluster import SUMMARY


def tokens(token_id: int, finish: FinishReason | None = None) -> NewTokens:
    return NewTokens((TokenOutput(token_id),), finish)


def make_stream(events: list[Event] | None = None) -> LiveStream:
    seen = [] if events is None else events
    return LiveStream(RequestId("r"), seen.append, lambda request: SUMMARY)


def put(stream: LiveStream, *deliveries: Delivery) -> None:
    for delivery in deliveries:
        stream.put(delivery)
    stream.hand_over()


async def test_iterating_waits_for_what_is_put() -> None:
    stream = make_stream()
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert not reading.done()
    put(stream, tokens(1), tokens(2))
    assert await reading == tokens(1)
    assert await anext(stream) == tokens(2)
    stream.end(SUMMARY)
    stream.hand_over()
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_pushed_at_once_and_what_waited_first() -> None:
    stream, taken = make_stream(), list[Delivery | None]()
    put(stream, tokens(1), tokens(2))
    stream.push_to(taken.append)
    assert taken == [tokens(1), tokens(2)]
    stream.put(tokens(3))
    assert len(taken) == 2  # the event that brought it is not over
    stream.hand_over()
    stream.end(SUMMARY)
    stream.hand_over()
    assert taken[2:] == [tokens(3), None]


async def test_any_changes_between_the_two_ways_lose_nothing() -> None:
    rng = random.Random(1)
    for _ in range(200):
        stream, taken = make_stream(), list[Delivery | None]()
        num_put = 0
        while num_put < 20:
            for _ in range(rng.randrange(3)):
                put(stream, tokens(num_put))
                num_put += 1
            if rng.random() < 0.5:
                stream.push_to(taken.append)
            else:
                stream.push_to(None)
                if len(taken) < num_put and rng.random() < 0.5:
                    taken.append(await anext(stream))
        stream.push_to(taken.append)
        assert taken == [tokens(number) for number in range(num_put)]


async def test_who_takes_may_stop_being_pushed_to() -> None:
    stream, taken = make_stream(), list[Delivery | None]()

    def take(delivery: Delivery | None) -> None:
        taken.append(delivery)
        stream.push_to(None)

    put(stream, tokens(1))
    stream.push_to(take)
    put(stream, tokens(2), tokens(3))
    assert taken == [tokens(1)]
    assert [await anext(stream), await anext(stream)] == [tokens(2), tokens(3)]


async def test_what_taking_brings_comes_after_it() -> None:
    taken: list[Delivery | None] = []
    events: list[Event] = []
    stream = make_stream(events)

    def take(delivery: Delivery | None) -> None:
        if delivery == tokens(1):
            stream.finish()  # a stop string matched: the conductor ends the request
            stream.end(SUMMARY)
            stream.hand_over()
            assert taken == []  # not within this call
        taken.append(delivery)

    stream.push_to(take)
    put(stream, tokens(1))
    assert events == [ClientFinished(RequestId("r"))]
    assert taken == [tokens(1), None]
    assert stream.summary() is SUMMARY


async def test_a_failure_is_kept() -> None:
    stream, taken = make_stream(), list[Delivery | None]()
    lost = WorkerLost("It was lost.")
    stream.push_to(taken.append)
    stream.put(Failed(lost))
    stream.end(SUMMARY)
    stream.hand_over()
    assert stream.failure is lost
    assert taken == [Failed(lost), None]
