"""Triton's norm, rotary, gate and KV write: right against the reference, rows apart, fused as apart."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import ReferenceBackend
from tests.kernels.test_rowwise import rotary_tables
from tests.kernels.triton_support import DEVICE, DTYPES, TOLERANCES, random, require

rowwise = require("kernels.triton.rowwise")
checks = require("kernels.triton.checks")
REFERENCE = ReferenceBackend(DEVICE)

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [64, 33, 1, 300])
def test_rms_norm(dtype, size):
    x, weight = random(37, size, dtype=dtype) * 3, random(size, dtype=dtype, seed=1)
    y = rowwise.rms_norm(x, weight, 1e-5)
    close(y, REFERENCE.rms_norm(x, weight, 1e-5))
    for start, stop in ((0, 1), (5, 37), (36, 37)):
        assert torch.equal(rowwise.rms_norm(x[start:stop], weight, 1e-5), y[start:stop])


def test_rms_norm_rounds_before_the_weight(dtype):
    x, weight = random(8, 96, dtype=dtype), random(96, dtype=dtype, seed=1)
    ones = torch.ones_like(weight)
    assert torch.equal(rowwise.rms_norm(x, weight, 1e-5), rowwise.rms_norm(x, ones, 1e-5) * weight)


@pytest.mark.parametrize("size", [64, 33])
def test_residual_and_norm_in_one_are_both_apart(dtype, size):
    x, residual = random(9, size, dtype=dtype), random(9, size, dtype=dtype, seed=2)
    weight = random(size, dtype=dtype, seed=1)
    y, total = rowwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(y, rowwise.rms_norm(residual + x, weight, 1e-5))


@pytest.mark.parametrize("size", [100, 33, 1])
def test_silu_mul(dtype, size):
    gate_up = random(9, 2 * size, dtype=dtype) * 6
    y = rowwise.silu_mul(gate_up)
    close(y, REFERENCE.silu_mul(gate_up))
    assert torch.equal(rowwise.silu_mul(gate_up[3:5]), y[3:5])


def test_silu_mul_at_the_ends_of_the_range(dtype):
    largest = torch.finfo(dtype).max
    gate = torch.tensor([-largest, -200.0, -88.5, -20.0, 0.0, 20.0, 88.5, 200.0, largest])
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None].to(dtype).to(DEVICE)
    close(rowwise.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 24), (4, 4, 16), (2, 2, 6)])
def test_rotary_and_write_in_one_are_both_apart(dtype, num_heads, num_kv_heads, head_dim):
    """And they write their slots, nothing else."""
    num_tokens, block_size = 5, 4
    fused = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = (table.to(DEVICE) for table in rotary_tables(head_dim, 40))
    positions = torch.tensor([7, 0, 39, 8, 21], device=DEVICE)
    slots = torch.tensor([3, 11, 0, 8, 6], device=DEVICE)
    pools = [random(3, 2, 2, block_size, num_kv_heads, head_dim, dtype=dtype, seed=3) for _ in range(3)]

    rotated = rowwise.rotary(q, positions, cos, sin)
    close(rotated, REFERENCE.rotary(q, positions, cos, sin))
    rotated_k = rowwise.rotary(k, positions, cos, sin)
    rowwise.write_kv(rotated_k, v, pools[0], 1, slots)
    REFERENCE.write_kv(rotated_k, v, pools[1], 1, slots)
    assert torch.equal(pools[0], pools[1])
    in_one = rowwise.rotary_write(q, k, v, positions, cos, sin, pools[2], 1, slots)
    assert torch.equal(in_one, rotated)
    assert torch.equal(pools[2], pools[0])
    assert torch.equal(rowwise.rotary(q[3:], positions[3:], cos, sin), rotated[3:])


def test_no_rows(dtype):
    nothing = random(0, 32, dtype=dtype)
    assert rowwise.rms_norm(nothing, random(32, dtype=dtype), 1e-5).shape == (0, 32)
    assert rowwise.silu_mul(nothing).shape == (0, 16)


def test_wrong_shapes_are_refused(dtype):
    x = random(4, 32, dtype=dtype)
    with pytest.raises(ValueError, match=r"`weight` must have shape \[32\]: \[31\]"):
        rowwise.rms_norm(x, random(31, dtype=dtype), 1e-5)
    with pytest.raises(ValueError, match="`gate_up`"):
        rowwise.silu_mul(x[:, :31])
    k = random(4, 2, 16, dtype=dtype)
    with pytest.raises(ValueError, match="does not fit keys"):
        rowwise.write_kv(k, k, random(2, 1, 2, 4, 3, 16, dtype=dtype), 0, torch.arange(4, device=DEVICE))


def test_alignment_is_made_where_it_is_missing(dtype):
    x = random(3, 40, dtype=dtype)
    shifted = x.flatten()[1:41]
    assert checks.aligned(x) is x
    made = checks.aligned(shifted)
    assert torch.equal(made, shifted)
    assert made.data_ptr() % checks.ALIGNMENT == 0
