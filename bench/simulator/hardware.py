"""What a simulated worker is made of: how long its steps take, how much KV it holds, how fast its link is.

Named kinds and where their numbers come from:

- `h100-llama3-8b`, `h20-llama3-8b`: Llama-3-8B in bf16 on one GPU,
  `step = 0.9 ms + max(5.0 ms, 19.1 us m) + 46.8 ns ctx + 1.05 ns att` (H20: 4.2 ms, 128 us, 39.2 ns, 7 ns):
  a rough model from memory bandwidth and arithmetic, not a measurement. KV: 128 KiB per token; its capacity
  is 90 % of the card (80 and 96 GB) less 16 GB of weights.
- `a100-opt13b`: OPT-13B in fp16 on one A100 of 80 GB, estimated in the same way (26 GB at 2 TB/s, 26 GFLOP
  per token at 70 % of 312 TFLOP/s, 800 KiB of KV per token).
- `distserve-opt13b-tp1`, `-tp2`, `-tp4`: the same model with DistServe's fitted coefficients, one worker on
  so many A100s; steps take what `bench.simulator.distserve` says, policies plan with a model fitted to that.
  A mixed step takes as long as both of its halves; with `-fused` it reads the weights once.

A CSV table of operator latencies (`bench.simulator.operators`) is Llama-3-8B on one GPU: steps take what the
table says, policies plan with a model fitted to that; the rest is as in `h100-llama3-8b`.

A file from a calibration (`{"fixed_s", "floor_s", "per_token_s", "per_context_s", "per_attention_s"}`, and
perhaps "kv_tokens", "kv_bytes_per_token", "link_bytes_s", "mixed_s") is a kind of its own. The step model may
also be an object of its own, "step_model". Other keys are refused: one that is misspelt would do nothing.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from bench.simulator import operators
from bench.simulator.distserve import (
    KV_BYTES_PER_TOKEN,
    NVLINK_BYTES_S,
    OPT_13B,
    DistServeTimes,
    MixedSteps,
    learned_model,
)
from cluster.errors import ConfigError
from cluster.step_model import StepModel, StepWork

_COUNTED = re.compile(r"(.*):(-?[0-9]{1,12})")
COEFFICIENTS = ("fixed_s", "floor_s", "per_token_s", "per_context_s", "per_attention_s")
POOL_KEYS = ("kv_tokens", "kv_bytes_per_token", "link_bytes_s")
DEFAULT_LINK_BYTES_S = 50e9  # a 400 Gbit/s NIC per GPU
MAX_WORKERS = 100_000  # of a pool
HANDOFF_S = 0.5e-3  # control messages of a handoff, beside the transfer


class StepTimes(Protocol):
    """What steps take where that is not the model that policies plan with."""

    def step_s(self, num_rows: int, context: int, num_chunk_tokens: int, attention: float) -> float: ...

    def growth_s(self, num_rows: int, context: int) -> float:
        """What each step of a run of decode steps takes longer than the one before."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of worker. `times` None: steps take what `model` says."""

    name: str
    model: StepModel
    kv_tokens: int  # tokens of KV it holds
    kv_bytes_per_token: int
    link_bytes_s: float  # each way
    times: StepTimes | None = None

    def step_s(self, num_rows: int, context: int, num_chunk_tokens: int, attention: float) -> float:
        """Seconds of a step of rows that read `context` keys in all, and chunks of `attention` pairs."""
        if self.times is not None:
            return self.times.step_s(num_rows, context, num_chunk_tokens, attention)
        return self.model.step_s(StepWork(num_rows + num_chunk_tokens, context, attention))

    def growth_s(self, num_rows: int, context: int) -> float:
        """See `StepTimes`."""
        if self.times is not None:
            return self.times.growth_s(num_rows, context)
        return self.model.per_context_s * num_rows


KINDS = {
    kind.name: kind
    for kind in (
        Hardware(
            "h100-llama3-8b",
            StepModel(0.9e-3, 5.0e-3, 19.1e-6, 46.8e-9, 1.05e-9),
            430_000,
            131_072,
            DEFAULT_LINK_BYTES_S,
        ),
        Hardware(
            "h20-llama3-8b",
            StepModel(0.9e-3, 4.2e-3, 128e-6, 39.2e-9, 7.0e-9),
            540_000,
            131_072,
            DEFAULT_LINK_BYTES_S,
        ),
        Hardware(
            "a100-opt13b",
            StepModel(1.5e-3, 13.6e-3, 115e-6, 480e-9, 5e-9),
            55_000,
            819_200,
            25e9,
        ),
    )
}


DISTSERVE = {
    f"distserve-opt13b-tp{degree}{suffix}": (degree, mixed)
    for suffix, mixed in (("", MixedSteps.SUM), ("-fused", MixedSteps.FUSED))
    for degree in OPT_13B
}


@cache
def distserve_hardware(name: str) -> Hardware:
    """One of `DISTSERVE`."""
    degree, mixed = DISTSERVE[name]
    times = DistServeTimes(OPT_13B[degree], mixed)
    return Hardware(
        name,
        learned_model(times),
        OPT_13B[degree].kv_tokens,
        KV_BYTES_PER_TOKEN,
        NVLINK_BYTES_S,
        times=times,
    )


def parse_pool(text: str, num_workers: int | None) -> list[Hardware]:
    """The workers of `KIND[:COUNT],...`, one entry each, in the order given.

    Raises:
        ConfigError: an unknown kind, a broken file, a count that is none, counts that do not add up to
            `num_workers`, or a pool without workers or of too many.
    """
    if num_workers is not None and num_workers <= 0:
        raise ConfigError(f"--workers {num_workers}: a pool needs at least one worker")
    pool: list[Hardware] = []
    known: dict[str, Hardware] = {}  # a file is read once, so its workers are of one kind
    parts = _parts(text)
    for name, count in parts:
        if name not in known:
            known[name] = hardware(name)
        if count is None:
            if len(parts) > 1:
                raise ConfigError(
                    f"--hardware `{name}`: with several kinds give each a count, as in {name}:8"
                )
            count = 1 if num_workers is None else num_workers
        if count <= 0:
            raise ConfigError(
                f"--hardware `{name}:{count}`: a kind needs at least one worker, or leave it out"
            )
        if len(pool) + count > MAX_WORKERS:
            which = f"--hardware `{text}`" if num_workers is None else f"--workers {num_workers}"
            raise ConfigError(f"{which}: a pool has at most {MAX_WORKERS:,} workers")
        pool += [known[name]] * count
    if num_workers is not None and len(pool) != num_workers:
        raise ConfigError(f"--workers {num_workers}, but --hardware `{text}` has {len(pool)} workers")
    return pool


def calibration_files(text: str) -> list[Path]:
    """Those among the kinds of `KIND[:COUNT],...`."""
    return [Path(name) for name, _ in _parts(text) if name not in KINDS and name not in DISTSERVE]


def names_of(pool: Sequence[Hardware]) -> dict[Hardware, str]:
    """The kinds of a pool, in their order, with a name for each that no other has: calibrations in different
    folders may have one file name."""
    names: dict[Hardware, str] = {}
    taken = {kind.name for kind in pool}
    for kind in dict.fromkeys(pool):
        name, number = kind.name, 1
        while name in names.values() or (number > 1 and name in taken):
            number += 1
            name = f"{kind.name} ({number})"
        names[kind] = name
    return names


def _parts(text: str) -> list[tuple[str, int | None]]:
    """(kind, count) of each part.

    Raises:
        ConfigError: a part names no kind.
    """
    parts: list[tuple[str, int | None]] = []
    for part in text.split(","):
        found = _COUNTED.fullmatch(part.strip())
        name, count = (found[1], int(found[2])) if found is not None else (part.strip(), None)
        if not name:
            raise ConfigError(f"--hardware `{text}`: a kind is missing; write KIND or KIND:COUNT,KIND:COUNT")
        parts.append((name, count))
    return parts


def hardware(name: str) -> Hardware:
    """A named kind, or one read from a file.

    Raises:
        ConfigError: neither.
    """
    known = KINDS.get(name)
    if known is not None:
        return known
    if name in DISTSERVE:
        return distserve_hardware(name)
    if name.endswith(".csv"):
        return _from_operators(Path(name))
    if not name.endswith(".json") and not os.path.isfile(name):
        names = ", ".join([*KINDS, *DISTSERVE])
        raise ConfigError(
            f"--hardware `{name}` is unknown: use {names}, a calibration's JSON file, "
            "or a CSV file of operator latencies"
        )
    return _from_file(Path(name))


def _from_operators(path: Path) -> Hardware:
    base = KINDS["h100-llama3-8b"]
    times = operators.read_times(path, base.model.fixed_s)
    model = operators.learned_model(times, base.model)
    if model.per_token_s <= 0:
        raise ConfigError(
            f"--hardware {path}: by these latencies tokens cost a step nothing; measure larger m"
        )
    link_bytes_s = base.link_bytes_s if times.link_bytes_s is None else times.link_bytes_s
    return Hardware(path.stem, model, base.kv_tokens, base.kv_bytes_per_token, link_bytes_s, times)


def _from_file(path: Path) -> Hardware:
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--hardware {path}: the file cannot be read: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--hardware {path}: not a calibration: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"--hardware {path}: not a calibration: write an object with {', '.join(COEFFICIENTS)}"
        )
    inner = raw.get("step_model", raw)
    if not isinstance(inner, dict):
        raise ConfigError(f"--hardware {path}: `step_model` is not an object with {', '.join(COEFFICIENTS)}")
    model_keys = (*COEFFICIENTS, "mixed_s")
    if inner is raw:
        _check_keys(path, raw, (*model_keys, *POOL_KEYS))
    else:
        _check_keys(path, raw, ("step_model", "mixed_s", *POOL_KEYS))
        _check_keys(path, inner, model_keys)
    values = {name: _number(path, inner, name) for name in COEFFICIENTS}
    if values["per_token_s"] <= 0 or values["fixed_s"] + values["floor_s"] <= 0:
        raise ConfigError(
            f"--hardware {path}: a step would take no time; per_token_s and fixed_s + floor_s must be above 0"
        )
    return Hardware(
        name=path.stem,
        model=StepModel(**values, mixed_s=_mixed_s(path, raw, inner)),
        kv_tokens=int(_positive(path, raw, "kv_tokens", 200_000)),
        kv_bytes_per_token=int(_number(path, raw, "kv_bytes_per_token", 131_072)),
        link_bytes_s=_positive(path, raw, "link_bytes_s", DEFAULT_LINK_BYTES_S),
    )


def _check_keys(path: Path, raw: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in raw:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            meant = f" (did you mean `{close[0]}`?)" if close else ""
            raise ConfigError(f"--hardware {path}: unknown key `{key}`{meant}; use {', '.join(known)}")


def _mixed_s(path: Path, raw: dict[str, Any], inner: dict[str, Any]) -> float:
    return _number(path, raw if "mixed_s" in raw else inner, "mixed_s", 0.0)


def _positive(path: Path, raw: dict[str, Any], name: str, default: float) -> float:
    value = _number(path, raw, name, default)
    if value <= 0:
        raise ConfigError(f"--hardware {path}: `{name}` is {value:g}; give a number above 0, or leave it out")
    return value


def _number(path: Path, raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name, default)
    if value is None:
        raise ConfigError(f"--hardware {path}: the calibration lacks `{name}`; run it again")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"--hardware {path}: `{name}` is {value!r}, not a number of 0 or more")
    return float(value)
