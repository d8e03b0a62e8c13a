"""One measurement from settings to result: what `run`, `sweep` and `max-goodput` have in common.

1. `build_plan` decides every request.
2. `run_plan` offers it and brings back one record per request.
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

from bench.load.build import build_plan
from bench.load.metrics import DEFAULT_PERCENTILES, summarize
from bench.load.plan import Plan
from bench.load.pool import DEFAULT_TIMEOUT_S, Progress, run_plan
from bench.load.records import RunRecord
from bench.load.result import build_result
from bench.load.settings import PlanSettings
from bench.load.slo import Slo
from bench.load.summary import Summary
from bench.load.target import ServerInfo, Target
from bench.load.tokenize_client import TokenizeClient
from bench.load.window import WHOLE_RUN, SteadyWindow, Window
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
) -> Measurement:
    """Offer one plan and compute its result.

    Raises:
        BatonError: the plan cannot be built. What goes wrong while it is offered is in the records instead.
    """
    plan = build_plan(plan_settings, tokenizer)
    run = run_plan(
        plan,
        target,
        num_processes=settings.num_processes,
        timeout_s=settings.timeout_s,
        on_progress=on_progress,
        keep_text=settings.keep_text,
    )
    summary = summarize(run, settings.slos, settings.window, settings.percentiles)
    result = build_result(
        plan, run, summary, environment, label=settings.label, save_detailed=settings.save_detailed
    )
    return Measurement(plan, run, summary, result)


def describe_environment(
    target: Target, server: ServerInfo, backend: str, num_cores: int | None, num_accelerators: int
) -> dict[str, Any]:
    """The block of the result file that says where a result comes from. Client and server may differ."""
    cpu, isa = cpu_facts()
    return {
        "backend": backend,
        "url": target.url,
        "server": {"version": server.version, "models": list(server.models)},
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
