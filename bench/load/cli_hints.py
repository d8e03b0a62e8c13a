"""Habits from vLLM's load test: its flags are answered with ours, not guessed at."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from cluster.errors import ConfigError

OURS = {
    "--num-prompts": "--requests N",
    "--request-rate": "--rate R (for inf: --arrival burst)",
    "--max-concurrency": "--closed-loop N",
    "--random-input-len": "--input-tokens N",
    "--random-output-len": "--output-tokens N",
    "--random-prefix-len": "--prefix-groups 1 --prefix-tokens N",
    "--goodput": "--slo ttft=200ms,tpot=50ms",
    "--base-url": "--url URL",
    "--host": "--url URL",
    "--port": "--url URL",
    "--save-result": "--out FILE",
    "--result-filename": "--out FILE",
    "--dataset-name": "--sharegpt FILE, --trace FILE, or lengths with --input-tokens and --output-tokens",
    "--dataset-path": "--sharegpt FILE or --trace FILE",
    "--metric-percentiles": "--percentiles 50,90,99",
    "--ramp-up-strategy": "--arrival ramp:R1-R2@SECONDS",
}


class HintingCommand(TyperCommand):
    """A command that knows what the flags of the other tool are called here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """
        Raises:
            ConfigError: one of them was given.
        """
        for argument in args:
            name = argument.partition("=")[0]
            if name in OURS:
                raise ConfigError(f"No such option: {name}. Here it is {OURS[name]}.")
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed
