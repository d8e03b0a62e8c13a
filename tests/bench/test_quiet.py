"""Whether a machine had anything else to do while something was measured."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.quiet import CpuUse, quick_gflop_per_s


def test_cores_of_others_are_what_is_busy_and_not_ours() -> None:
    before, now = CpuUse(10.0, 100.0, 1.0, 40.0), CpuUse(20.0, 118.0, 2.0, 53.0)
    assert before.others(now) == pytest.approx((0.5, 0.1))
    assert before.others(CpuUse(20.0, 100.0, 1.0, 41.0)) == (0.0, 0.0)  # clocks of unequal grain
    use = CpuUse.begin([os.getpid()])
    assert use.ours_s > 0
    assert use.busy_s > 0


def test_a_process_that_has_ended_counts_no_more() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert CpuUse.begin([ended.pid, os.getpid()]).ours_s > 0


def test_the_speed_is_a_rate() -> None:
    assert 0.1 < quick_gflop_per_s() < 1e6
