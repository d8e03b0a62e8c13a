"""The mock server as a process: `python -m bench.load.mock.process`, and how to run one beside a test.

It prints one JSON line, `{"url": "http://…"}`, once it listens, and serves until it is interrupted or its
stdin, when that is a pipe of the parent's, ends.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import msgspec
import orjson

from bench.load.client.open_files import raise_file_limit
from bench.load.client.process import new_loop
from bench.load.client.target import Target, call, parse_target
from bench.load.mock.script import Script, field_help, read_script
from bench.load.mock.server import MockServer, MockSettings, Truth
from cluster.errors import BatonError, ConfigError

START_S = 30.0
EXIT_S = 5.0


def serve_mock(
    settings: MockSettings,
    host: str = "127.0.0.1",
    port: int = 0,
    on_listening: Callable[[str], None] | None = None,
    ends_with_stdin: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM; `on_listening(url)` is called once connections are accepted.

    Raises:
        BatonError: the address cannot be listened on.
    """
    raise_file_limit()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(settings, host, port, on_listening, ends_with_stdin))


async def _serve(
    settings: MockSettings,
    host: str,
    port: int,
    on_listening: Callable[[str], None] | None,
    ends_with_stdin: bool,
) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    if ends_with_stdin:
        await loop.connect_read_pipe(lambda: _Lifeline(over), os.fdopen(0, "rb", 0))
    try:
        server = await MockServer(settings, host, port).__aenter__()
    except OSError as error:
        hint = "; give another --port, or 0 for a free one" if error.errno == errno.EADDRINUSE else ""
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise BatonError(f"cannot listen on `{host}:{port}`: {why}{hint}") from None
    gc.freeze()
    if on_listening is not None:
        on_listening(server.url)
    await over.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)  # a second one, while this one is obeyed
    await server.__aexit__()


class _Lifeline(asyncio.Protocol):
    def __init__(self, over: asyncio.Event) -> None:
        self._over = over

    def connection_lost(self, exc: Exception | None) -> None:
        self._over.set()


class MockProcess(NamedTuple):
    target: Target
    pid: int


@contextmanager
def running_mock(settings: MockSettings | None = None, core: int | None = None) -> Iterator[MockProcess]:
    """A mock server in a process of its own, for the length of the block.

    Raises:
        BatonError: it did not start.
    """
    text = msgspec.json.encode(settings or MockSettings()).decode()
    command = [sys.executable, "-m", "bench.load.mock.process", "--settings", text, "--with-stdin"]
    if core is not None:
        command += ["--core", str(core)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield MockProcess(parse_target(_read_url(process.stdout.fileno())), process.pid)
    finally:
        process.stdin.close()
        try:
            process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def read_truths(target: Target) -> list[Truth]:
    """The moments a mock kept."""
    status, body = call(target, "GET", "/mock/truth")
    if status != 200:
        raise BatonError(f"`{target.url}` is no mock server: HTTP {status} for `/mock/truth`")
    return msgspec.json.decode(body, type=list[Truth])


def _read_url(stdout: int) -> str:
    deadline = time.monotonic() + START_S
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise BatonError(f"the mock server did not listen within {START_S:g} s")
            part = os.read(stdout, 4096)
            if not part:
                raise BatonError("the mock server ended before it listened")
            line += part
    return str(orjson.loads(line)["url"])


def _print_url(url: str) -> None:
    print(orjson.dumps({"url": url}).decode(), flush=True)


EXAMPLE = """example: the first token after 200 ms, then one every 20 ms, at most 8 requests at once
  baton bench mock --port 8001 --capacity 8 --script '{"ttft_s": 0.2, "itl_s": 0.02}'
One request's own script, over the default: the field `mock` of its body
  baton bench run --url http://127.0.0.1:8001 --extra-body '{"mock": {"stall_after": 5}}' ..."""


EXIT_HELP = (
    "exit status: 0 ended by a signal; 1 it could not listen; 2 a command line that cannot work\n"
    "(those of all commands: baton bench run --help)"
)


def main(arguments: list[str] | None = None, program: str = "python -m bench.load.mock.process") -> int:
    options = _parser(program).parse_args(arguments)
    try:
        if options.core is not None:
            _pin(options.core)
        if not 0 <= options.port <= 65535:
            raise ConfigError(f"--port {options.port}: give a port from 1 to 65535, or 0 for a free one")
        if options.capacity is not None and options.capacity < 1:
            raise ConfigError(f"--capacity {options.capacity}: give 1 or more, or leave it out for no limit")
        if options.settings is not None:
            settings = _read_settings(options.settings)
        else:
            script: Script = read_script(options.script)
            settings = MockSettings(script=script, capacity=options.capacity)
        serve_mock(settings, options.host, options.port, _print_url, options.with_stdin)
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _pin(core: int) -> None:
    """
    Raises:
        ConfigError: this process may not run there.
    """
    try:
        os.sched_setaffinity(0, {core})
    except (OSError, ValueError, OverflowError):
        cores = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(f"--core {core}: give one of this machine's: {cores}") from None


class _Parser(argparse.ArgumentParser):
    """What is wrong is one line; `--help` has the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def _parser(program: str) -> argparse.ArgumentParser:
    fields = "\n".join(f"  {name:19}{text} ({default})" for name, default, text in field_help())
    parser = _Parser(
        prog=program,
        description="An OpenAI-compatible server of scripted timings and faults. It prints its URL as JSON.",
        epilog=f"fields of a script, and their defaults:\n{fields}\n\n{EXAMPLE}\n\n{EXIT_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (0: a free one)")
    parser.add_argument("--script", default="{}", help="JSON object: the script of every request ({})")
    parser.add_argument("--capacity", type=int, help="requests served at once; the others wait (no limit)")
    parser.add_argument("--settings", help="JSON of all settings (none); replaces --script and --capacity")
    parser.add_argument("--core", type=int, help="pin to this core (none)")
    parser.add_argument("--with-stdin", action="store_true", help="end when stdin ends")
    return parser


def _read_settings(text: str) -> MockSettings:
    """
    Raises:
        ConfigError: not JSON, or an unknown or wrong field.
    """
    known = MockSettings.__struct_fields__
    try:
        unknown = [name for name in msgspec.json.decode(text, type=dict[str, Any]) if name not in known]
        if not unknown:
            return msgspec.json.decode(text, type=MockSettings)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the settings cannot be read: {error}") from None
    raise ConfigError(f"the settings have no `{unknown[0]}`; the fields are {', '.join(known)}")


if __name__ == "__main__":
    sys.exit(main())
