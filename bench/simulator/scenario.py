"""What one run simulates: the cluster, its timing and its clients, all drawn from a seed or given.

Pools are small, prompts take several blocks, budgets are tight: chunks, shared heads, preemption, full pools
and refusals are the rule. Some runs keep the live system's times, most have shorter ones, so that more meets.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from cluster.slo_classes import Targets
from decode_worker.core import DecodeConfig
from prefill_worker.core import PrefillConfig
from router.config import ConductorConfig, PolicyConfig
from router.quotas.limits import KeyLimits

BLOCK_BYTES = 64


@dataclass(frozen=True, slots=True)
class Scenario:
    """Times in virtual seconds. `fault_every`: mean number of events between two faults, None for none."""

    seed: int
    num_requests: int
    num_clients: int  # each has one request at a time
    think_s: float  # mean pause of a client between its requests
    num_routers: int
    num_prefill: int
    num_decode: int
    in_place: bool
    block_size: int
    prefill_blocks: int
    decode_blocks: int
    max_prompt_tokens: int
    max_new_tokens: int
    prefill: PrefillConfig
    decode: DecodeConfig
    conductor: ConductorConfig
    heartbeat_interval_s: float = 0.5
    missed_heartbeats: int = 5
    drain_grace_s: float = 5.0
    delay_s: float = 0.0005  # of a message, on average
    block_s: float = 0.0003  # to move one block of KV
    step_s: float = 0.004  # a step costs this and `token_s` per token
    token_s: float = 0.0002
    restart_s: float = 0.3  # from a worker's death to its next epoch
    fault_every: int | None = None
    shifts_roles: bool = False  # among the faults: a worker drains and comes back in the other role
    limits: KeyLimits = KeyLimits()  # noqa: RUF009 -- frozen; of each of the tenants


def draw(seed: int, *, num_requests: int, faults: bool) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"{seed}/scenario")
    size = rng.choice([2, 4, 4, 5, 8])
    max_prompt, max_new = rng.choice([(12, 3), (12, 4), (18, 4), (30, 8), (8, 16)])
    most_blocks = -(-(max_prompt + max_new) // size)
    num_decode = rng.choice([1, 2, 2, 3])
    max_num_seqs = rng.choice([4, 8, 16])
    is_long = max_new > max_prompt  # answers outgrow what was granted: sequences are preempted
    decode_blocks = most_blocks * (rng.choice([1, 2]) if is_long else rng.choice([2, 3, 6, 12]))
    room = num_decode * min(max_num_seqs, 3 * decode_blocks // most_blocks)  # requests that fit at once
    live_times = rng.random() < 0.2
    peer_timeout_s = 10.0 if live_times else rng.choice([1.0, 3.0])
    num_clients = max(2, round(room * rng.choice([0.3, 0.5, 0.7, 1.1])))
    think_s = rng.choice([0.0, 0.005, 0.05])
    num_routers = rng.choice([1, 1, 1, 2])
    return Scenario(
        seed=seed,
        num_requests=num_requests,
        num_clients=num_clients,
        think_s=think_s,
        num_routers=num_routers,
        num_prefill=rng.choice([0, 1, 1, 2, 2, 3]),
        num_decode=num_decode,
        in_place=rng.random() < 0.5,
        block_size=size,
        prefill_blocks=most_blocks * rng.choice([2, 4, 8]),
        decode_blocks=decode_blocks,
        max_prompt_tokens=max_prompt,
        max_new_tokens=max_new,
        prefill=PrefillConfig(
            block_bytes=BLOCK_BYTES,
            max_step_tokens=rng.choice([7, 16, 32]),
            max_piece_bytes=BLOCK_BYTES * rng.choice([1, 2, 3]),
            max_pieces_in_flight=rng.choice([1, 2, 4]),
            peer_timeout_s=peer_timeout_s,
            targets=_targets(rng),
        ),
        decode=DecodeConfig(
            block_bytes=BLOCK_BYTES,
            max_num_seqs=max_num_seqs,
            growth_blocks=0 if is_long else rng.choice([0, 1, 1, 2]),
            max_chunk_tokens=rng.choice([4, 8, 16]),
            targets=_targets(rng),
            speculates=random.Random(f"{seed}/speculation").random() < 0.5,
        ),
        conductor=_conductor(rng, live_times),
        delay_s=rng.choice([0.0001, 0.0005, 0.003, 0.02]),
        block_s=rng.choice([0.0001, 0.001, 0.01]),
        restart_s=rng.choice([0.1, 0.5, 2.0]),
        fault_every=rng.choice([300, 800, 800, 2000]) if faults else None,
        limits=_limits(seed, num_routers),
    )


def _limits(seed: int, num_routers: int) -> KeyLimits:
    """Several routers always have some, so that they have to share them."""
    if num_routers > 1:
        return KeyLimits(tokens_per_min=3000, concurrent=4)
    return KeyLimits(tokens_per_min=1500, concurrent=2) if seed % 4 == 1 else KeyLimits()


def _targets(rng: random.Random) -> Targets:
    """From what is met all along to what nobody can meet."""
    return Targets(ttft_s=rng.choice([0.02, 0.2, 2.0]), tpot_s=rng.choice([0.003, 0.01, 0.1]))


def _conductor(rng: random.Random, live_times: bool) -> ConductorConfig:
    policy = PolicyConfig(growth_tokens=rng.choice([2, 8]))
    slo = _targets(rng)  # of tight ones workers are rarely in time: placement then mixes all it can do
    if live_times:
        return ConductorConfig(policy=policy, slo=slo)
    return ConductorConfig(
        lease_ttl_s=rng.choice([0.5, 2.0]),
        reserve_timeout_s=1.0,
        prefill_timeout_s=6.0,
        first_token_timeout_s=1.0,
        commit_timeout_s=2.0,
        decode_silence_s=6.0,
        stall_timeout_s=3.0,
        queue_timeout_s=20.0,
        recovery_wait_s=rng.choice([1.5, 5.0]),
        policy=policy,
        slo=slo,
    )
