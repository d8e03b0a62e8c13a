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
    from cluster.admin_address import shown_admin_port
    from cluster.config_sources import describe, resolve_config, shown_kv_bytes
    from cluster.wire.messages import Role

    flags = {name: value for name, value in settings.items() if value is not None}
    resolved = resolve_config(flags, os.environ, config)
    if dry_run:
        derived = {"admin_port": shown_admin_port(resolved.config)}
        derived |= {f"{role.value}_kv_bytes": shown_kv_bytes(resolved.config, role) for role in Role}
        typer.echo(describe(resolved.config, resolved.origins, derived))
        return
    _serve(resolved.config)


def _serve(config: Any) -> None:
    from rich.console import Console

    from cluster import launch
    from cluster.admin_address import admin_address, shown_admin_port
    from cluster.clock import MonotonicClock
    from cluster.drain_notice import count_open, drain_notice
    from cluster.progress import TerminalReport

    checked = launch.check(config)
    url = _url(checked.host, checked.port)
    body = (
        f'{{"model": "{checked.served_model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    )
    admin = admin_address(checked)
    routers = [url] if admin is None else [_url(admin[0], admin[1] + n) for n in range(checked.routers)]
    asides = f"[dim]Logs: {checked.log_dir}   Stop: Ctrl-C[/]"
    if admin is not None:
        others = "" if checked.routers == 1 else f" (ports {shown_admin_port(checked)})"
        asides = f"[dim]Cluster: {routers[0]}{others}[/]\n{asides}"
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"

    def ready_text(seconds: float) -> str:
        return (
            f"\n[bold green]Ready[/] in {seconds:.1f} s: [bold]{checked.served_model_name}[/] at {url}\n\n"
            f"  {curl}\n\n{asides}"
        )

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    report = TerminalReport(
        console,
        MonotonicClock(),
        ready_text,
        lambda: drain_notice(count_open(routers), checked.drain_grace_s),
    )
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


def _url(host: str, port: int) -> str:
    """As one on this machine reaches it."""
    host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
        option = typer.Option(None, info.flag, metavar="VALUE", help=info.help_with_default)
        options[info.name] = (str | None, option)

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


app.command(name="serve")(_with_settings(serve))


@app.command()
def status(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="everything, as JSON")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="redraw as it changes, until Ctrl-C")] = False,
) -> None:
    """Show a running cluster: workers, queues, KV, latencies of the last minutes."""
    from cluster.cli_status import show_status

    show_status(url, as_json=as_json, watch=watch)


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
    timings: Annotated[bool, typer.Option(help="say where the time of each answer went")] = True,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="if the server wants one")
    ] = None,
) -> None:
    """Chat with a running server. Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists commands."""
    from cluster.cli_chat import Conversation, TerminalChat
    from cluster.client import get_json

    options = {"max_tokens": max_tokens, "temperature": temperature}
    body: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    body["model"] = model or get_json(url, "/v1/models", api_key)["data"][0]["id"]
    if timings:
        body |= {"timings": True, "stream_options": {"include_usage": True}}
    TerminalChat(url, Conversation(body, system), api_key=api_key, show_timings=timings).run()


@app.command()
def doctor() -> None:
    """Check this machine: settings, libraries, cores, compiler, memory, KV edges, ports, model."""
    from cluster.doctor import run_checks

    checks = run_checks(os.environ)
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
