"""Faults against real processes: clients that leave, workers that die or hang, pools that overflow.

A tiny model with random weights keeps steps short; everything else is what serves.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.chaos.streams import Answer, read_stream
from tests.support.local_cluster import LocalCluster, local_cluster
from tests.support.plain_http import plain_async_client
from tests.support.sse import strict_json
from tests.support.tiny_model import write_tiny_model

pytestmark = [pytest.mark.timeout(240)]

POOLS = {"prefill_kv_bytes": 8 << 20, "decode_kv_bytes": 8 << 20, "block_size": 16, "recovery_wait_s": 1.0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[LocalCluster]:
    """One of each role, for tests that leave every role serving: who kills a worker starts its next epoch."""
    with local_cluster(tiny, **POOLS) as running:
        yield running


@pytest.fixture(scope="module")
def pairs(tiny: Path) -> Iterator[LocalCluster]:
    """Two of each role, for tests that take one and give it back. Attempts that fail are few, waits long, and
    a worker that is asked to leave hands over what it has after a moment."""
    settings = POOLS | {"max_attempts": 3, "recovery_wait_s": 60.0, "drain_grace_s": 0.05}
    with local_cluster(tiny, prefill=2, decode=2, **settings) as running:
        yield running


def body(num_prompt: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    rng = random.Random(num_prompt * 1000 + max_tokens)
    return {
        "prompt": [rng.randrange(256) for _ in range(num_prompt)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "timings": True,
    } | fields


def ids(answer: dict[str, Any]) -> list[int]:
    result: list[int] = answer["choices"][0]["token_ids"]
    return result


class BackgroundStream:
    """One streamed completion in a thread: its chunks as they came, or how it ended."""

    def __init__(self, cluster: LocalCluster, request: dict[str, Any]) -> None:
        self._cluster = cluster
        self._request = request | {"stream": True}
        self.token_ids: list[int] = []
        self.error: dict[str, Any] | None = None
        self.done_mark = False
        self.timings: dict[str, Any] = {}
        self.first = threading.Event()
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with (
            self._cluster.client() as client,
            client.stream("POST", "/v1/completions", json=self._request) as reply,
        ):
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    self.done_mark = True
                elif line.startswith("data: "):
                    event = strict_json(line.removeprefix("data: "))
                    self.error = event.get("error", self.error)
                    self.timings = event.get("timings") or self.timings
                    for choice in event.get("choices", []):
                        self.token_ids += choice.get("token_ids") or []
                        self.first.set()
        self.ended_s = time.monotonic()
        self.first.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream hangs"


@pytest.mark.parametrize("wait_for_token", [False, True], ids=["in-prefill", "in-decode"])
def test_b084_b085_client_that_leaves_frees_both_workers_within_a_second(
    cluster: LocalCluster, wait_for_token: bool
) -> None:
    for repeat in range(5):
        request = body(1500 + repeat, 500, stream=True)
        with cluster.client() as client, client.stream("POST", "/v1/completions", json=request) as reply:
            if wait_for_token:
                next(line for line in reply.iter_lines() if line)
        assert cluster.wait_quiet(timeout_s=3.0) < 1.5  # a second, and a heartbeat to tell of it


def test_b082_prefill_worker_killed_in_mid_prefill(cluster: LocalCluster) -> None:
    epoch = cluster.worker("prefill-0")["epoch"]
    stream = BackgroundStream(cluster, body(1800, 20))
    time.sleep(0.02)  # somewhere within its prefill
    killed_s = time.monotonic()
    cluster.kill("prefill-0")
    stream.join(20)
    expected = ids(cluster.complete(**body(1800, 20)))
    assert stream.done_mark
    assert stream.error is None
    assert stream.token_ids == expected
    assert stream.ended_s - killed_s < 10
    cluster.wait_quiet()
    cluster.restart("prefill-0")
    back(cluster, "prefill-0")
    assert cluster.worker("prefill-0")["epoch"] == epoch + 1
    assert ids(cluster.complete(**body(1801, 4))) is not None
    cluster.wait_quiet()


def test_b032_only_decode_worker_killed_while_decoding(cluster: LocalCluster) -> None:
    stream = BackgroundStream(cluster, body(100, 1500))
    assert stream.first.wait(10)
    killed_s = time.monotonic()
    cluster.kill("decode-0")
    stream.join(10)
    assert stream.ended_s - killed_s < 2.5
    assert stream.error is not None
    assert stream.error["code"] == "worker_lost"
    assert stream.done_mark
    cluster.restart("decode-0")
    back(cluster, "decode-0")
    assert len(ids(cluster.complete(**body(100, 5)))) == 5
    cluster.wait_quiet()


def test_decode_worker_killed_and_another_goes_on_with_the_same_tokens(pairs: LocalCluster) -> None:
    requests = [body(60 + n, 1900, temperature=1.0, seed=n, repetition_penalty=1.1) for n in range(6)]
    expected = [ids(answer) for answer in pairs.complete_all(requests)]
    pairs.wait_quiet(20)
    streams = [BackgroundStream(pairs, request) for request in requests]
    for stream in streams:
        assert stream.first.wait(10)
    pairs.wait_for(lambda: busiest(pairs) is not None, 20, "a heartbeat that tells of the streams")
    killed = busiest(pairs) or "decode-0"
    pairs.kill(killed)
    try:
        for stream in streams:
            stream.join(60)
    finally:  # the tests after this one find both
        pairs.restart(killed)
        back(pairs, killed)
    assert [stream.error for stream in streams] == [None] * 6
    assert [stream.token_ids for stream in streams] == expected
    assert any(stream.timings["attempts"] > 1 for stream in streams), "nobody was on the dead worker"
    pairs.wait_quiet()


def busiest(cluster: LocalCluster) -> str | None:
    """The decode worker with the most streams, if any has one."""
    running = {name: cluster.worker(name).get("running", 0) for name in ("decode-0", "decode-1")}
    name = max(running, key=lambda name: running[name])
    return name if running[name] else None


VARIED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.1},
    {"temperature": 0.8, "seed": 6, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logprobs": 3},
    {"logprobs": 1, "min_tokens": 1200, "ignore_eos": False},
    {"temperature": 1.0, "seed": 7, "stop": ["@#$%&", "zzzzz"]},
    {"logit_bias": {"65": 5.0}, "top_k": 20, "temperature": 1.0, "seed": 8},
]


class Streams:
    """The same varied requests, streamed all at once; a run has a salt of its own, so all are prefilled."""

    num_runs = 0

    def __init__(self, cluster: LocalCluster) -> None:
        Streams.num_runs += 1
        self._cluster = cluster
        self._firsts = [threading.Event() for _ in VARIED]
        self._pool = ThreadPoolExecutor(len(VARIED))
        self._answers = [
            self._pool.submit(self._read, index, body(60 + index, 1900) | fields)
            for index, fields in enumerate(VARIED)
        ]

    def _read(self, index: int, request: dict[str, Any]) -> Answer:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
        request["cache_salt"] = f"run-{self.num_runs}"
        url = httpx.URL(self._cluster.url)
        assert url.port is not None
        return read_stream(url.host, url.port, "/v1/completions", request, self._firsts[index].set)

    def wait_decoding(self) -> None:
        """Every stream has brought a token."""
        for first in self._firsts:
            assert first.wait(60)

    def answers(self) -> list[Answer]:
        answers = [answer.result(200) for answer in self._answers]
        self._pool.shutdown()
        assert [answer.error for answer in answers] == [None] * len(VARIED)
        assert all(answer.is_complete for answer in answers)
        return answers


@pytest.fixture(scope="module")
def expected(pairs: LocalCluster) -> list[tuple[Any, ...]]:
    """What the undisturbed run gives."""
    answers = Streams(pairs).answers()
    assert {answer.attempts for answer in answers} == {1}
    return [answer.result() for answer in answers]


def assert_equal_and_moved(answers: list[Answer], expected: list[tuple[Any, ...]]) -> None:
    assert assert_equal(answers, expected), "nobody was on that worker"


def assert_equal(answers: list[Answer], expected: list[tuple[Any, ...]]) -> bool:
    """Whether a stream moved to another worker on the way."""
    assert [answer.result() for answer in answers] == expected
    return any(answer.attempts > 1 for answer in answers)


def until_one_moves(
    pairs: LocalCluster,
    expected: list[tuple[Any, ...]],
    hit: Callable[[str], None],
    mend: Callable[[str], None],
) -> None:
    """Hits the worker with the most streams; again if they were over already. All are equal each time."""
    for _ in range(6):
        pairs.wait_quiet(20)
        streams = Streams(pairs)
        streams.wait_decoding()
        pairs.wait_for(lambda: busiest(pairs) is not None, 20, "a heartbeat that tells of the streams")
        name = busiest(pairs) or "decode-0"
        hit(name)
        has_moved = assert_equal(streams.answers(), expected)
        mend(name)
        back(pairs, name)
        if has_moved:
            return
    raise AssertionError("nobody was on that worker")


def back(cluster: LocalCluster, name: str) -> None:
    cluster.wait_for(lambda: cluster.worker(name).get("state") == "ready", 60, f"{name} serves")


def test_hung_decode_worker_is_left_and_what_it_says_later_is_dropped(
    pairs: LocalCluster, expected: list[tuple[Any, ...]]
) -> None:
    def mend(name: str) -> None:
        pairs.wait_for(lambda: pairs.worker(name) == {}, 20, "the hung worker is given up")
        pairs.signal(name, signal.SIGCONT)

    until_one_moves(pairs, expected, lambda name: pairs.signal(name, signal.SIGSTOP), mend)
    assert pairs.get("/cluster")["stale_messages"]["epoch"] > 0
    assert pairs.metric("baton_router_stale_messages_total", reason="epoch") > 0
    pairs.wait_quiet(20)


def test_terminated_decode_worker_hands_over_what_it_cannot_finish(
    pairs: LocalCluster, expected: list[tuple[Any, ...]]
) -> None:
    def mend(name: str) -> None:
        assert pairs.processes[name].wait(30) == 0
        pairs.restart(name)

    until_one_moves(pairs, expected, lambda name: pairs.signal(name, signal.SIGTERM), mend)
    pairs.wait_quiet(20)


def test_both_decode_workers_die_and_every_stream_waits_for_a_successor(
    pairs: LocalCluster, expected: list[tuple[Any, ...]]
) -> None:
    streams = Streams(pairs)
    streams.wait_decoding()
    pairs.kill("decode-0")
    pairs.kill("decode-1")
    with pairs.client() as client:
        assert client.get("/ready").status_code == 503  # the truth, while what runs waits
    pairs.restart("decode-1")
    assert_equal_and_moved(streams.answers(), expected)
    pairs.restart("decode-0")
    back(pairs, "decode-0")
    pairs.wait_quiet(20)


def test_b130_hung_prefill_worker_is_given_up_and_fenced(cluster: LocalCluster) -> None:
    expected = ids(cluster.complete(**body(300, 12)))
    cluster.signal("prefill-0", signal.SIGSTOP)
    started_s = time.monotonic()
    assert ids(cluster.complete(**body(300, 12))) == expected
    assert time.monotonic() - started_s < 10
    cluster.signal("prefill-0", signal.SIGCONT)
    cluster.wait_for(lambda: cluster.worker("prefill-0").get("state") == "ready", 15, "the worker's return")
    assert ids(cluster.complete(**body(301, 3))) is not None
    cluster.wait_quiet()


def test_b060_request_that_can_never_fit(cluster: LocalCluster) -> None:
    tokens = cluster.worker("decode-0")["kv_blocks"]["total"] * 16
    with cluster.client() as client:
        too_long = client.post("/v1/completions", json=body(1900, 500))
        assert too_long.status_code == 400
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert tokens > 0
    assert len(ids(cluster.complete(**body(20, 3)))) == 3
    cluster.wait_quiet()


def test_a_thousand_requests_with_random_aborts_leave_nothing(cluster: LocalCluster) -> None:
    """b099: 30 % leave at random moments; afterwards no block is used and the books balance."""
    rng = random.Random(5)
    before = cluster.metric("baton_request_total")

    async def one(client: httpx.AsyncClient, index: int) -> str:
        request = body(rng.randrange(1, 64), rng.randrange(1, 40), stream=True, seed=index, temperature=1)
        leave_after_s = rng.random() * 0.3 if rng.random() < 0.3 else None
        try:
            async with (
                asyncio.timeout(leave_after_s),
                client.stream("POST", "/v1/completions", json=request) as reply,
            ):
                text = (await reply.aread()).decode()
        except TimeoutError:
            return "left"
        assert reply.status_code == 200, text
        assert text.endswith("data: [DONE]\n\n")
        assert '"error"' not in text, text
        return "done"

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=48)
        async with plain_async_client(base_url=cluster.url, timeout=120, limits=limits) as client:
            return list(await asyncio.gather(*(one(client, index) for index in range(1000))))

    outcomes = asyncio.run(run())
    assert outcomes.count("done") > 600
    assert outcomes.count("left") > 100
    cluster.wait_quiet()
    assert cluster.metric("baton_request_total") - before <= 1000
    assert cluster.metric("baton_requests_running") == 0
    for name in ("prefill-0", "decode-0"):
        blocks = cluster.worker(name)["kv_blocks"]
        assert blocks["used"] == 0
        assert blocks["cached"] + blocks["free"] == blocks["total"]
    assert len(ids(cluster.complete(**body(20, 3)))) == 3


def test_b132_termination_drains(tiny: Path) -> None:
    with local_cluster(tiny, **POOLS) as ending:
        stream = BackgroundStream(ending, body(50, 300))
        assert stream.first.wait(10)
        statuses = ending.processes.stop()
        stream.join(5)
    assert stream.error is None
    assert len(stream.token_ids) == 300
    assert statuses == {"router-0": 0, "prefill-0": 0, "decode-0": 0}
