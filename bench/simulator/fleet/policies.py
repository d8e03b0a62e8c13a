"""The policy that a text names: `elastic`, `colocated:CHUNK[:OPTION...]`, `static:XpYd[:OPTION...]`.

Options: `srf` or `fcfs` (order of prompts), `rr` or `least` (choice of workers), and for static a number: the
tokens of prompts in a step of a prefill worker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from bench.simulator.fleet.elastic import ElasticPolicy
from bench.simulator.fleet.fixed import STATIC_CHUNK, FixedPolicy, FixedSettings
from bench.simulator.fleet.simulation import Policy
from cluster.errors import ConfigError
from cluster.slo_classes import Targets

FORMS = "`elastic`, `colocated:CHUNK` (such as colocated:512) or `static:XpYd` (such as static:8p8d)"
_SPLIT = re.compile(r"(\d{1,9})p(\d{1,9})d", re.ASCII)
_TOKENS = re.compile(r"\d{1,9}", re.ASCII)


class SimulatedPolicy(Policy, Protocol):
    def facts(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """`fixed` None: elastic."""

    text: str
    fixed: FixedSettings | None

    def make(self, targets: Targets, use_prefix_cache: bool) -> SimulatedPolicy:
        if self.fixed is None:
            return ElasticPolicy(targets, use_prefix_cache=use_prefix_cache)
        return FixedPolicy(self.fixed)


def parse_policy(text: str, num_workers: int) -> PolicySpec:
    """
    Raises:
        ConfigError: the text names no policy, or one that this pool cannot run.
    """
    name, *parts = text.strip().split(":")
    if name == "elastic":
        if parts:
            raise ConfigError(f"--policy `{text}`: elastic has no options; it tunes itself")
        return PolicySpec(text, None)
    if name not in ("colocated", "static") or not parts:
        raise ConfigError(f"--policy `{text}` is unknown: use {FORMS}")
    first, *options = parts
    flags = {option for option in options if option in ("srf", "fcfs", "rr", "least")}
    numbers = [option for option in options if option not in flags]
    if {"srf", "fcfs"} <= flags or {"rr", "least"} <= flags:
        raise ConfigError(f"--policy `{text}`: two options contradict each other; keep one")
    shared = {"is_shortest_first": "srf" in flags, "is_round_robin": "rr" in flags}
    if name == "colocated":
        if numbers:
            raise ConfigError(f"--policy `{text}`: unknown option `{numbers[0]}`; use fcfs, srf, least, rr")
        return PolicySpec(text, FixedSettings(_chunk(text, first), **shared))
    split = _SPLIT.fullmatch(first)
    if split is None:
        raise ConfigError(f"--policy `{text}`: `{first}` is no split; write it like static:8p8d")
    num_prefill, num_decode = int(split[1]), int(split[2])
    if num_prefill < 1 or num_decode < 1:
        raise ConfigError(f"--policy `{text}`: a static split needs a worker of each role at least")
    if num_prefill + num_decode != num_workers:
        raise ConfigError(
            f"--policy `{text}`: {num_prefill} + {num_decode} workers, but the pool has {num_workers}"
        )
    if len(numbers) > 1:
        raise ConfigError(f"--policy `{text}`: unknown option `{numbers[1]}`; use fcfs, srf, least, rr")
    chunk = _chunk(text, numbers[0]) if numbers else STATIC_CHUNK
    return PolicySpec(text, FixedSettings(chunk, num_prefill, **shared))


def _chunk(text: str, number: str) -> int:
    if _TOKENS.fullmatch(number) is None or not 1 <= int(number) <= 10**6:
        raise ConfigError(f"--policy `{text}`: `{number}` is no number of tokens; give 1 to 1000000")
    return int(number)
