"""The limit beside each throughput follows the peer's own precision."""

import dataclasses

import pytest

from bench.baseline import SMOLLM2_135M
from bench.machine import Machine
from bench.peers.limits import best_rates, most_tokens_per_s
from bench.peers.peer import Peer

MACHINE = Machine(
    cpu="a CPU",
    num_cores=2,
    isa=(),
    python="3",
    read_gb_per_s_one_thread=10.0,
    read_gb_per_s_all_threads=20.0,
    gemm_gflop_per_s_one_thread=1e5,  # so that memory decides
    gemm_gflop_per_s_all_threads=2e5,
)


def limit(weight_bits: float) -> float:
    peer = Peer(
        name="x", title="X", precision="-", weight_bits=weight_bits, settings={}, argv=(), model="", kv_bits=0
    )
    return most_tokens_per_s(SMOLLM2_135M, peer, MACHINE, [1], 0, 128)[1]


def test_half_the_bytes_allow_twice_the_tokens() -> None:
    assert limit(8) == 2 * limit(16)


def test_a_step_reads_every_weight_once() -> None:
    steps_per_token = 127 / 128  # the first token comes from the prompt
    assert limit(16) == pytest.approx(20e9 / (2 * SMOLLM2_135M.num_parameters) / steps_per_token)


def test_limits_are_those_of_the_quietest_run() -> None:
    disturbed = dataclasses.asdict(MACHINE) | {
        "read_gb_per_s_all_threads": 9.0,
        "gemm_gflop_per_s_all_threads": 3e5,
        "cpu": "it",
    }
    best = best_rates(MACHINE, [disturbed])
    assert best == dataclasses.replace(MACHINE, gemm_gflop_per_s_all_threads=3e5)
