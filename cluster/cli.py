"""`baton`: serve a cluster, look at it, talk to it. What is heavy is imported by the command that needs it.

The options of `serve` are the fields of `ClusterConfig`: one table for flags, environment, file and help.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.errors import BatonError

DEFAULT_URL = "http://127.0.0.1:8000"

OWN_PROCESS = object()  # what commands find in their context when the process has nothing else to do

Url = Annotated[str, typer.Option("--url", help="where the server is")]

_STATUS_COLUMNS = ("id", "role", "state", "epoch", "pid", "running", "waiting", "kv_blocks")

app = typer.Typer(
    name="baton",
    help="Serve large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script: an error of ours is one sentence and a non-zero status."""
    try:
        app(obj=OWN_PROCESS)
    except BatonError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(1)


def serve(config: Path | None, dry_run: bool, **settings: str | None) -> None:
    """Start a cluster on this machine, or on the Ray cluster at --address, and serve until stopped.

    Every option can also be set as BATON_OPTION in the environment, or as a key of the --config file.
    """
    from cluster.config import describe
    from cluster.config_sources import resolve_config

    flags = {name: value for name, value in settings.items() if value is not None}
    resolved = resolve_config(flags, os.environ, config)
    if dry_run:
        typer.echo(describe(resolved.config, resolved.origins))
        return
    _serve(resolved.config)


def _serve(config: Any) -> None:
    from rich.console import Console

    from cluster import launch
    from cluster.clock import MonotonicClock
    from cluster.progress import TerminalReport

    checked = launch.check(config)
    host = "127.0.0.1" if checked.host in ("0.0.0.0", "::", "") else checked.host
    url = f"http://[{host}]:{checked.port}" if ":" in host else f"http://{host}:{checked.port}"
    body = (
        f'{{"model": "{checked.served_model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    )
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"

    def ready_text(seconds: float) -> str:
        return (
            f"\n[bold green]Ready[/] in {seconds:.1f} s: [bold]{checked.served_model_name}[/] at {url}\n\n"
            f"  {curl}\n\n[dim]Logs: {checked.log_dir}   Stop: Ctrl-C[/]"
        )

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    report = TerminalReport(console, MonotonicClock(), ready_text)
    try:
        finish = launch.serve(checked, report)
    except KeyboardInterrupt:
        console.print("stopped before it was ready")
        raise typer.Exit(130) from None
    finally:
        report.close()
    if finish.error is not None:
        typer.secho(f"error: {finish.error} (logs: {checked.log_dir})", fg="red", err=True)
    raise typer.Exit(finish.exit_code)


def _with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with one option per field of `ClusterConfig` in place of its `**settings`."""
    from cluster.config_sources import setting_infos

    options: dict[str, tuple[Any, Any]] = {
        "config": (Path | None, typer.Option(None, "--config", help="YAML or TOML file with settings")),
        "dry_run": (
            bool,
            typer.Option(False, "--dry-run", help="print every setting and its origin, then exit"),
        ),
    }
    for info in setting_infos():
        is_plain = info.default is None  # then the help says what it stands for
        text = info.help if is_plain else f"{info.help} (default: {_shown(info.default, info.is_bytes)})"
        options[info.name] = (str | None, typer.Option(None, info.flag, metavar="VALUE", help=text))

    def command(**given: Any) -> None:
        function(**given)

    command.__doc__ = function.__doc__
    command.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
    )
    return command


def _shown(default: Any, is_bytes: bool) -> str:
    return f"{default >> 20}MiB" if is_bytes else str(default)


app.command(name="serve")(_with_settings(serve))


@app.command()
def status(url: Url = DEFAULT_URL) -> None:
    """Show the workers of a running cluster."""
    from rich.console import Console
    from rich.table import Table

    from cluster.client import get_json

    cluster = get_json(url, "/cluster")
    table = Table(*(column.replace("_", " ") for column in _STATUS_COLUMNS), title=_headline(cluster))
    for worker in cluster.get("workers", ()):
        table.add_row(*(_cell(worker.get(column)) for column in _STATUS_COLUMNS))
    Console().print(table)


def _headline(cluster: dict[str, Any]) -> str | None:
    return f"cluster: {cluster['state']}" if "state" in cluster else None


def _cell(value: Any) -> str:
    if isinstance(value, dict):  # e.g. KV blocks by state
        return " ".join(f"{key} {number}" for key, number in value.items())
    return "" if value is None else str(value)


@app.command()
def restart(
    url: Url = DEFAULT_URL,
    timeout: Annotated[float, typer.Option(help="seconds until it is given up")] = 900.0,
) -> None:
    """Replace all workers, one after the other, while the cluster serves. No request is lost."""
    from cluster.rolling_restart import restart_workers

    took_s = restart_workers(url, timeout, typer.echo)
    typer.echo(f"all workers restarted in {took_s:.0f} s")


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="model to ask (default: the served one)")] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="longest answer in tokens")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token")] = None,
) -> None:
    """Chat with a running server. Ctrl-C ends an answer, Ctrl-D the chat."""
    from cluster.client import get_json

    options = {"max_tokens": max_tokens, "temperature": temperature}
    body: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    body["model"] = model or get_json(url, "/v1/models")["data"][0]["id"]
    messages = [{"role": "system", "content": system}] if system else []
    while (question := _ask()) is not None:
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": _print_answer(url, body | {"messages": messages})})


def _ask() -> str | None:
    """What the user typed; None at the end of input."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return None


def _print_answer(url: str, body: dict[str, Any]) -> str:
    from cluster.client import stream_chat

    pieces: list[str] = []
    try:
        for piece in stream_chat(url, body):
            pieces.append(piece)
            typer.echo(piece, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:  # the answer so far stays part of the conversation
        typer.echo(" ...", nl=False)
    typer.echo()
    return "".join(pieces)


@app.command()
def doctor() -> None:
    """Check this machine: Python, libraries, compiler, memory, ports, demo model."""
    from cluster.doctor import run_checks

    checks = run_checks()
    for check in checks:
        color = "green" if check.is_ok else "red" if check.is_fatal else "yellow"
        typer.secho(f"{'ok' if check.is_ok else 'no':<3}", fg=color, nl=False)
        typer.echo(f"{check.name:<14} {check.finding}")
    if any(check.is_fatal and not check.is_ok for check in checks):
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(context: typer.Context) -> None:
    """Load-test any OpenAI-compatible server: run, sweep, max-goodput, report, compare, mock."""
    from bench.load.cli_entry import main as bench_main  # its options cost an import only where they are used

    bench_main(context.args, owns_process=context.obj is OWN_PROCESS)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def simulate(context: typer.Context) -> None:
    """Run a whole cluster in virtual time: with faults, checking every rule; or --trace, for its goodput."""
    if any(argument.split("=")[0] == "--trace" for argument in context.args):
        from bench.simulator.cli_fleet import app as fleet_app

        fleet_app(args=context.args, prog_name="baton simulate")
    else:
        from bench.simulator.cli import app as simulator_app

        simulator_app(args=context.args, prog_name="baton simulate")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def plan(context: typer.Context) -> None:
    """Say which workers should prefill, decode or do both for a trace and SLO."""
    from bench.simulator.cli_fleet import plan_app

    plan_app(args=context.args, prog_name="baton plan")


@app.command()
def version() -> None:
    """Print Baton's version."""
    typer.echo(distribution_version("baton-serve"))


if __name__ == "__main__":
    main()
