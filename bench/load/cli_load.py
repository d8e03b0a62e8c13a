"""The options that every measuring command shares, and what they mean as plan and run settings.

1. typer fills a `LoadOptions` (or a subclass) from the command line.
2. `Session.open` finds the server: its model and context length.
3. `plan_settings` turns the options into what `build_plan` needs, `run_settings` into what offering needs.
4. `Session.measure` runs one measurement, with the live display.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.load import arrivals
from bench.load.arrival_text import parse_arrival
from bench.load.cli_options import option
from bench.load.lengths import parse_lengths
from bench.load.metrics import DEFAULT_PERCENTILES
from bench.load.plan import Arrival
from bench.load.pool import DEFAULT_TIMEOUT_S
from bench.load.progress import LiveProgress
from bench.load.runner import Measurement, RunSettings, describe_environment, measure
from bench.load.settings import (
    Chats,
    Endpoint,
    Oversize,
    PlanSettings,
    PromptForm,
    SharedPrefix,
    ShareGpt,
    Synthetic,
    TraceReplay,
    Workload,
)
from bench.load.slo import Slo, SloMetric, parse_slos
from bench.load.target import Target, parse_target, probe
from bench.load.tokenize_client import HttpTokenizeClient
from bench.load.window import WHOLE_RUN, SteadyWindow, Window
from cluster.errors import ConfigError

DEFAULT_INPUT, DEFAULT_OUTPUT = "256", "128"
SERVER, REQUESTS, ARRIVALS = "Server", "Requests", "Arrivals"
MEASURING, OUTPUT = "Measuring", "Output"
_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Command-line options, as given; None means not given."""

    url: str = option("http://127.0.0.1:8000", "OpenAI-compatible server, with or without /v1", SERVER)
    model: str | None = option(None, "model to ask for (default: the first one served)", SERVER)
    endpoint: Endpoint = option(Endpoint.COMPLETIONS, "which API carries the requests", SERVER)
    api_key_env: str = option("OPENAI_API_KEY", "environment variable with the API key, if any", SERVER)
    backend: str = option("openai", "name of the server software, for the result file", SERVER)

    input_tokens: str | None = option(
        None, f"prompt length: 256, uniform:100-500, lognormal:mean=1155,sigma=1 ({DEFAULT_INPUT})", REQUESTS
    )
    output_tokens: str | None = option(None, f"answer length, same forms ({DEFAULT_OUTPUT})", REQUESTS)
    prefix_groups: int | None = option(None, "prompts share the prefix of one of this many groups", REQUESTS)
    prefix_tokens: int = option(512, "length of a shared prefix", REQUESTS)
    prefix_skew: float = option(0.0, "Zipf exponent of the groups' popularity; 0: all alike", REQUESTS)
    turns: str | None = option(
        None, "multi-turn chats with this many requests each (any length form)", REQUESTS
    )
    think: str = option("0", "time between an answer and the next turn, such as 2s", REQUESTS)
    random_think: bool = option(False, "draw think times from an exponential distribution", REQUESTS)
    system_tokens: int = option(0, "length of the system message that all chats share", REQUESTS)
    trace: Path | None = option(
        None, "trace file: Azure CSV, Mooncake JSONL, BurstGPT CSV, canonical JSONL", REQUESTS
    )
    trace_format: str | None = option(None, "azure, mooncake, burstgpt or canonical (detected)", REQUESTS)
    trace_offset: str = option("0", "begin this far into the trace", REQUESTS)
    speed_up: float = option(1.0, "divide the trace's times by this", REQUESTS)
    scale_lengths: float = option(1.0, "divide the trace's lengths by this", REQUESTS)
    sharegpt: Path | None = option(None, "JSON file of conversations", REQUESTS)
    prompt: PromptForm | None = option(None, "prompts as token ids or as text of exact length", REQUESTS)
    ids: str = option("1000-30000", "range of the token ids of `ids` prompts", REQUESTS)
    max_model_len: int | None = option(None, "context length (default: what the server says)", REQUESTS)
    oversize: Oversize = option(
        Oversize.SKIP, "requests that exceed the context: leave out or shorten", REQUESTS
    )
    allow_stop: bool = option(False, "let the model end answers early (no ignore_eos)", REQUESTS)
    temperature: float = option(0.0, "sampling temperature", REQUESTS)
    extra_body: str | None = option(None, "JSON object to add to every request", REQUESTS)

    rate: float | None = option(None, "mean requests per second", ARRIVALS)
    arrival: str | None = option(
        None,
        "poisson (default), constant, gamma:B, ramp:1-20@60, piecewise:5@30,20@10, burst, trace",
        ARRIVALS,
    )
    burstiness: float | None = option(None, "short for --arrival gamma:B; 1 is Poisson", ARRIVALS)
    closed_loop: int | None = option(None, "instead: keep this many requests in flight", ARRIVALS)
    requests: int | None = option(None, "how many requests (or chats) to offer", ARRIVALS)
    duration: str | None = option(None, "for how long to offer, such as 60s or 5m", ARRIVALS)
    seed: int = option(0, "decides arrivals, lengths and tokens", ARRIVALS)
    salt: int | None = option(
        None, "changes the tokens only; a new one each run, so no run finds its prompts cached", ARRIVALS
    )

    slo: str | None = option(None, "bounds such as ttft=200ms,tpot=50ms,gap=150ms,itl=60ms,e2e=5s", MEASURING)
    warmup: str | None = option(None, "leave out requests scheduled in the first so many seconds", MEASURING)
    cooldown: str | None = option(None, "leave out requests scheduled in the last so many seconds", MEASURING)
    steady: bool = option(False, "measure an automatic steady window instead", MEASURING)
    timeout: str | None = option(
        None,
        "longest life of one request (10m; max-goodput with an e2e SLO: twice that, plus 5 s)",
        MEASURING,
    )
    processes: int = option(1, "client processes", MEASURING)
    percentiles: str = option("50,90,95,99", "percentiles to report", MEASURING)

    out: Path | None = option(None, "result file (JSON); requests go to OUT.requests.jsonl beside it", OUTPUT)
    report: Path | None = option(None, "write an HTML report here", OUTPUT)
    label: str | None = option(None, "name of this run in reports and comparisons", OUTPUT)
    save_detailed: bool = option(False, "keep per-request arrays in the result file too", OUTPUT)
    keep_text: bool = option(False, "keep generated texts in the requests file", OUTPUT)
    accelerators: int = option(0, "accelerators of the server, for goodput per accelerator", OUTPUT)
    cores: int | None = option(None, "cores of the server, for figures per core", OUTPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The server that a command measures, and what it said about itself."""

    target: Target
    model: str
    max_model_len: int | None
    environment: dict[str, Any]

    @classmethod
    def open(cls, given: LoadOptions) -> Self:
        """
        Raises:
            BatonError: a wrong URL, no server there, or another model.
        """
        target = parse_target(given.url, os.environ.get(given.api_key_env) or None)
        server = probe(target, given.model)
        return cls(
            target=target,
            model=server.model,
            max_model_len=server.max_model_len,
            environment=describe_environment(target, server, given.backend, given.cores, given.accelerators),
        )

    def measure(self, plan: PlanSettings, settings: RunSettings, title: str | None = None) -> Measurement:
        """One measurement with a live display; text prompts are counted by the server itself."""
        shown = f"{self.model} at {self.target.url}" + (f", {title}" if title else "")
        with (
            HttpTokenizeClient(self.target.url, self.model, self.target.api_key) as tokenizer,
            LiveProgress(shown) as live,
        ):
            return measure(plan, settings, self.target, self.environment, tokenizer, live.update)


def plan_settings(
    given: LoadOptions,
    model: str,
    max_model_len: int | None,
    *,
    rate: float | None = None,
    duration_s: float | None = None,
    random_offset: bool = False,
) -> PlanSettings:
    """`rate` and `duration_s` stand in for the options of the same name; with `random_offset` each seed takes
    another part of the trace.

    Raises:
        ConfigError: options that contradict each other or cannot be read.
    """
    if duration_s is None and given.duration is not None:
        duration_s = parse_seconds("--duration", given.duration)
    if given.requests is None and duration_s is None and given.trace is None:
        raise ConfigError("How much to offer is missing: give --requests N, --duration SECONDS, or both.")
    return PlanSettings(
        model=model,
        arrival=_arrival(given, given.rate if rate is None else rate),
        workload=_workload(given, random_offset),
        endpoint=_endpoint(given),
        prompt_form=given.prompt,
        num_requests=given.requests,
        duration_s=duration_s,
        max_model_len=given.max_model_len or max_model_len,
        oversize=given.oversize,
        id_range=_id_range(given.ids),
        seed=given.seed,
        salt=time.time_ns() if given.salt is None else given.salt,
        temperature=given.temperature,
        ignore_eos=not given.allow_stop,
        extra_body=_extra_body(given.extra_body),
    )


def run_settings(given: LoadOptions, probe_duration_s: float | None = None) -> RunSettings:
    """`probe_duration_s`: one run of a search, which then has a warm-up and gives up on hopeless requests.

    Raises:
        ConfigError: an SLO, time or percentile that cannot be read.
    """
    slos = () if given.slo is None else parse_slos(given.slo)
    timeout_s = DEFAULT_TIMEOUT_S if given.timeout is None else parse_seconds("--timeout", given.timeout)
    if probe_duration_s is not None and given.timeout is None:
        timeout_s = min(timeout_s, hopeless_after_s(slos, DEFAULT_TIMEOUT_S))
    return RunSettings(
        slos=slos,
        window=_window(given, probe_duration_s),
        percentiles=_percentiles(given.percentiles),
        timeout_s=timeout_s,
        num_processes=given.processes,
        keep_text=given.keep_text,
        save_detailed=given.save_detailed,
        label=given.label,
    )


def hopeless_after_s(slos: tuple[Slo, ...], otherwise_s: float) -> float:
    """Twice the E2E bound, plus 5 s: a request alive so long has missed its SLOs for certain.

    Without an E2E bound no age is hopeless, since an answer may be of any length.
    """
    bounds = [slo.bound_s for slo in slos if slo.metric is SloMetric.E2E]
    return 2 * min(bounds) + 5.0 if bounds else otherwise_s


def _window(given: LoadOptions, probe_duration_s: float | None) -> Window | SteadyWindow:
    if given.steady:
        if given.warmup is not None or given.cooldown is not None:
            raise ConfigError("--steady finds its own window: leave --warmup and --cooldown out.")
        return SteadyWindow()
    default_s = 0.0 if probe_duration_s is None else probe_duration_s / 6
    warmup_s = default_s if given.warmup is None else parse_seconds("--warmup", given.warmup)
    cooldown_s = 0.0 if given.cooldown is None else parse_seconds("--cooldown", given.cooldown)
    if math.isclose(warmup_s + cooldown_s, 0.0):
        return WHOLE_RUN
    return Window(warmup_s=warmup_s, cooldown_s=cooldown_s)


def parse_seconds(flag: str, text: str) -> float:
    """`90`, `90s`, `1.5m`, `200ms` as seconds.

    Raises:
        ConfigError: not such a time.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(ms|s|m|h|)\s*", text)
    if match is None:
        raise ConfigError(f"{flag} {text}: not a time; write 60, 60s, 1.5m or 200ms.")
    return float(match[1]) * _SECONDS[match[2]]


def _arrival(given: LoadOptions, rate: float | None) -> Arrival:
    text = given.arrival
    if given.closed_loop is not None:
        if text is not None or rate is not None or given.burstiness is not None:
            raise ConfigError("--closed-loop has no arrivals of its own: leave --rate and --arrival out.")
        return arrivals.closed_loop(given.closed_loop)
    if given.burstiness is not None:
        if text is not None:
            raise ConfigError("--burstiness is short for --arrival gamma:B: give only one of the two.")
        text = f"gamma:{given.burstiness}"
    if text is None:
        text = "trace" if given.trace is not None and rate is None else "poisson"
    if text == "poisson" and rate is None:
        raise ConfigError("How fast to offer is missing: give --rate R (open loop) or --closed-loop N.")
    return parse_arrival(text, rate, given.seed)


def _workload(given: LoadOptions, random_offset: bool) -> Workload:
    kinds = {
        "--trace": given.trace,
        "--sharegpt": given.sharegpt,
        "--prefix-groups": given.prefix_groups,
    }
    named = [flag for flag, value in kinds.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are different workloads: give only one of them.")
    think_s = parse_seconds("--think", given.think)
    if given.trace is not None:
        if given.input_tokens is not None or given.output_tokens is not None:
            raise ConfigError("--trace has its own lengths: leave --input-tokens and --output-tokens out.")
        return TraceReplay(
            path=str(given.trace),
            format=given.trace_format,
            speed_up=given.speed_up,
            offset_s=parse_seconds("--trace-offset", given.trace_offset),
            random_offset=random_offset,
            scale=given.scale_lengths,
        )
    output = None if given.output_tokens is None else parse_lengths(given.output_tokens)
    if given.sharegpt is not None:
        turns = 1 if given.turns is None else _whole("--turns", given.turns)
        return ShareGpt(path=str(given.sharegpt), turns=turns, output=output, think_s=think_s)
    output = output or parse_lengths(DEFAULT_OUTPUT)
    input_lengths = parse_lengths(given.input_tokens or DEFAULT_INPUT)
    if given.turns is not None:
        return Chats(
            turns=parse_lengths(given.turns),
            input=input_lengths,
            output=output,
            system_tokens=given.system_tokens,
            think_s=think_s,
            random_think=given.random_think,
        )
    if given.prefix_groups is not None:
        return SharedPrefix(
            input=input_lengths,
            output=output,
            num_groups=given.prefix_groups,
            prefix_tokens=given.prefix_tokens,
            skew=given.prefix_skew,
        )
    return Synthetic(input=input_lengths, output=output)


def _endpoint(given: LoadOptions) -> Endpoint:
    return Endpoint.CHAT if given.turns is not None else given.endpoint


def _whole(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag} {text}: give a whole number of at least 1.")
    return int(text)


def _id_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--ids {text}: give a range of token ids such as 1000-30000.")
    return int(match[1]), int(match[2])


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(item) for item in text.split(",")) or DEFAULT_PERCENTILES
    except ValueError:
        raise ConfigError(f"--percentiles {text}: give numbers such as 50,90,99.") from None


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--extra-body: not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ConfigError('--extra-body: give a JSON object such as {"top_p": 0.9}.')
    return value
