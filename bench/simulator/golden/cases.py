"""What is compared: DistServe's system, restated; its placement in our simulator; elastic pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.load.figures.slo import parse_slos
from bench.simulator.distserve import OPT_13B, DistServeTimes
from bench.simulator.fleet.policies import PolicySpec, parse_policy
from bench.simulator.fleet.request import Request
from bench.simulator.fleet.simulation import Simulation
from bench.simulator.fleet.trial import targets_of
from bench.simulator.golden import reference
from bench.simulator.hardware import Hardware, hardware

SLO = "ttft=200ms,tpot=100ms"
SLOS = parse_slos(SLO)
TARGETS = targets_of(SLOS)
FREE_BYTES_S = 1e15  # a link that takes no time
_DRAIN_S = 1e6


@dataclass(frozen=True, slots=True)
class Reference:
    """DistServe's system with one prefill and one decode instance of such degrees of tensor parallelism."""

    name: str
    prefill: int = 2
    decode: int = 1
    most_keys: int = reference.MOST_KEYS

    @property
    def num_gpus(self) -> int:
        return self.prefill + self.decode

    def serve(self, requests: Sequence[Request]) -> None:
        prefill, decode = (DistServeTimes(OPT_13B[degree]) for degree in (self.prefill, self.decode))
        reference.serve(requests, prefill, decode, self.most_keys)


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers in our simulator; `degrees`: GPUs of each."""

    name: str
    degrees: tuple[int, ...]
    policy: str
    suffix: str = ""  # of the kind: what a mixed step takes
    kv_tokens: int | None = None  # of the last worker, instead of its memory's
    is_link_free: bool = False

    @property
    def num_gpus(self) -> int:
        return sum(self.degrees)

    @property
    def workers(self) -> list[Hardware]:
        workers = [hardware(f"distserve-opt13b-tp{degree}{self.suffix}") for degree in self.degrees]
        if self.is_link_free:
            workers = [replace(one, link_bytes_s=FREE_BYTES_S) for one in workers]
        if self.kv_tokens is not None:
            workers[-1] = replace(workers[-1], kv_tokens=self.kv_tokens)
        return workers

    @property
    def spec(self) -> PolicySpec:
        return parse_policy(self.policy, len(self.degrees))

    def serve(self, requests: Sequence[Request]) -> None:
        policy = self.spec.make(TARGETS, False)
        simulation = Simulation(self.workers, requests, policy, TARGETS.tpot_s, use_prefix_cache=False)
        simulation.run(requests[-1].arrival_s + _DRAIN_S)


Case = Reference | Pool

THEIRS = "static:1p1d:163008"  # whatever waits is one prefill step, as long as the KV has room
PLACEMENTS = tuple(
    Reference(f"theirs, restated: prefill TP{prefill}, decode TP{decode}", prefill, decode)
    for prefill in (1, 2)
    for decode in (1, 2)
)
CASES: tuple[Case, ...] = (
    Reference("theirs, restated"),
    Reference("theirs, restated, keys as the memory allows", most_keys=OPT_13B[1].kv_tokens),
    Pool("ours, their placement, 50,000 keys", (2, 1), THEIRS, kv_tokens=50_000, is_link_free=True),
    Pool("ours, their placement, keys as the memory allows", (2, 1), THEIRS, is_link_free=True),
    Pool("ours, the same with KV over NVLink", (2, 1), THEIRS),
    Pool("elastic, TP2 + TP1, mixed steps: sum", (2, 1), "elastic"),
    Pool("elastic, TP2 + TP1, mixed steps: fused", (2, 1), "elastic", "-fused"),
    Pool("elastic, 4 x TP1, mixed steps: sum", (1, 1, 1, 1), "elastic"),
    Pool("elastic, 4 x TP1, mixed steps: fused", (1, 1, 1, 1), "elastic", "-fused"),
    Pool("elastic, 2 x TP2, mixed steps: sum", (2, 2), "elastic"),
    Pool("elastic, 2 x TP2, mixed steps: fused", (2, 2), "elastic", "-fused"),
    Pool("elastic, 1 x TP4, mixed steps: sum", (4,), "elastic"),
    Pool("elastic, 1 x TP4, mixed steps: fused", (4,), "elastic", "-fused"),
    Pool("colocated chunk 512, 4 x TP1, mixed steps: sum", (1, 1, 1, 1), "colocated:512"),
    Pool("colocated chunk 512, 4 x TP1, mixed steps: fused", (1, 1, 1, 1), "colocated:512", "-fused"),
)
