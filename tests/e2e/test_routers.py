"""`baton serve --routers 2` as a user runs it: one port, one limit per key, and no router takes the other's
streams with it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.plain_http import plain_client
from tests.support.processes import processes_of_run, wait_gone
from tests.support.served import Served
from tests.support.tiny_model import write_tiny_model

pytestmark = [pytest.mark.timeout(120)]

LIMIT = 12
KEYS = {"sk-few": f"name=few requests-per-min={LIMIT}", "sk-free": "name=free"}
LONG = {"prompt": "A long story", "max_tokens": 600, "temperature": 1, "seed": 5, "ignore_eos": True}


class Routers:
    """The two of one server, by number, each at its admin port."""

    def __init__(self, served: Served, admin_port: int) -> None:
        self.served = served
        self._ports = (admin_port, admin_port + 1)

    def get(self, number: int, path: str) -> httpx.Response | None:
        """None where it does not listen."""
        try:
            with plain_client(base_url=f"http://127.0.0.1:{self._ports[number]}", timeout=20) as client:
                return client.get(path)
        except httpx.TransportError:
            return None

    def cluster(self, number: int) -> dict[str, Any]:
        response = self.get(number, "/cluster")
        return {} if response is None else response.json()

    def is_ready(self, number: int) -> bool:
        response = self.get(number, "/ready")
        return response is not None and response.status_code == 200

    def metric(self, number: int, name: str, **labels: str) -> float:
        page = self.get(number, "/metrics")
        assert page is not None
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = (line for line in page.text.splitlines() if line.split("{")[0].split(" ")[0] == name)
        return sum(float(line.split()[-1]) for line in lines if all(label in line for label in wanted))

    def num_served(self, number: int) -> float:
        return self.metric(number, "baton_http_responses_total", route="/v1/completions", status="200")


@dataclass(frozen=True)
class Told:
    """One answer as its client saw it. `text` None: the connection broke."""

    status: int
    text: str | None


def ask(port: int, key: str, **fields: Any) -> Told:
    """Streamed, over a connection of its own, so either router may get it."""
    text, status, is_whole = "", 0, False
    try:
        with (
            plain_client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
            client.stream(
                "POST",
                "/v1/completions",
                json={"stream": True, **fields},
                headers={"authorization": f"Bearer {key}"},
            ) as response,
        ):
            status = response.status_code
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                is_whole = is_whole or line == "data: [DONE]"
    except httpx.TransportError:
        return Told(status, None)
    return Told(status, text if is_whole or status != 200 else None)


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[Routers]:
    keys = tmp_path / "keys"
    lines = (f"sha256:{sha256(key.encode()).hexdigest()} {rest}" for key, rest in KEYS.items())
    keys.write_text("\n".join(lines))
    os.chmod(keys, 0o600)
    model = write_tiny_model(tmp_path / "tiny")
    settings = ("--launcher", "local", "--routers", "2", "--model", str(model), "--api-keys-file", str(keys))
    pools = ("--prefill-kv", "16MiB", "--decode-kv", "64MiB")
    served = Served(tmp_path, *settings, *pools, "--log-dir", str(tmp_path / "logs"))
    routers = Routers(served, served.port + 1)
    try:
        served.wait("both ready", 90, lambda _: routers.is_ready(0) and routers.is_ready(1))
        yield routers
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait(10)


def test_one_limit_one_port_and_a_router_that_dies(routers: Routers) -> None:
    served = routers.served
    pids = [routers.cluster(number)["router_pid"] for number in (0, 1)]
    assert len({*pids}) == 2

    began = time.monotonic()
    statuses = [ask(served.port, "sk-few", prompt="Hi", max_tokens=2).status for _ in range(40)]
    most = LIMIT * (1 + (time.monotonic() - began) / 60 + 0.05 * 2)
    assert set(statuses) == {200, 429}
    assert all(routers.num_served(number) > 0 for number in (0, 1)), "clients reach both"
    num_losses = sum(routers.metric(number, "baton_shared_state_losses_total") for number in (0, 1))
    if num_losses == 0:  # else a busy machine let Redis answer late
        assert LIMIT <= statuses.count(200) <= most + 1

    expected = ask(served.port, "sk-free", **LONG)
    assert expected.text
    ended = threading.Event()

    answers: list[Told] = []

    def go_on() -> None:
        while not ended.is_set():
            answers.append(ask(served.port, "sk-free", **LONG))

    victim, survivor = 0, 1
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(go_on) for _ in range(8)]
        try:
            for _ in range(3):  # all its streams may have ended a moment before it dies
                served.wait(
                    "streams at both",
                    20,
                    lambda _: all(routers.cluster(number).get("in_flight", 0) >= 2 for number in (0, 1)),
                )
                pids.append(routers.cluster(victim)["router_pid"])
                os.kill(pids[-1], signal.SIGKILL)
                served.wait(
                    "the router again",
                    40,
                    lambda _: routers.is_ready(victim) and routers.cluster(victim)["router_pid"] not in pids,
                )
                served.wait("streams at both again", 20, lambda _: routers.num_served(victim) > 0)
                if any(answer.text is None for answer in answers):
                    break
        finally:
            ended.set()
        for one in asking:
            one.result(60)

    assert {answer.status for answer in answers} <= {0, 200}, (
        "0: broken before an answer; nobody is sent away"
    )
    whole = [answer for answer in answers if answer.text is not None]
    assert len(whole) < len(answers), "the test needs a stream that the dead router had"
    assert {answer.text for answer in whole} == {expected.text}
    assert routers.cluster(survivor)["router_pid"] == pids[survivor]
    assert routers.metric(survivor, "baton_request_total", outcome="length") > 0
    for outcome in ("error", "client_left", "worker_lost", "overloaded", "not_ready"):
        assert routers.metric(survivor, "baton_request_total", outcome=outcome) == 0, outcome

    of_run = processes_of_run(served.marker)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0, served.text()
    wait_gone(of_run, 10)
    assert processes_of_run(served.marker) == set()
