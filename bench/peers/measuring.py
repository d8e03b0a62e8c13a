"""One measurement of a running server, with what the machine did meanwhile."""

from __future__ import annotations

from bench.load.plan import Plan
from bench.load.plans.settings import PlanSettings
from bench.load.runner import Measurement, RunSettings, describe_environment, measure_plan
from bench.peers.server import Running, descendants
from bench.quiet import CpuUse, quick_gflop_per_s

# Of a result: cores busy for others than this server and its client, cores that the machine's host took away,
# both on average; and how fast the machine was just before.
MEANWHILE = ("others_cores", "stolen_cores", "fp32_gflop_per_s_before")


def measure_aware(
    running: Running, plan: Plan, settings: PlanSettings, how: RunSettings, backend: str
) -> Measurement:
    """What the machine did meanwhile is in the result (`MEANWHILE`)."""
    environment = describe_environment(running.target, running.info, backend, None, 0)
    speed, pids = quick_gflop_per_s(), descendants(running.pid)
    before = CpuUse.begin(pids)
    measurement = measure_plan(plan, settings, how, running.target, environment)
    others_cores, stolen_cores = before.others(CpuUse.begin(pids))
    values = (others_cores, stolen_cores, speed)
    measurement.result.update(zip(MEANWHILE, (round(value, 3) for value in values), strict=True))
    return measurement
