"""How a GPU's memory is shared out: KV gets what is left; what does not fit is one line with both numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.gpu_memory import (
    GIB,
    NUM_SCRATCH_BLOCKS,
    DeviceMemory,
    check_weights_fit,
    free_of_part,
    largest_step,
    size_pool,
)
from cluster.errors import ConfigError

BLOCK = 4 << 20


def memory(free: float, steps: float = 1.0) -> DeviceMemory:
    return DeviceMemory(total=80 * GIB, free=int(free * GIB), weights=15 * GIB, steps=int(steps * GIB))


def test_kv_gets_its_share_of_what_is_left() -> None:
    assert size_pool(memory(61), BLOCK, 0.5, None, "--decode-kv") == 30 * 256 - 1
    assert size_pool(memory(61), BLOCK, 0.9, 2 * GIB, "--decode-kv") == 512


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8), st.integers(1, 1000))
def test_workers_that_share_a_gpu_find_equal_parts_whoever_comes_first(takes: list[int], total: int) -> None:
    """Each takes a percentage of what it may; what the others took is nothing to it."""
    num_sharers, free = len(takes), total
    for percent in takes:
        may_take = free_of_part(free, total, 0, num_sharers)
        assert may_take == total // num_sharers
        taken = may_take * percent // 100
        free -= taken
        assert free_of_part(free, total, taken, num_sharers) == total // num_sharers - taken
    assert free_of_part(free, total, total, num_sharers) == 0


def test_a_worker_alone_may_take_what_is_free_whoever_has_the_rest() -> None:
    assert free_of_part(30, 80, 20, 1) == 30
    assert free_of_part(5, 80, 0, 2) == 5  # something else runs there


def granted(state: DeviceMemory, share: float, kv_bytes: int | None) -> int | str:
    """The blocks, or why there are none."""
    try:
        return size_pool(state, BLOCK, share, kv_bytes, "--decode-kv")
    except ConfigError as error:
        return str(error)


@given(
    free=st.floats(0, 80),
    steps=st.floats(0, 80),
    share=st.floats(0.01, 1),
    kv_bytes=st.none() | st.integers(1, 90 * GIB),
)
def test_what_is_granted_fits(free: float, steps: float, share: float, kv_bytes: int | None) -> None:
    state = memory(free, steps)
    num_blocks = granted(state, share, kv_bytes)
    if isinstance(num_blocks, str):
        assert num_blocks.count("GiB") >= 2
        assert "\n" not in num_blocks
        return
    assert num_blocks >= 2
    rest = state.free - state.steps
    assert (num_blocks + NUM_SCRATCH_BLOCKS) * BLOCK <= rest
    if kv_bytes is None:
        assert (num_blocks + NUM_SCRATCH_BLOCKS) * BLOCK <= rest * share
    else:
        assert num_blocks == kv_bytes // BLOCK


def test_refusals_name_what_is_needed_what_is_free_and_the_way_out() -> None:
    with pytest.raises(ConfigError) as full:
        size_pool(memory(1), BLOCK, 0.9, None, "--decode-kv")
    assert str(full.value).startswith(
        "KV needs 0.01 GiB but only 0.00 GiB of 80.00 GiB of GPU memory is free beside 15.00 GiB of weights "
        "and 1.00 GiB for steps: "
    )
    with pytest.raises(
        ConfigError, match=r"KV needs 64\.00 GiB but only 60\.00 GiB .*: lower `--prefill-kv`"
    ):
        size_pool(memory(61), BLOCK, 0.9, 64 * GIB, "--prefill-kv")
    with pytest.raises(ConfigError, match=r"for 2 blocks but may take only 0\.00 GiB .*`--gpu-memory-share`"):
        size_pool(memory(1.02), BLOCK, 0.1, None, "--decode-kv")
    with pytest.raises(ConfigError, match="raise `--decode-kv`"):
        size_pool(memory(61), BLOCK, 0.9, BLOCK, "--decode-kv")
    check_weights_fit(15 * GIB, 15 * GIB, 80 * GIB)
    with pytest.raises(ConfigError, match=r"weights need 15\.00 GiB but only 10\.00 GiB of 80\.00 GiB"):
        check_weights_fit(15 * GIB, 10 * GIB, 80 * GIB)


def test_the_largest_steps_are_as_wide_and_long_as_a_worker_can_be_given() -> None:
    mixed, decode = (largest_step(chunk_tokens, 3, 100, 32) for chunk_tokens in (512, 0))
    assert [len(row.token_ids) for row in mixed.rows] == [100, 1, 1]
    assert [len(row.token_ids) for row in decode.rows] == [1, 1, 1]
    for plan, end in ((mixed, 100), (decode, 1)):
        assert {row.start + len(row.token_ids) for row in plan.rows} == {end}
        assert all(list(row.block_ids) == [0] * 4 and row.sample is not None for row in plan.rows)
    assert largest_step(64, 1, 100, 32).num_tokens == 64
