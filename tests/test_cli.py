"""The command line: every failure is one sentence and a status; imports wait for the command they serve."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster import cli, client, doctor
from cluster.clock import ManualClock
from cluster.config_sources import setting_infos
from cluster.errors import BatonError
from cluster.progress import TerminalReport

ROOT = Path(__file__).parents[1]


def run(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli.app, arguments, input=stdin, env=env, terminal_width=200)


def python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT, check=True
    )
    return result.stdout


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'ray', 'transformers', 'fastapi', 'numpy', 'redis'}"
    assert python(f"import cluster.cli, sys; print(sorted({heavy} & set(sys.modules)))") == "[]\n"


def test_serve_has_an_option_for_every_setting() -> None:
    result = run("serve", "--help")
    assert result.exit_code == 0
    for info in setting_infos():
        assert info.flag in result.output
    assert "(default: 512MiB)" in result.output


def test_dry_run_prints_values_with_their_origin_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('dtype = "fp32"\n')
    result = run("serve", "--dry-run", "--port", "81", "--config", str(file), env={"BATON_DECODE": "3"})
    rows = {line.split()[0]: line.split()[2:] for line in result.output.splitlines()}
    assert rows["port"] == ["81", "(--port)"]
    assert rows["decode"] == ["3", "(environment", "BATON_DECODE)"]
    assert rows["dtype"] == ["fp32", f"({file})"]
    assert rows["prefill"] == ["1", "(default)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "eighty"], "error: --port: expected a whole number from 0 to 65535, got `eighty`"),
        (["--config", "/none.yaml"], "error: cannot read the configuration file /none.yaml"),
        (["--model", "/no/such/model"], "error: /no/such/model: no such model file or directory"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence_and_a_status(arguments: list[str], message: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


@pytest.mark.model
def test_a_port_in_use_is_one_sentence_and_a_status() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            BatonError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        ):
            cli.app(["serve", "--port", str(port)], standalone_mode=False)


def test_unknown_option_suggests_the_right_one() -> None:
    result = run("serve", "--prot", "1")
    assert result.exit_code == 2
    assert "--port" in result.output


class Server:
    """A real HTTP server that gives scripted answers and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.bodies: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = server.answers[self.path]
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.do_GET()

            def log_message(self, *_: object) -> None:
                return None

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def test_status_shows_the_workers(server: Server) -> None:
    worker = {"id": "decode-0", "role": "decode", "epoch": 2, "pid": 77, "state": "ready", "running": 3}
    cluster = {"state": "ready", "workers": [worker | {"kv_blocks": {"used": 5, "free": 6}}]}
    server.answers["/cluster"] = (200, json.dumps(cluster).encode())
    result = run("status", "--url", server.url)
    assert result.exit_code == 0
    for text in ("cluster: ready", "decode-0", "77", "used 5"):
        assert text in result.output


def test_status_without_a_server_says_how_to_start_one() -> None:
    with pytest.raises(BatonError, match=r"no server at http://127.0.0.1:9/cluster: .*`baton serve`"):
        cli.app(["status", "--url", "http://127.0.0.1:9"], standalone_mode=False)


def test_chat_streams_and_keeps_the_conversation(server: Server) -> None:
    server.answers["/v1/models"] = (200, b'{"data": [{"id": "m"}]}')
    server.answers["/v1/chat/completions"] = (200, sse(delta("Hé"), delta("llo")) + b"data: [DONE]\n\n")
    result = run("chat", "--url", server.url, "--system", "Be brief.", stdin="hi\n\nagain\n")
    assert result.exit_code == 0
    assert result.output.count("Héllo") == 2
    assert [(message["role"], message["content"]) for message in server.bodies[1]["messages"]] == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "Héllo"),
        ("user", "again"),
    ]
    assert server.bodies[0] == {
        "model": "m",
        "messages": server.bodies[1]["messages"][:2],
        "stream": True,
    }


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "too long"}}', "too long"),
        (502, b"<html>", "the server answered 502"),
        (200, sse(delta("a"), {"error": {"message": "worker lost"}}), "worker lost"),
        (200, sse(delta("a")), "the answer broke off"),
        (200, b"data: {\n\n", "not JSON"),
    ],
)
def test_chat_errors_are_the_servers_own(server: Server, status: int, body: bytes, message: str) -> None:
    server.answers["/v1/chat/completions"] = (status, body)
    with pytest.raises(client.ClientError, match=message):
        list(client.stream_chat(server.url, {"messages": []}))


def test_doctor_looks_at_this_machine() -> None:
    checks = {check.name: check for check in doctor.run_checks()}
    assert checks["python"].is_ok
    assert checks["packages"].is_ok
    assert checks["torch"].is_ok
    assert {"cpu", "compiler", "products", "memory", "port", "demo model"} <= set(checks)
    result = run("doctor")
    assert result.exit_code == int(any(check.is_fatal and not check.is_ok for check in checks.values()))


def test_doctor_says_which_instructions_products_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CPU_ISA", "simd")
    checks = {check.name: check for check in doctor.run_checks()}
    assert (checks["products"].is_ok, checks["products"].finding) == (True, "simd: BATON_CPU_ISA is simd")
    monkeypatch.setenv("BATON_CPU_ISA", "sse")
    checks = {check.name: check for check in doctor.run_checks()}
    assert checks["products"].is_fatal
    assert checks["products"].finding == "BATON_CPU_ISA is `sse`; use auto, simd or amx"


def test_progress_shows_phases_with_seconds_and_gigabytes() -> None:
    from io import StringIO

    from rich.console import Console

    clock, output = ManualClock(), StringIO()
    report = TerminalReport(
        Console(file=output, width=100), clock, lambda seconds: f"ready in {seconds:.1f} s"
    )
    report.phase("Ray")
    assert output.getvalue() == "Ray ...\n"
    clock.advance(3.5)
    report.progress("compiling the kernels", 0, 0)
    report.progress("", 0, 0)
    report.progress("converting", 0, 2_000_000_000)
    report.progress("converting", 2_000_000_000, 2_000_000_000)
    report.phase("model")
    clock.advance(1.0)
    report.say("a [b] c")
    report.ready()
    report.close()
    text = output.getvalue()
    for part in (
        "Ray 3.5 s",
        "compiling the kernels ...",
        "compiling the kernels: 0.0 s",
        "2.00 GB in",
        "model 1.0 s",
        "! a [b] c",
        "ready in 4.5 s",
    ):
        assert part in text
