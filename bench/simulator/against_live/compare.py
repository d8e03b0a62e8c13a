"""Live and simulated figures side by side: quantiles of the same requests, and their ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from bench.simulator.against_live.measured import World
from bench.simulator.against_live.processes import replay_processes
from bench.simulator.against_live.recording import Phase, Served
from bench.simulator.against_live.replay import Answer, replay
from cluster.slo_classes import DEFAULT_TARGETS

SHARES = (50, 90)
WITHIN = 0.10

Lengths = Sequence[tuple[int, int]]  # (prompt, answer)
Replay = Callable[[World, Phase, int, Lengths], list[Answer]]

SIMULATORS: dict[str, Replay] = {
    "pool": lambda world, phase, size, history: replay(world, phase.arrivals, size, history),
    "processes": lambda world, phase, size, history: replay_processes(world, phase.arrivals, size),
}


def compare(phase: Phase, world: World, block_size: int, history: Lengths = ()) -> dict[str, Any]:
    """Of the requests that were served live; the simulated runs have all that were offered. `history`: of
    what the cluster had served before; routers learn from it how long answers are."""
    return {
        "load": phase.load.name,
        "rate": phase.load.rate,
        "num_offered": len(phase.arrivals),
        "num_served": len(phase.requests),
        "others_cores": phase.others_cores,
        "stolen_cores": phase.stolen_cores,
        "local_live": _share_local(phase.requests),
        "simulated": {
            name: _against(phase, simulate(world, phase, block_size, history))
            for name, simulate in SIMULATORS.items()
        },
    }


def _against(phase: Phase, answers: Sequence[Answer]) -> dict[str, Any]:
    by_arrival = {arrival[0]: answer for arrival, answer in zip(phase.arrivals, answers, strict=True)}
    pairs = [(one, by_arrival[one.scheduled_s]) for one in phase.requests]
    figures: dict[str, Any] = {}
    for name in ("ttft", "tpot"):
        live = _present(getattr(one, f"{name}_s") for one, _ in pairs)
        simulated = _present(getattr(answer, f"{name}_s") for _, answer in pairs)
        for share in SHARES:
            measured_s, predicted_s = np.percentile(live, share), np.percentile(simulated, share)
            figures[f"{name}_p{share}"] = {
                "live_ms": float(measured_s * 1e3),
                "simulated_ms": float(predicted_s * 1e3),
                "ratio": float(predicted_s / measured_s),
            }
    return {
        "figures": figures,
        "local": _share_local([answer for _, answer in pairs]),
        "within": all(abs(one["ratio"] - 1) <= WITHIN for one in figures.values()),
    }


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _share_local(requests: Sequence[Served] | Sequence[Answer]) -> float:
    return sum(one.is_local for one in requests) / len(requests)


def capacity(world: World, lengths: Lengths, rate: float, block_size: int) -> float:
    """The highest rate, by the simulated pool, at which 90 % are within the default targets: what loads are
    shares of. `rate` is where to begin."""
    low, high = 0.0, rate
    while _is_met(world, lengths, high, block_size):
        low, high = high, 2 * high
    for _ in range(6):
        middle = (low + high) / 2
        if _is_met(world, lengths, middle, block_size):
            low = middle
        else:
            high = middle
    return low


def _is_met(world: World, lengths: Lengths, rate: float, block_size: int) -> bool:
    rng = np.random.default_rng(0)
    times_s = np.cumsum(rng.exponential(1 / rate, len(lengths))).tolist()
    arrivals = [(time_s, *pair) for time_s, pair in zip(times_s, lengths, strict=True)]
    answers = replay(world, arrivals, block_size)
    return sum(map(_is_good, answers)) >= 0.9 * len(answers)


def _is_good(answer: Answer) -> bool:
    targets = DEFAULT_TARGETS
    return answer.ttft_s <= targets.ttft_s and (answer.tpot_s or 0.0) <= targets.tpot_s


HEADER = (
    f"{'layout':<11}{'load':<6}{'req/s':>6}{'requests':>9}{'others':>8}  {'simulator':<11}"
    + "".join(f"{name:>24}" for name in ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90"))
    + "   live / simulated ms (ratio); others: cores that were not this run's"
)


def text_lines(layout: str, result: dict[str, Any]) -> list[str]:
    lines = []
    for name, simulated in result["simulated"].items():
        cells = "".join(
            f"{one['live_ms']:>9.1f} /{one['simulated_ms']:>7.1f} ({one['ratio']:.2f})"
            for one in simulated["figures"].values()
        )
        others = result["others_cores"] + result["stolen_cores"]
        head = f"{layout:<11}{result['load']:<6}{result['rate']:>6.2f}{result['num_served']:>9}{others:>8.2f}"
        lines.append(f"{head}  {name:<11}{cells}")
    return lines
