from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.client.chats import Chats
from bench.load.client.frames import FrameReader, Job, Jobs, Stop, encode_frame
from bench.load.client.jobs import MAX_BATCH_BYTES, batches, share_slots, split_plan
from cluster.errors import ProtocolError
from tests.support.load_client import plan, request, turn


def test_requests_are_dealt_in_turn_so_that_rates_stay_smooth() -> None:
    shares = split_plan(plan([request(index, index / 10) for index in range(7)]), 3)
    assert [[job.index for job in share] for share in shares] == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_chat_stays_in_one_process() -> None:
    requests = [
        turn(0, 5, 0, "a"),
        turn(1, 6, 0, "b"),
        turn(2, 5, 1, "c"),
        turn(3, 6, 1, "d"),
        turn(4, 5, 2, "e"),
    ]
    shares = split_plan(plan(requests, is_chat=True), 2)
    assert [[job.index for job in share] for share in shares] == [[0, 2, 4], [1, 3]]
    assert [job.has_next_turn for job in shares[0]] == [True, True, False]


def test_a_body_is_the_shared_one_with_the_requests_own_on_top() -> None:
    offered = plan([request(0, max_tokens=9)], shared={"model": "m", "max_tokens": 1, "seed": 3})
    [[job]] = split_plan(offered, 1)
    body = orjson.loads(Chats().body(job))
    assert body == {"model": "m", "max_tokens": 9, "seed": 3, "prompt": [1, 2, 3], "mock": {"label": "0"}}


def test_each_turn_carries_all_messages_and_answers_before_it() -> None:
    requests = [turn(0, 1, 0, "one"), turn(1, 1, 1, "two"), turn(2, 1, 2, 'th"ree')]
    [jobs] = split_plan(plan(requests, is_chat=True), 1)
    chats = Chats()
    sent = []
    for job, answer in zip(jobs, ["first ü", "", "third"], strict=True):
        sent.append(orjson.loads(chats.body(job))["messages"])
        chats.answered(job, answer)
    user = [{"role": "user", "content": text} for text in ("one", "two", 'th"ree')]
    assistant = [{"role": "assistant", "content": text} for text in ("first ü", "")]
    assert sent == [
        [user[0]],
        [user[0], assistant[0], user[1]],
        [user[0], assistant[0], user[1], assistant[1], user[2]],
    ]


def test_a_body_of_messages_alone_is_json() -> None:
    job = Job(0, 0.0, b"{}", b'{"role":"user","content":"x"}', session=1)
    assert orjson.loads(Chats().body(job)) == {"messages": [{"role": "user", "content": "x"}]}


@given(st.integers(1, 50), st.integers(1, 8))
def test_slots_are_shared_evenly(num_slots: int, num_processes: int) -> None:
    shares = share_slots(num_slots, num_processes)
    assert sum(share or 0 for share in shares) == num_slots
    assert max(share or 0 for share in shares) - min(share or 0 for share in shares) <= 1


def test_open_loop_has_no_slots() -> None:
    assert share_slots(None, 2) == [None, None]


def test_batches_stay_small_and_lose_nothing() -> None:
    jobs = [Job(index, 0.0, b"x" * (MAX_BATCH_BYTES // 2)) for index in range(5)]
    cut = list(batches(jobs))
    assert [len(batch) for batch in cut] == [2, 2, 1]
    assert [job for batch in cut for job in batch] == jobs
    assert list(batches([])) == []


@given(st.lists(st.integers(min_value=0), max_size=20))
def test_frames_do_not_depend_on_cuts(cuts: list[int]) -> None:
    frames = [encode_frame(Stop()), encode_frame(Jobs([Job(0, 1.0, b"{}")])), encode_frame(Stop())]
    data = b"".join(frames)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    reader = FrameReader()
    read = [frame for start, end in pairwise(edges) for frame in reader.feed(data[start:end])]
    assert read == [frame[4:] for frame in frames]


def test_a_frame_beyond_all_measure_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a frame of 4294967295 bytes"):
        FrameReader().feed(b"\xff\xff\xff\xff")
