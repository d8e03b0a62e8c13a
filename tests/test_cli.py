"""The command line: every failure is one sentence and a status; imports wait for the command they serve."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from cluster import cli, doctor
from cluster.clock import ManualClock
from cluster.config_sources import setting_infos
from cluster.errors import BatonError
from cluster.progress import TerminalReport
from tests.support.web_server import WebServer

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
    ("arguments", "shown"),
    [
        ([], "none: the HTTP server's port answers  (derived)"),
        (["--host", "0.0.0.0"], "8001  (derived)"),
        (["--port", "81", "--routers", "3"], "82 to 84, one per router  (derived)"),
        (["--port", "65535", "--api-keys-file", "keys"], "65534  (derived)"),
        (["--port", "0", "--host", "0.0.0.0"], "any free one  (derived)"),
        (["--host", "0.0.0.0", "--admin-port", "9"], "9  (--admin-port)"),
    ],
)
def test_dry_run_shows_the_admin_port_that_follows_from_the_rest(arguments: list[str], shown: str) -> None:
    result = run("serve", "--dry-run", *arguments)
    [line] = [line for line in result.output.splitlines() if line.startswith("admin_port ")]
    assert line.partition("= ")[2] == shown


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


def test_doctor_looks_at_this_machine() -> None:
    checks = {check.name: check for check in doctor.run_checks({})}
    assert checks["python"].is_ok
    assert checks["packages"].is_ok
    assert checks["torch"].is_ok
    named = {
        "system",
        "settings",
        "cpu",
        "compiler",
        "products",
        "memory",
        "shm edge",
        "loopback",
        "kv edge",
        "open files",
    }
    assert named | {"port", "model"} <= set(checks)
    assert re.fullmatch(r"[\d.]+ GB/s over one TCP stream", checks["loopback"].finding)
    assert "admin port" not in checks  # on loopback there is none
    result = run("doctor", env={})
    for name in named:
        assert name in result.output


def test_doctor_looks_with_the_settings_of_the_environment() -> None:
    settings = {"BATON_HOST": "0.0.0.0", "BATON_PORT": "0", "OMP_NUM_THREADS": "3"}
    checks = {check.name: check for check in doctor.run_checks(settings)}
    assert checks["settings"].finding == "host from environment BATON_HOST, port from environment BATON_PORT"
    assert checks["admin port"].finding == "127.0.0.1:0 is free"
    assert checks["threads"].finding == "OMP_NUM_THREADS=3"
    wrong = {check.name: check for check in doctor.run_checks({"BATON_PROT": "1"})}
    assert not wrong["settings"].is_ok
    assert "did you mean BATON_PORT?" in wrong["settings"].finding


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kv_between_gpus_where_there_is_none_is_one_line_from_every_command() -> None:
    settings = {"BATON_KV_EDGE": "nccl"}
    checks = {check.name: check for check in doctor.run_checks(settings)}
    assert not checks["kv edge"].is_ok
    assert checks["kv edge"].finding.startswith("--kv-edge nccl needs a CUDA device: torch ")
    with pytest.raises(BatonError, match=r"^--kv-edge cuda_ipc needs a CUDA device: .* use `--kv-edge shm`"):
        cli.app(["serve", "--kv-edge", "cuda_ipc", "--port", "0"], standalone_mode=False)


def test_doctor_knows_a_cluster_that_serves_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with WebServer() as server:
        server.answers["/version"] = (200, b'{"version": "2026.11"}')
        monkeypatch.setenv("BATON_PORT", server.url.rpartition(":")[2])
        checks = {check.name: check for check in doctor.run_checks(os.environ)}
    assert checks["port"].finding == f"Baton 2026.11 serves at {server.url} already"
    assert not checks["port"].is_fatal


def test_doctor_says_which_instructions_products_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CPU_ISA", "simd")
    checks = {check.name: check for check in doctor.run_checks(os.environ)}
    assert (checks["products"].is_ok, checks["products"].finding) == (True, "simd: BATON_CPU_ISA is simd")
    monkeypatch.setenv("BATON_CPU_ISA", "sse")
    checks = {check.name: check for check in doctor.run_checks(os.environ)}
    assert checks["products"].is_fatal
    assert checks["products"].finding == "BATON_CPU_ISA is `sse`; use auto, simd, avx512-bf16 or amx"


def test_progress_shows_phases_with_seconds_and_gigabytes() -> None:
    from io import StringIO

    from rich.console import Console

    clock, output = ManualClock(), StringIO()
    report = TerminalReport(
        Console(file=output, width=100),
        clock,
        lambda seconds: f"ready in {seconds:.1f} s",
        lambda: "stopping",
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
