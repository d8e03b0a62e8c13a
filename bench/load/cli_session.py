"""One measuring command from its first signal to its exit status.

1. `Session.open` asks the server for its model and context length.
2. `Session.fit` gives them to the settings; `Session.measure` runs one measurement with the live display.
3. `uninterrupted` owns the signals of the whole command. Before the first request one ends it at once; after
   that they only end the run, and what was measured is written whatever else is pressed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import typer

from bench.load.cli_load import LoadOptions, is_given
from bench.load.cli_screen import note
from bench.load.cli_status import Status
from bench.load.client.interrupts import CommandSignals, StopSwitch, signals_to
from bench.load.client.target import Target, parse_target, probe
from bench.load.client.topology import read_topology
from bench.load.plans.build import check_plan
from bench.load.plans.settings import PlanSettings
from bench.load.plans.tokenize_client import HttpTokenizeClient
from bench.load.progress import LiveProgress
from bench.load.runner import Measurement, RunSettings, describe_environment, measure
from cluster.errors import ConfigError

OUR_SERVER = "baton"  # `owned_by` of its models


@contextmanager
def uninterrupted() -> Iterator[StopSwitch]:
    """The signals of one command go to its switch. Before a run has begun they end the command.

    In a process of its own the command had them from the start, and keeps them (`cli_entry`).
    """
    owner = signal.getsignal(signal.SIGINT)
    if isinstance(owner, CommandSignals):
        yield owner.switch
        return
    switch = StopSwitch()

    def on_signal() -> None:
        if not switch.was_connected:
            raise KeyboardInterrupt
        switch.stop()

    try:
        with signals_to(on_signal):
            yield switch
    except KeyboardInterrupt:
        note("interrupted: nothing was measured or written")
        raise typer.Exit(Status.INTERRUPTED) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The server that a command measures, and what it said about itself."""

    target: Target
    model: str
    max_model_len: int | None
    has_timings: bool  # it tells how long each request spent where, when asked
    environment: dict[str, Any]
    stop: StopSwitch

    @classmethod
    def open(cls, given: LoadOptions, stop: StopSwitch) -> Self:
        """
        Raises:
            BatonError: a wrong URL, no key where one was named, no server there, or another model.
        """
        target = parse_target(given.url, api_key(given, os.environ))
        server = probe(target, given.model)
        is_ours = server.owned_by == OUR_SERVER
        topology = read_topology(target) if is_ours else None
        return cls(
            target=target,
            model=server.model,
            max_model_len=server.max_model_len,
            has_timings=is_ours,
            environment=describe_environment(
                target, server, given.backend, given.cores, given.accelerators, topology
            ),
            stop=stop,
        )

    def fit(self, settings: PlanSettings) -> PlanSettings:
        """The settings for this server. Baton is asked for its timings, unless the extra body says
        otherwise.
        """
        extra = {"timings": True} if self.has_timings else {}
        return msgspec.structs.replace(
            settings,
            model=self.model,
            max_model_len=settings.max_model_len or self.max_model_len,
            extra_body=extra | settings.extra_body,
        )

    def check(self, plans: Sequence[PlanSettings]) -> None:
        """
        Raises:
            BatonError: one of the plans cannot be built.
        """
        with HttpTokenizeClient(self.target.url, self.model, self.target.api_key) as tokenizer:
            for plan in plans:
                check_plan(plan, tokenizer)

    def measure(self, plan: PlanSettings, settings: RunSettings, title: str | None = None) -> Measurement:
        """One measurement with a live display; text prompts are counted by the server itself."""
        shown = f"{self.model} at {self.target.url}" + (f", {title}" if title else "")
        with (
            HttpTokenizeClient(self.target.url, self.model, self.target.api_key) as tokenizer,
            LiveProgress(shown) as live,
        ):
            return measure(
                plan, settings, self.target, self.environment, tokenizer, live.update, stop=self.stop
            )


def api_key(given: LoadOptions, environment: Mapping[str, str]) -> str | None:
    """
    Raises:
        ConfigError: a variable was named, and is not there.
    """
    key = environment.get(given.api_key_env) or None
    if key is None and is_given(given, "api_key_env"):
        raise ConfigError(
            f"--api-key-env {given.api_key_env}: the environment has no such variable, or no text in it."
        )
    return key
