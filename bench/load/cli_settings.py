"""What the options mean: settings of a plan and of how it is offered and measured. Pure; a server adds its
model later (`cli_session`).
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import orjson

from bench.load.cli_checks import check_options, parse_percentiles
from bench.load.cli_load import DEFAULT_INPUT, DEFAULT_OUTPUT, LoadOptions
from bench.load.client.pool import DEFAULT_TIMEOUT_S
from bench.load.figures.slo import Slo, SloMetric, parse_slos
from bench.load.figures.window import WHOLE_RUN, SteadyWindow, Window
from bench.load.plan import Arrival
from bench.load.plans import arrivals
from bench.load.plans.arrival_text import parse_arrival
from bench.load.plans.lengths import parse_lengths
from bench.load.plans.settings import (
    Chats,
    Endpoint,
    PlanSettings,
    PromptForm,
    SharedPrefix,
    ShareGpt,
    Synthetic,
    TraceReplay,
    Workload,
)
from bench.load.plans.settings_check import check_settings
from bench.load.runner import RunSettings
from cluster.errors import ConfigError

MAX_SECONDS = 1e9
_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def plan_settings(
    given: LoadOptions,
    *,
    rate: float | None = None,
    duration_s: float | None = None,
    random_offset: bool = False,
) -> PlanSettings:
    """`rate` and `duration_s` stand in for the options of the same name; with `random_offset` each seed takes
    another part of the trace. The model is not known yet.

    Raises:
        ConfigError: options that contradict each other or cannot be read.
    """
    check_options(given)
    if duration_s is None and given.duration is not None:
        duration_s = parse_seconds("--duration", given.duration)
    if duration_s is not None and not duration_s > 0:
        raise ConfigError(f"--duration {given.duration}: give a time above 0.")
    arrival = _arrival(given, given.rate if rate is None else rate)
    if given.requests is None and duration_s is None and given.trace is None and arrival.kind != "piecewise":
        is_endless = arrival.kind not in ("closed-loop", "burst")
        more = ", --duration SECONDS, or both" if is_endless else ""
        raise ConfigError(f"How much to offer is missing: give --requests N{more}.")
    if given.requests is not None and given.duration is not None and arrival.kind == "burst":
        raise ConfigError("--arrival burst offers everything at once: leave --duration out.")
    prompt = PromptForm.TEXT if given.prompt is None and given.sharegpt is not None else given.prompt
    settings = PlanSettings(
        model="",
        arrival=arrival,
        workload=_workload(given, random_offset),
        endpoint=Endpoint.CHAT if given.turns is not None else given.endpoint,
        prompt_form=prompt,
        num_requests=given.requests,
        duration_s=duration_s,
        max_model_len=given.max_model_len,
        oversize=given.oversize,
        id_range=_id_range(given.ids),
        seed=given.seed,
        salt=time.time_ns() if given.salt is None else given.salt,
        temperature=given.temperature,
        ignore_eos=not given.allow_stop,
        extra_body=_extra_body(given.extra_body),
    )
    check_settings(settings, has_server=True)
    return settings


def run_settings(given: LoadOptions, probe_duration_s: float | None = None) -> RunSettings:
    """`probe_duration_s`: one run of a search, which then has a warm-up and gives up on hopeless requests.

    Raises:
        ConfigError: an SLO, time or percentile that cannot be read.
    """
    slos = () if given.slo is None else parse_slos(given.slo)
    timeout_s = DEFAULT_TIMEOUT_S if given.timeout is None else parse_seconds("--timeout", given.timeout)
    if not timeout_s > 0:
        raise ConfigError(f"--timeout {given.timeout}: give a time above 0.")
    if probe_duration_s is not None and given.timeout is None:
        timeout_s = min(timeout_s, hopeless_after_s(slos, DEFAULT_TIMEOUT_S))
    return RunSettings(
        slos=slos,
        window=_window(given, probe_duration_s),
        percentiles=parse_percentiles("--percentiles", given.percentiles),
        timeout_s=timeout_s,
        num_processes=given.processes,
        keep_text=given.keep_text,
        save_detailed=given.save_detailed,
        label=given.label,
        command=command_line(sys.argv, os.environ.get(given.api_key_env)),
    )


def command_line(arguments: Sequence[str], api_key: str | None) -> str:
    """As one would type it again; the key, should it be in there, is not shown."""
    text = shlex.join(arguments)
    return text.replace(api_key, "***") if api_key else text


def hopeless_after_s(slos: tuple[Slo, ...], otherwise_s: float) -> float:
    """Twice the E2E bound, plus 5 s: a request alive so long has missed its SLOs for certain.

    Without an E2E bound no age is hopeless, since an answer may be of any length.
    """
    bounds = [slo.bound_s for slo in slos if slo.metric is SloMetric.E2E]
    return 2 * min(bounds) + 5.0 if bounds else otherwise_s


def parse_seconds(name: str, text: str) -> float:
    """`90`, `90s`, `1.5m`, `200ms` as seconds.

    Raises:
        ConfigError: not such a time, or one that no clock reaches.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(ms|s|m|h|)\s*", text)
    if match is None:
        raise ConfigError(f"{name} {text}: not a time; write 60, 60s, 1.5m or 200ms.")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > MAX_SECONDS:
        raise ConfigError(f"{name} is above {MAX_SECONDS:,.0f} s (30 years): give that or less.")
    return seconds


def _window(given: LoadOptions, probe_duration_s: float | None) -> Window | SteadyWindow:
    if given.steady:
        return SteadyWindow()
    default_s = 0.0 if probe_duration_s is None else probe_duration_s / 6
    warmup_s = default_s if given.warmup is None else parse_seconds("--warmup", given.warmup)
    cooldown_s = 0.0 if given.cooldown is None else parse_seconds("--cooldown", given.cooldown)
    if math.isclose(warmup_s + cooldown_s, 0.0):
        return WHOLE_RUN
    duration_s = probe_duration_s
    if duration_s is None and given.duration is not None:
        duration_s = parse_seconds("--duration", given.duration)
    if duration_s is not None and warmup_s + cooldown_s >= duration_s:
        raise ConfigError(
            f"{warmup_s:g} s of warm-up and {cooldown_s:g} s of cool-down leave nothing to measure of "
            f"{duration_s:g} s: give a longer --duration, or leave out less."
        )
    return Window(warmup_s=warmup_s, cooldown_s=cooldown_s)


def _arrival(given: LoadOptions, rate: float | None) -> Arrival:
    """A trace keeps its own rhythm, at the rate if there is one, unless another arrival is named."""
    if given.closed_loop is not None:
        return arrivals.closed_loop(given.closed_loop)
    text = given.arrival
    if given.burstiness is not None:
        text = f"gamma:{given.burstiness}"
    if text is None:
        text = "trace" if given.trace is not None else "poisson"
    if text == "poisson" and rate is None:
        raise ConfigError("How fast to offer is missing: give --rate R (open loop) or --closed-loop N.")
    return parse_arrival(text, rate, given.seed)


def _workload(given: LoadOptions, random_offset: bool) -> Workload:
    think_s = parse_seconds("--think", given.think)
    if given.trace is not None:
        offset_s = parse_seconds("--trace-offset", given.trace_offset)
        if random_offset and offset_s:
            raise ConfigError(
                "max-goodput takes another part of the trace for each seed: leave --trace-offset out."
            )
        return TraceReplay(
            path=str(given.trace),
            format=given.trace_format,
            speed_up=given.speed_up,
            offset_s=offset_s,
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


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name} {text}: give a whole number of at least 1.")
    return int(text)


def _id_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--ids {text}: give a range of token ids such as 1000-30000.")
    return int(match[1]), int(match[2])


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra-body: not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ConfigError('--extra-body: give a JSON object such as {"top_p": 0.9}.')
    try:
        orjson.dumps(value)  # as it will be sent
    except TypeError as error:
        raise ConfigError(f"--extra-body: it cannot be sent ({error}).") from None
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
