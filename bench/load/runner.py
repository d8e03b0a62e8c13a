"""One measurement from settings to result: what `run`, `sweep` and `max-goodput` have in common.

1. `build_plan` decides every request.
2. `run_plan` offers it and brings back one record per request. Where they give cause to doubt it, the server
   is asked whether it is still there.
3. `summarize` computes the figures; `build_result` names them.
4. The caller writes, prints, or searches on.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from bench.load.client.pool import DEFAULT_TIMEOUT_S, Progress, StopSwitch, run_plan
from bench.load.client.target import ServerInfo, Target, why_gone
from bench.load.client.topology import Topology, config_hash
from bench.load.figures.metrics import DEFAULT_PERCENTILES, summarize
from bench.load.figures.outage import may_be_gone
from bench.load.figures.slo import Slo
from bench.load.figures.summary import Summary
from bench.load.figures.window import WHOLE_RUN, SteadyWindow, Window
from bench.load.plan import Plan
from bench.load.plans.build import build_plan
from bench.load.plans.settings import PlanSettings
from bench.load.plans.tokenize_client import TokenizeClient
from bench.load.records import RunRecord
from bench.load.results.result import build_result
from bench.machine import cpu_facts

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a plan is offered and measured."""

    slos: tuple[Slo, ...] = ()
    window: Window | SteadyWindow = WHOLE_RUN
    percentiles: tuple[float, ...] = DEFAULT_PERCENTILES
    timeout_s: float = DEFAULT_TIMEOUT_S
    num_processes: int = 1
    keep_text: bool = False
    save_detailed: bool = False
    label: str | None = None
    command: str | None = None  # the command line, for the result


@dataclass(frozen=True, slots=True)
class Measurement:
    plan: Plan
    run: RunRecord
    summary: Summary
    result: dict[str, Any]


def measure(
    plan_settings: PlanSettings,
    settings: RunSettings,
    target: Target,
    environment: dict[str, Any],
    tokenizer: TokenizeClient | None,
    on_progress: OnProgress | None = None,
    stop: StopSwitch | None = None,
) -> Measurement:
    """Offer one plan and compute its result. Whoever gives `stop` owns the signals.

    Raises:
        BatonError: the plan cannot be built. What goes wrong while it is offered is in the records instead.
    """
    plan = build_plan(plan_settings, tokenizer)
    return measure_plan(plan, plan_settings, settings, target, environment, on_progress, stop)


def measure_plan(
    plan: Plan,
    plan_settings: PlanSettings,
    settings: RunSettings,
    target: Target,
    environment: dict[str, Any],
    on_progress: OnProgress | None = None,
    stop: StopSwitch | None = None,
) -> Measurement:
    """Steps 2 and 3, of a plan that was built from `plan_settings`."""
    run = run_plan(
        plan,
        target,
        num_processes=settings.num_processes,
        timeout_s=settings.timeout_s,
        on_progress=on_progress,
        keep_text=settings.keep_text,
        stop=stop,
    )
    if run.is_complete and may_be_gone(run):
        run.server_gone = why_gone(target)
    summary = summarize(run, settings.slos, settings.window, settings.percentiles)
    result = build_result(
        plan,
        run,
        summary,
        environment,
        settings=settings_block(plan_settings, settings),
        label=settings.label,
        save_detailed=settings.save_detailed,
    )
    return Measurement(plan, run, summary, result)


def settings_block(plan: PlanSettings, settings: RunSettings) -> dict[str, Any]:
    """What was asked for and stands nowhere else in a result."""
    return {
        "prompt_form": plan.form.value,
        "temperature": plan.temperature,
        "ignore_eos": plan.ignore_eos,
        "extra_body": plan.extra_body,
        "num_requests": plan.num_requests,
        "duration_s": plan.duration_s,
        "timeout_s": settings.timeout_s,
        "num_processes": settings.num_processes,
        "percentiles": list(settings.percentiles),
        "command": settings.command,
    }


def describe_environment(
    target: Target,
    server: ServerInfo,
    backend: str,
    num_cores: int | None,
    num_accelerators: int,
    topology: Topology | None = None,
) -> dict[str, Any]:
    """The block of the result file that says where a result comes from. Client and server may differ."""
    cpu, isa = cpu_facts()
    return {
        "backend": backend,
        "url": target.url,
        "server": {
            "version": server.version,
            "models": list(server.models),
            "config_hash": config_hash(server, topology),
            "topology": topology,
        },
        "num_cores": num_cores,
        "num_accelerators": num_accelerators,
        "client": {
            "baton": version("baton-serve"),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "cpu": cpu,
            "isa": list(isa),
            "num_cores": len(os.sched_getaffinity(0)),
        },
    }
