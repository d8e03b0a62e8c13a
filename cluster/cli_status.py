"""`baton status`: asks a running cluster how it is, and prints it, once or as it changes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.client import ClientError, get_json, stream_pictures
from cluster.readable import duration, percent, plural

PRIVATE = (
    "{url} answers for the API only: ask the cluster's admin address with --url "
    "(`--admin-host`, `--admin-port` of `baton serve`; by default the next port of its own machine)"
)
_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "lost": "red", "stuck": "red"}


def show_status(url: str, *, as_json: bool, watch: bool, console: Console | None = None) -> None:
    """
    Raises:
        ClientError: there is no server, or it does not show its cluster at this address.
    """
    console = console or Console()
    try:
        if watch:
            _watch(url, console, as_json=as_json)
        elif as_json:
            typer.echo(json.dumps(get_json(url, "/page/picture"), indent=2))
        else:
            console.print(render(get_json(url, "/page/picture")))
    except ClientError as error:
        if error.status != 404:
            raise
        raise ClientError(PRIVATE.format(url=url)) from error


def _watch(url: str, console: Console, *, as_json: bool) -> None:
    """With each event of the page's stream, until Ctrl-C: redrawn on a terminal, else one after the other.

    Raises:
        ClientError: the server has ended the stream.
    """
    picture: dict[str, Any] = {}
    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not console.is_terminal:
            for part in stream_pictures(url):
                picture |= part
                if as_json:
                    print(json.dumps(picture), file=console.file, flush=True)
                else:
                    console.print(render(picture))
                    console.file.flush()
        else:
            with Live(console=console, auto_refresh=False) as live:
                for part in stream_pictures(url):
                    picture |= part
                    live.update(render(picture), refresh=True)
        raise ClientError(f"{url} has ended the stream: the server stops")


def render(picture: dict[str, Any]) -> RenderableType:
    """A picture as the page gets it (`router.page_picture`), for a terminal."""
    about, cluster, window = picture["about"], picture["cluster"], picture["window"]
    head = Text.assemble(
        ("Baton ", "bold"), f"{about['version']}  {about['model']}  ",
        (cluster["state"].replace("_", " "), _STATE_STYLES.get(cluster["state"], "yellow")),
    )  # fmt: skip
    flow = (
        f"{cluster['in_flight']} in flight, {cluster['queued']} queued · "
        f"{window['requests_per_s']:.1f} requests/s · {window['tokens_per_s']:.0f} tokens/s · "
        f"last {duration(window['seconds'])}: {window['finished']} finished, {window['failed']} failed, "
        f"{percent(window['attainment'])} met both targets"
    )
    return Group(head, Text(flow, "dim"), _latency(about, window), _workers(picture["workers"]))


def _latency(about: dict[str, Any], window: dict[str, Any]) -> Table:
    table = Table("", "p50", "p95", "p99", "target", box=None, pad_edge=False)
    for name in ("ttft", "tpot"):
        target = about["slo"][f"{name}_s"]
        row = [name.upper()]
        for key in ("p50", "p95", "p99"):
            value = window[f"{name}_s"][key]
            is_over = value is not None and value > target
            row.append(f"[red]{duration(value)}[/]" if is_over else duration(value))
        table.add_row(*row, duration(target))
    return table


def _workers(workers: list[dict[str, Any]]) -> RenderableType:
    if not workers:
        return Text("no worker is here")
    table = Table("worker", "state", "epoch", "batch", "waiting", "KV blocks", "speed")
    for worker in workers:
        kv = worker["kv"]
        waiting = plural(worker["waiting"], "request")
        if worker["queued_prefill_tokens"]:
            waiting += f", {worker['queued_prefill_tokens']} tokens"
        says_role = worker["id"].startswith(worker["role"])
        table.add_row(
            worker["id"] if says_role else f"{worker['id']} ({worker['role']})",
            f"[{_STATE_STYLES.get(worker['state'], 'yellow')}]{worker['state']}[/]",
            str(worker["epoch"]),
            f"{worker['running']} of {worker['max_num_seqs']}",
            waiting,
            f"{kv['used']} held, {kv['cached']} cached, {kv['free']} free",
            _speed(worker),
        )
    return table


def _speed(worker: dict[str, Any]) -> str:
    if worker["role"] == "decode" and worker["step_ms"]:
        return f"{duration(worker['step_ms'] / 1000)} per step"
    rate = worker["prefill_tokens_per_s"]
    return f"{rate} tokens/s" if rate else "–"
