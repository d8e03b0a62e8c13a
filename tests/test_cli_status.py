"""`baton status`: what a running cluster tells, as a person or a program reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster import cli
from cluster.client import ClientError
from cluster.ids import RequestId
from cluster.readable import duration, percent, plural
from cluster.request import LifecycleEvent
from cluster.wire.messages import Role, WorkerLoad
from router.conductor_io import Ended, Lifecycle
from router.delivery import ClusterSnapshot, RequestSummary
from router.page_feed import PageFeed
from router.page_picture import picture
from tests.support.scripted_cluster import worker
from tests.support.web_server import WebServer

SUMMARY = RequestSummary(
    cached_tokens=0, attempts=1, prefill_worker=None, decode_worker=None,
    queue_s=0.1, prefill_s=0.2, kv_transfer_s=0.1, decode_s=1.9, ttft_s=3.0,
)  # fmt: skip


def cluster_picture() -> dict[str, Any]:
    """As the router tells it: one request that was too late, a pair of workers."""
    feed = PageFeed()
    for event, number in ((LifecycleEvent.ARRIVED, 9), (LifecycleEvent.FINISHED, 21)):
        feed.observe(Lifecycle(RequestId("r"), event, 5.0, num_tokens=number))
    feed.observe(Ended(RequestId("r"), SUMMARY))
    workers = (
        worker(
            "decode-0", Role.DECODE, epoch=2, load=WorkerLoad(running=3, blocks_used=5, decode_step_s=0.011)
        ),
        worker("worker-7", Role.DECODE),
        worker("prefill-0", Role.PREFILL, load=WorkerLoad(waiting=1, queued_prefill_tokens=700)),
    )
    return picture(feed, ClusterSnapshot("ready", 4, workers, {}), "smol", "2026.11", 60.0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments, terminal_width=200, env={"COLUMNS": "160"})


def test_status_shows_the_cluster() -> None:
    with WebServer() as server:
        server.answers["/page/picture"] = (200, json.dumps(cluster_picture()).encode())
        result = run("status", "--url", server.url)
    assert result.exit_code == 0, result.output
    for text in (
        "Baton 2026.11  smol  ready",
        "0 in flight, 4 queued",
        "1 finished, 0 failed, 0.0 % met both targets",
        "decode-0 ",
        "worker-7 (decode)",
        "5 held, 0 cached, 0 free",
        "11 ms per step",
        "1 request, 700 tokens",
    ):
        assert text in result.output, result.output
    [ttft] = [line.split() for line in result.output.splitlines() if line.startswith("TTFT")]
    assert ttft[-2:] == ["2.00", "s"]  # the target


def test_status_as_json_is_the_picture() -> None:
    with WebServer() as server:
        server.answers["/page/picture"] = (200, json.dumps(cluster_picture()).encode())
        result = run("status", "--json", "--url", server.url)
    assert json.loads(result.output) == cluster_picture()


def test_status_watches_until_the_stream_ends() -> None:
    whole = cluster_picture()
    later = {"now": 61.0, "cluster": whole["cluster"] | {"state": "draining"}}
    events = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in (whole, later))
    with WebServer() as server:
        server.answers["/page/events"] = (200, events)
        result = run("status", "--watch", "--url", server.url)
        as_json = run("status", "--watch", "--json", "--url", server.url)
    assert isinstance(result.exception, ClientError), result.output
    assert "has ended the stream" in str(result.exception)
    assert "draining" in result.output
    assert result.output.count("decode-0") == 2  # no terminal: a table per event
    first, second = map(json.loads, as_json.output.splitlines())
    assert first == whole
    assert second == whole | later


def test_status_of_a_public_address_says_where_to_ask() -> None:
    with WebServer() as server, pytest.raises(ClientError, match="admin address"):
        cli.app(["status", "--url", server.url], standalone_mode=False)


def test_status_without_a_server_says_how_to_start_one() -> None:
    with pytest.raises(
        ClientError, match=r"no server at http://127\.0\.0\.1:9: Connection refused; .*`baton serve`"
    ):
        cli.app(["status", "--url", "http://127.0.0.1:9"], standalone_mode=False)


@pytest.mark.parametrize(
    "url",
    ["foo", "localhost:8000", "http://", "ftp://127.0.0.1", "http://[::1", "http://a:99999"],
)
@pytest.mark.parametrize("options", [[], ["--watch"]])
def test_what_is_no_address_is_said_in_one_sentence(url: str, options: list[str]) -> None:
    with pytest.raises(ClientError, match=r"is no server's address: write it like http://127\.0\.0\.1:8000"):
        cli.app(["status", "--url", url, *options], standalone_mode=False)


def test_numbers_are_readable() -> None:
    seconds = [0.0042, 0.0842, 0.9996, 1.2349, 12.34, 300, None]
    assert [duration(value) for value in seconds] == [
        *("4.2 ms", "84 ms", "1.00 s", "1.23 s", "12.3 s", "300 s", "–"),
    ]
    assert [percent(value) for value in (1, 0.9999, 0.984, 0, None)] == [
        "100 %",
        "99.9 %",
        "98.4 %",
        "0.0 %",
        "–",
    ]
    assert [plural(number, "token") for number in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
