"""Command lines that cannot work: answered in one line, not guessed at.

1. What the parser refuses is a `ConfigError` like every other option that cannot work.
2. Flags of vLLM's load test are told what they are called here.
3. An option given twice is an error: all but the last would be ignored.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

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


ALL_IN_ONE = {
    "--slo": ", with all bounds in it, such as ttft=200ms,tpot=50ms",
    "--percentiles": ", with all of them in it, such as 50,99",
    "--extra-body": ", with all fields in it",
}


_UsageError: Any = typer.BadParameter.__base__  # typer has its own, and no public name for it


class PlainCommand(TyperCommand):
    """A command whose usage errors are one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """
        Raises:
            ConfigError: these are no arguments of this command.
        """
        try:
            parsed: list[str] = super().parse_args(ctx, args)
        except _UsageError as error:
            message = error.format_message().rstrip(".")
            raise ConfigError(f"{message}; see {ctx.command_path} --help") from None
        return parsed


class PlainGroup(TyperGroup):
    """Commands, of which one that does not exist is one line, too."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """
        Raises:
            ConfigError: there is no such command.
        """
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            message = error.format_message().rstrip(".")
            raise ConfigError(f"{message}; see {ctx.command_path} --help") from None


class HintingCommand(PlainCommand):
    """A command that knows what the flags of the other tool are called here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """
        Raises:
            ConfigError: as above, one of them was given, or an option twice.
        """
        for argument in args:
            name = argument.partition("=")[0]
            if name in OURS:
                raise ConfigError(f"No such option: {name}. Here it is {OURS[name]}.")
        parsed = super().parse_args(ctx, list(args))
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for parameter, num in Counter(order).items():
            if num > 1 and not parameter.multiple and not getattr(parameter, "is_flag", False):
                name = parameter.opts[0]
                raise ConfigError(f"{name} is given {num} times: give it once{ALL_IN_ONE.get(name, '')}.")
        return parsed
