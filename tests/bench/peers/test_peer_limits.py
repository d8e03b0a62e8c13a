"""The limit beside each throughput follows the peer's own precision."""

import dataclasses

import pytest

from bench.baseline import SMOLLM2_135M
from bench.machine import Machine
from bench.peers.limits import best_rates, limits
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


def limit(
    weight_bits: float, machine: Machine = MACHINE, arithmetic_bits: float | None = None
) -> tuple[float, str]:
    """Output tokens per second, and what binds them."""
    peer = Peer(
        name="x",
        title="X",
        precision="-",
        weight_bits=weight_bits,
        settings={},
        argv=(),
        model="",
        kv_bits=0,
        arithmetic_bits=arithmetic_bits,
    )
    most, bound_by = limits(SMOLLM2_135M, peer, machine, [1], 0, 128)
    return most[1], bound_by[1]


def test_half_the_bytes_allow_twice_the_tokens() -> None:
    assert limit(8)[0] == 2 * limit(16)[0]
    assert limit(8)[1] == limit(16)[1] == "memory"


def test_a_step_reads_every_weight_once() -> None:
    steps_per_token = 127 / 128  # the first token comes from the prompt
    assert limit(16)[0] == pytest.approx(20e9 / (2 * SMOLLM2_135M.num_parameters) / steps_per_token)


def test_limits_are_those_of_the_quietest_run() -> None:
    disturbed = dataclasses.asdict(MACHINE) | {
        "read_gb_per_s_all_threads": 9.0,
        "gemm_gflop_per_s_all_threads": 3e5,
        "cpu": "it",
    }
    best = best_rates(MACHINE, [disturbed])
    assert best == dataclasses.replace(MACHINE, gemm_gflop_per_s_all_threads=3e5)


def test_memory_does_not_bind_who_makes_guesses() -> None:
    guessing = Peer(
        name="x",
        title="X",
        precision="-",
        weight_bits=16,
        settings={},
        argv=(),
        model="",
        kv_bits=0,
        makes_guesses=True,
    )
    assert limits(SMOLLM2_135M, guessing, MACHINE, [1], 0, 128) == ({}, {})
    assert limits(SMOLLM2_135M, guessing, SLOW, [1], 0, 128)[1] == {1: "floating point"}


SLOW = dataclasses.replace(  # so that arithmetic decides
    MACHINE, gemm_gflop_per_s_one_thread=1.0, gemm_gflop_per_s_all_threads=1.0
)


def test_each_format_is_held_against_its_own_arithmetic() -> None:
    rated = dataclasses.replace(SLOW, fp32_gflop_per_s_all_threads=0.5, int8_gop_per_s_all_threads=2.0)
    in_float = limit(16, rated)[0]
    assert limit(16, rated)[1] == "floating point"
    assert limit(32, rated) == (pytest.approx(in_float / 2), "fp32")
    assert limit(5, rated, arithmetic_bits=16) == (in_float, "floating point")
    for bits in (8, 5):
        assert limit(bits, rated) == (pytest.approx(2 * in_float), "int8")


def test_where_int8_is_slower_its_rows_may_use_floating_point() -> None:
    rated = dataclasses.replace(SLOW, int8_gop_per_s_all_threads=0.1)
    assert limit(8, rated)[0] == limit(16, rated)[0]


def test_rates_that_an_earlier_file_lacks_were_not_measured() -> None:
    earlier = dataclasses.asdict(SLOW)
    for name in ("fp32_gflop_per_s_all_threads", "int8_gop_per_s_all_threads"):
        del earlier[name]
    assert best_rates(SLOW, [earlier]) == SLOW
    assert limit(8, SLOW) == limit(16, SLOW) == limit(32, SLOW) == (limit(16, SLOW)[0], "floating point")


def test_all_cores_do_at_least_what_one_does() -> None:
    """The probe of all cores is the one that other work disturbs most."""
    disturbed = dataclasses.replace(MACHINE, read_gb_per_s_all_threads=3.0)
    assert best_rates(disturbed, []).read_gb_per_s_all_threads == MACHINE.read_gb_per_s_one_thread
