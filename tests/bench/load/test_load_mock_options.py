"""`baton bench mock` refuses what it cannot do, in one line, before it listens."""

from __future__ import annotations

import socket

import pytest

from bench.load.client.target import parse_target
from bench.load.mock.process import main
from bench.load.mock.script import Script, field_help, read_script
from bench.load.mock.server import MockServer
from cluster.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--port", "99999"), "--port 99999: give a port from 1 to 65535"),
        (("--port", "-1"), "--port -1"),
        (("--port", "http"), "--port"),
        (("--capacity", "0"), "--capacity 0: give 1 or more"),
        (("--capacity", "1.5"), "--capacity"),
        (("--core", "-1"), "--core -1"),
        (("--core", "99999"), "--core 99999: give one of this machine's"),
        (("--settings", '{"capacity": 0}'), "`$.capacity`"),
        (("--settings", '{"max_model_len": 0}'), "`$.max_model_len`"),
        (("--settings", '{"speed": 1}'), "no `speed`"),
        (("--settings", "5"), "settings cannot be read"),
        (("--script", "nonsense"), "JSON is malformed"),
        (("--script", "[]"), "Expected `object`"),
        (("--script", '{"ttft": 1}'), "`ttft`"),
        (("--nothing",), "--nothing"),
    ],
)
def test_options_that_cannot_work_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], part: str
) -> None:
    try:
        status = main(list(arguments))
    except SystemExit as end:
        status = int(end.code or 0)
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert part in said.err


def test_a_port_that_is_taken_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert f"cannot listen on `127.0.0.1:{port}`: Address already in use; give another --port" in error


def test_a_host_that_is_not_known_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "nowhere.invalid"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot listen on `nowhere.invalid:0`")
    assert error.count("\n") == 1


def test_an_address_of_ipv6_is_bracketed_in_the_url() -> None:
    server = MockServer(host="::1", port=8001)
    assert server.url == "http://[::1]:8001"
    assert parse_target(server.url).host == "::1"


NEGATIVE = [name for name, _, _ in field_help() if name.endswith(("_s", "_after", "_tokens", "_bytes"))]


@pytest.mark.parametrize("name", [*NEGATIVE, "tokens_per_chunk", "http_status"])
def test_no_time_or_count_of_a_script_is_negative(name: str) -> None:
    for value in ("-1", "-0.5", "1e999", '"1"'):
        with pytest.raises(ConfigError, match=name):
            read_script(f'{{"{name}": {value}}}')


@pytest.mark.parametrize(
    "text",
    [
        '{"itl_s": []}',
        '{"itl_s": [0.1, -0.1]}',
        '{"tokens_per_chunk": 0}',
        '{"split_bytes": 0}',
        '{"heartbeat_s": 0}',
        '{"http_status": 600}',
        '{"framing": "gzip"}',
        '{"line_end": ""}',
        '{"error_shape": "round"}',
    ],
)
def test_values_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_script(text)


def test_every_default_of_a_script_can_be_written_down() -> None:
    fields = ", ".join(f'"{name}": {default}' for name, default, _ in field_help())
    assert read_script(f"{{{fields}}}") == Script()
