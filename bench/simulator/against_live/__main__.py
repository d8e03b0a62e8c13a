"""Simulated against live: `python -m bench.simulator.against_live --recordings DIR [--again] [--out FILE]`.

1. For each layout `baton serve` is started on this machine; two short phases measure it (`measured`).
2. The simulator says its capacity, at the speed of that minute; loads of 20, 35 and 50 % of it are offered as
   `baton bench run` would (open loop, Poisson), and every request is recorded: DIR/LAYOUT.json.
3. The recorded arrivals and lengths run in both simulators (`replay`: the pool of `baton simulate --trace`;
   `processes`: that of `--faults`), and the figures are compared. `--again` does this alone, for recordings
   that are there.

Of a load itself the simulators know when what arrived, and how long steps took from one half second to the
next (`measured`); how long requests took is used for nothing but the comparison. Exit code 1: a quantile of
TTFT or TPOT in the pool is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.load.client.target import parse_target, probe
from bench.load.plans.lengths import parse_lengths
from bench.load.results.files import json_safe, write_atomically
from bench.machine import cpu_facts
from bench.served import ServedCluster
from bench.simulator.against_live.compare import HEADER, WITHIN, capacity, compare, text_lines
from bench.simulator.against_live.measured import BOTH, DECODE, check, is_quiet, world_of
from bench.simulator.against_live.recording import Load, Phase, Recording, record_phase, seen
from cluster.errors import BatonError

LAYOUTS = {"colocated": ("--prefill", "0", "--decode", "1"), "1p1d": ("--prefill", "1", "--decode", "1")}
BLOCK_TOKENS = 32
MOST_TRIES = 4  # of a phase that measures the machine
INPUT = "lognormal:mean=96,sigma=0.6,min=16,max=400"
OUTPUT = "lognormal:mean=40,sigma=0.6,min=4,max=160"
MEASURING = (
    Load(
        name=DECODE, input="uniform:60-240", output="uniform:100-260", closed_loop=8, num_requests=8, seed=102
    ),
    Load(name=BOTH, input=INPUT, output=OUTPUT, closed_loop=10, num_requests=160, seed=103),
)


def record(
    layout: str, options: Sequence[str], fractions: Sequence[float], seconds: float, seed: int
) -> Recording:
    arguments = ["--model", "demo", "--launcher", "local", *options, *LAYOUTS[layout]]
    with ServedCluster(arguments) as cluster:
        server = probe(parse_target(cluster.url))
        started_with = seen(cluster.get("/cluster"))

        def offer(load: Load) -> Phase:
            print(f"{layout}: {load.name}", file=sys.stderr, flush=True)
            return record_phase(cluster, server.model, server.max_model_len, load)

        def measured(load: Load) -> Phase:
            """Before anything takes longer; again while others use the machine."""
            phase = offer(load)
            for _ in range(MOST_TRIES - 1):
                if is_quiet(phase):
                    break
                phase = offer(load)
            check(phase)
            return phase

        recording = Recording(
            layout=layout,
            arguments=arguments,
            cpu=cpu_facts()[0],
            started_with=started_with,
            measuring={load.name: measured(load) for load in MEASURING},
            loads=[],
        )
        most = capacity(world_of(recording), _lengths(), 1.0, BLOCK_TOKENS)
        print(f"{layout}: the simulator serves {most:.2f} requests per second", file=sys.stderr, flush=True)
        for index, fraction in enumerate(fractions):
            load = Load(
                name=f"{fraction:.0%}",
                input=INPUT,
                output=OUTPUT,
                rate=round(fraction * most, 3),
                seconds=seconds,
                seed=seed + index,
            )
            recording.loads.append(offer(load))
    return recording


def _lengths() -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    prompts, answers = (parse_lengths(text).draw(rng, 800).tolist() for text in (INPUT, OUTPUT))
    return list(zip(prompts, answers, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recordings", type=Path, required=True, help="directory of LAYOUT.json")
    parser.add_argument("--again", action="store_true", help="compare what was recorded; nothing is served")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.2, 0.35, 0.5])
    parser.add_argument("--seconds", type=float, default=75.0, help="of each load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quantization", default="int8", help="of the server: int8 or none")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    results = []
    print(HEADER)
    for layout in given.layouts:
        path = given.recordings / f"{layout}.json"
        if not given.again:
            recorded = record(
                layout, ["--quantization", given.quantization], given.fractions, given.seconds, given.seed
            )
            given.recordings.mkdir(parents=True, exist_ok=True)
            write_atomically(path, [msgspec.json.encode(recorded), b"\n"])
        results.append(_compared(_read(path)))
    if given.out is not None:
        result = {"kind": "simulated-against-live", "within": WITHIN, "layouts": results}
        write_atomically(given.out, [json.dumps(json_safe(result), indent=1).encode(), b"\n"])
    return int(not all(load["simulated"]["pool"]["within"] for one in results for load in one["loads"]))


def _compared(recording: Recording) -> dict[str, Any]:
    world = world_of(recording)
    loads = []
    ended = [one for name in (DECODE, BOTH) for one in recording.measuring[name].requests]
    for phase in recording.loads:
        history = [(one.input_tokens, one.output_tokens) for one in ended]
        loads.append(compare(phase, world_of(recording, phase), BLOCK_TOKENS, history))
        ended += phase.requests
        for line in text_lines(recording.layout, loads[-1]):
            print(line, flush=True)
    workers = [
        {"role": one.role.value, "step_model": one.model_at(0.0), "num_blocks": one.num_blocks}
        for one in world.workers
    ]
    return {
        "layout": recording.layout,
        "serve": recording.arguments,
        "cpu": recording.cpu,
        "world": {
            "workers": msgspec.to_builtins(workers),
            "front_ms": world.front_s * 1e3,
            "tail_ms": world.tail_s * 1e3,
            "kv_tokens_per_s": world.tokens_s,
        },
        "loads": loads,
    }


def _read(path: Path) -> Recording:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recording)
    except OSError as error:
        raise BatonError(
            f"{path} cannot be read ({error.strerror}): record it first, without --again"
        ) from None
    except msgspec.DecodeError as error:
        raise BatonError(f"{path} is no recording: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
