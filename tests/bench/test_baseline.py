"""What `make bench` holds its figures against."""

from __future__ import annotations

import pytest

from bench.baseline import roofline, weight_bytes
from bench.machine import Machine


def machine(*isa: str) -> Machine:
    return Machine(
        cpu="some",
        num_cores=2,
        isa=isa,
        python="3.11",
        read_gb_per_s_one_thread=20.0,
        read_gb_per_s_all_threads=30.0,
        gemm_gflop_per_s_one_thread=200.0,
        gemm_gflop_per_s_all_threads=400.0,
    )


def test_weights_count_as_they_are_read() -> None:
    """Codes of the demo model's file where products decode them, bf16 elsewhere."""
    assert weight_bytes(machine("avx2", "fma")) == 2.0
    assert weight_bytes(machine("avx2", "avx512f", "avx512_bf16")) == pytest.approx(5.74 / 8, abs=0.001)


def test_the_limit_is_that_of_all_cores() -> None:
    line = roofline(machine(), 1.0)
    assert (line.bytes_per_s, line.flops_per_s) == (30e9, 400e9)
    assert line.least_decode_s(1, 0) == pytest.approx(134.5e6 / 30e9, rel=0.01)
