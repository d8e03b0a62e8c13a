"""`baton simulate --trace` and `baton plan` as a user runs them, and a small trace for them."""

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from bench.simulator.cli_fleet import app, plan_app

SLO = ["--slo", "ttft=0.5s,tpot=25ms"]
RUN = ["--rate", "5", "--seeds", "1"]
CALIBRATION = {
    "fixed_s": 1e-3,
    "floor_s": 2e-2,
    "per_token_s": 2e-4,
    "per_context_s": 1e-7,
    "per_attention_s": 1e-8,
}
Command = Callable[..., tuple[int, str]]


def write_trace(path: Path) -> Path:
    lines = [
        json.dumps(
            {
                "timestamp": 100 * index,
                "input_length": 100 + 37 * (index % 20),
                "output_length": 20 + index % 9,
            }
        )
        for index in range(60)
    ]
    path.write_text("\n".join(lines))
    return path


def searching(trace: Path, num_seeds: int) -> list[str]:
    load = f"--workers 1 --max-goodput --seeds {num_seeds} --duration 3"
    return ["--trace", str(trace), *load.split(), *SLO]


def simulate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(plan_app, list(arguments))
    return result.exit_code, " ".join(result.output.split())
