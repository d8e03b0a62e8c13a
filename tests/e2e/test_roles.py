"""Roles that change under `baton serve --roles planned`: two workers of a live cluster swap theirs under
streams, and each of these goes on with the bits it would have had."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from bench.chaos.streams import Answer, build_bodies, read_stream
from tests.support.served import Served
from tests.support.tiny_model import write_tiny_model

pytestmark = [pytest.mark.timeout(300)]

BODIES = build_bodies(4, seed=11, max_prompt_words=40, max_tokens=120)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One prefill and two decode workers; what is left of a stream is handed over at once."""
    directory = tmp_path_factory.mktemp("roles")
    running = Served(
        directory,
        *("--model", str(write_tiny_model(directory / "tiny")), "--log-dir", str(directory / "logs")),
        *("--launcher", "local", "--roles", "planned", "--prefill", "1", "--decode", "2"),
        *("--prefill-kv", "16MiB", "--decode-kv", "16MiB", "--drain-grace-s", "0.05"),
        *("--threads-per-worker", "1", "--recovery-wait-s", "60"),
    )
    try:
        running.wait("ready", 120, lambda client: client.get("/ready").status_code == 200)
        running.wait("all", 60, lambda _: roles(running) == ["prefill", "decode", "decode"])
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(60)


def roles(served: Served) -> list[str]:
    """Of the workers that are ready, by name."""
    return [one["role"] for _, one in sorted(served.workers().items()) if one["state"] == "ready"]


def shift(served: Served, worker: str, role: str) -> httpx.Response:
    with served.client() as client:
        return client.post("/cluster/roles", json={"worker": worker, "role": role})


def test_workers_change_roles_under_streams_and_no_bit_changes(served: Served) -> None:
    expected = [read_stream("127.0.0.1", served.port, path, body).result() for path, body in BODIES]
    enough, answers = threading.Event(), [list[Answer]() for _ in BODIES]

    def ask(number: int) -> None:
        path, body = BODIES[number]
        while not enough.is_set():
            answers[number].append(read_stream("127.0.0.1", served.port, path, body))

    with ThreadPoolExecutor(len(BODIES)) as pool:
        loops = [pool.submit(ask, number) for number in range(len(BODIES))]
        try:
            answer = shift(served, "worker-1", "prefill")
            assert answer.status_code == 202, answer.text
            assert answer.json() == {"worker": "worker-1", "role": "prefill", "why": "asked for by hand"}
            served.wait("a prefill worker", 60, lambda _: roles(served) == ["prefill", "prefill", "decode"])
            refused = shift(served, "worker-2", "prefill")
            assert (refused.status_code, "the last decode worker" in refused.text) == (400, True)
            assert shift(served, "worker-0", "decode").status_code == 202
            served.wait("a decode worker", 60, lambda _: roles(served) == ["decode", "prefill", "decode"])
        finally:
            enough.set()
        for loop in loops:
            loop.result(60)
    for number, of_body in enumerate(answers):
        assert of_body
        assert [answer.error for answer in of_body if answer.error is not None] == []
        assert [answer.result() for answer in of_body] == [expected[number]] * len(of_body)


def test_what_has_happened_is_told(served: Served) -> None:
    """After the test above, in words, numbers and epochs."""
    told = " ".join(served.text().split())
    assert "worker-1 becomes a prefill worker: it drains and is started as epoch 2" in told
    assert "worker-0 serves as a decode worker (epoch 2)" in told
    with served.client() as client:
        cluster, metrics = client.get("/cluster").json(), client.get("/metrics").text
    assert cluster["role_shifts"] == {
        "planned": True,
        "under_way": None,
        "done": [
            {"from": "decode", "to": "prefill", "times": 1},
            {"from": "prefill", "to": "decode", "times": 1},
        ],
    }
    assert {one["id"]: one["epoch"] for one in cluster["workers"]} == {
        "worker-0": 2,
        "worker-1": 2,
        "worker-2": 1,
    }
    assert 'baton_role_shifts_total{from_role="decode",to_role="prefill"} 1.0' in metrics
    states = re.findall(r'baton_worker_state\{role="(\w+)",state="ready",worker="worker-1"\} 1', metrics)
    assert states == ["prefill"]


@pytest.mark.parametrize(
    ("headers", "body", "status", "says"),
    [
        (
            {"content-type": "text/plain"},
            b'{"worker": "worker-1", "role": "decode"}',
            415,
            "application/json",
        ),
        ({}, b'{"worker": "worker-7", "role": "decode"}', 400, "no worker `worker-7`"),
        ({}, b'{"worker": "worker-1", "role": "prefill"}', 400, "is a prefill worker already"),
        ({}, b'{"worker": "worker-1", "role": "router"}', 400, "$.role"),
        ({}, b'{"worker": "worker-1"}', 400, "`role`"),
        ({}, b"{", 400, "wish for a role"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(
    served: Served, headers: dict[str, str], body: bytes, status: int, says: str
) -> None:
    with served.client() as client:
        sent = {"content-type": "application/json"} | headers
        answer = client.post("/cluster/roles", content=body, headers=sent)
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text
