"""The live router and the simulated pool decide equally for the same view.

A pool with the live cluster's roles serves requests in simulated time. At each arrival a live router's book
is told, in heartbeats, what the simulated workers would report at that moment; both place the request.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.simulator.fleet.elastic import ElasticPolicy
from bench.simulator.fleet.request import Request
from bench.simulator.fleet.simulation import Simulation
from bench.simulator.hardware import KINDS, Hardware
from cluster.ids import WorkerId
from cluster.slo_classes import Targets
from cluster.wire.messages import Role, WorkerLoad, WorkerState
from router.config import PolicyConfig
from router.elastic import ElasticSettings
from router.policy import Elastic, Placement, PlacementRequest
from router.worker_book import WorkerBook
from tests.router.conductor_peers import make_register

H100, H20 = KINDS["h100-llama3-8b"], KINDS["h20-llama3-8b"]
P, D = Role.PREFILL, Role.DECODE
TARGETS = Targets(0.5, 0.025)
CONFIG = PolicyConfig(growth_tokens=0, edge_bytes_s=H100.link_bytes_s)


class Shadow(ElasticPolicy):
    """The simulated policy; a live router decides beside it."""

    def __init__(self, pool: list[Hardware], roles: list[Role], targets: Targets) -> None:
        super().__init__(targets, roles=roles, use_prefix_cache=False)
        self.outcomes: Counter[str] = Counter()
        self._live = Elastic(CONFIG, targets)
        self._names = [WorkerId(f"{role.value}-{index}") for index, role in enumerate(roles)]
        self._book = WorkerBook(stall_timeout_s=1e9, config=CONFIG)
        for name, role, hardware in zip(self._names, roles, pool, strict=True):
            register = make_register(name, role, num_blocks=hardware.kv_tokens, max_num_seqs=10**6)
            geometry = msgspec.structs.replace(register.geometry, block_size=1)
            self._book.join(msgspec.structs.replace(register, geometry=geometry, max_model_len=10**9), 0.0)
            self._book.view().kv_bytes_per_token = hardware.kv_bytes_per_token

    def arrive(self, request: Request, now: float) -> int | None:
        live = self._live.place(self._tell(now), self._question(request), now)
        where = super().arrive(request, now)
        if not isinstance(live, Placement):
            self.outcomes[live.reason.value] += 1
            return where
        prefill, decode = self._names[request.prefill_at], self._names[request.decode_at]
        assert (live.prefill or live.decode, live.decode) == (prefill, decode)
        self.outcomes["local" if live.prefill is None else "remote"] += 1
        return where

    def _tell(self, now: float) -> Any:
        """All workers' heartbeats of this moment, in the live router's view."""
        fleet = self._fleet
        for index, name in enumerate(self._names):
            load = WorkerLoad(
                step_model=self._workers[index].model,
                on_time_prefill_s=float(fleet.work_s[index]),
                late_prefill_s=float(fleet.late_s[index]),
                queued_load_s=float(fleet.queued_load_s[index]),
                decode_rows=int(fleet.rows[index]),
                decode_context=int(fleet.context[index]),
                coming_rows=int(fleet.coming_rows[index]),
                coming_context=int(fleet.coming_context[index]),
                blocks_used=int(fleet.kv_used[index] + fleet.kv_promised[index]),
                row_life_s=self._life_s,
            )
            self._book.heartbeat(name, WorkerState.READY, load, now)
        view = self._book.view()
        rows = [view.rows[name] for name in self._names]
        view.fleet.last_placed[rows] = fleet.last_placed  # this router has placed all of them ...
        view.fleet.far_load_s[rows] = fleet.far_load_s  # ... and knows who of those coming is computed there
        for column in ("work_s", "late_s", "rows", "context", "coming_rows", "coming_context", "can_decode"):
            assert np.array_equal(getattr(view.fleet, column)[rows], getattr(fleet, column)), column
        return view

    def _question(self, request: Request) -> PlacementRequest:
        return PlacementRequest(
            num_tokens=request.num_tokens,
            num_prompt_tokens=request.num_tokens,
            max_tokens=1,
            hashes=(),
            targets=self._targets,
            expected_output=self._ask(request).expected_output,
        )


@pytest.mark.parametrize(
    ("pool", "roles", "rate"),
    [
        ([H100] * 4, [P, P, D, D], 60.0),
        ([H100] * 4, [P, D, D, D], 150.0),
        ([H100, H100, H20, H20], [P, P, D, D], 90.0),
        ([H20] * 3, [D, D, D], 20.0),
    ],
)
@pytest.mark.parametrize("targets", [TARGETS, Targets(0.2, 0.015, 0.03)])
def test_live_and_simulated_decisions_are_equal(
    pool: list[Hardware], roles: list[Role], rate: float, targets: Targets
) -> None:
    rng = random.Random(len(pool) * 1000 + rate)
    requests, at_s = [], 0.0
    for index in range(300):
        at_s += rng.expovariate(rate)
        num_prompt = round(min(30_000, rng.lognormvariate(6.9, 1.1))) + 1
        requests.append(Request(index, at_s, num_prompt, rng.randint(1, 400)))
    shadow = Shadow(pool, roles, targets)
    Simulation(pool, requests, shadow, targets.tpot_s, use_prefix_cache=False).run(at_s)
    assert shadow.outcomes["local"] + shadow.outcomes["remote"] >= 290
    assert shadow.outcomes["local"] > 10
    assert (shadow.outcomes["remote"] > 10) == (P in roles)
    assert shadow.facts()["num_local"] > 0


def test_they_have_the_same_settings() -> None:
    assert CONFIG.elastic == PolicyConfig().elastic == ElasticSettings()
