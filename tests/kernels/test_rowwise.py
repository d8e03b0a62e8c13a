"""Norm, rotary, gate and KV write of every backend: formulas, rounding points, and per-row bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

SIZES = (576, 100, 33, 1)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-6, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-6}


def assert_rows_independent(operation, num_rows: int) -> None:
    """operation(rows) → outputs of these rows; every sub-batch gives the bits of the whole."""
    whole = operation(slice(0, num_rows))
    for start, stop in [(0, 1), (1, 2), (num_rows - 1, num_rows), (3, 10), (1, num_rows)]:
        assert torch.equal(operation(slice(start, stop)), whole[start:stop])


def rotary_tables(head_dim: int, max_positions: int = 600) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(max_positions).double()[:, None] * frequencies[None, :]
    return angles.cos().float(), angles.sin().float()


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(backend, dtype, size):
    x, weight = random(33, size, dtype=dtype) * 3, random(size, dtype=dtype, seed=1)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    y = backend.rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), normed * weight.double(), **tolerance(dtype))
    assert_rows_independent(lambda rows: backend.rms_norm(x[rows], weight, 1e-5), 33)


def test_rms_norm_over_heads(backend, dtype):
    x, weight = random(5, 9, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    y = backend.rms_norm(x, weight, 1e-6)
    assert y.shape == x.shape
    assert torch.equal(y[2, 3], backend.rms_norm(x[2, 3][None], weight, 1e-6)[0])


def test_rms_norm_in_bf16_rounds_before_the_weight(backend):
    x = random(64, 576, dtype=torch.bfloat16)
    ones = torch.ones(576, dtype=torch.bfloat16)
    weight = random(576, dtype=torch.bfloat16, seed=1)
    assert torch.equal(backend.rms_norm(x, weight, 1e-5), backend.rms_norm(x, ones, 1e-5) * weight)


@pytest.mark.parametrize("head_dim", [64, 32, 128, 96, 6])
def test_rotary(backend, dtype, head_dim):
    x = random(33, 3, head_dim, dtype=dtype)
    positions = torch.randperm(600, generator=torch.Generator().manual_seed(2))[:33]
    cos, sin = rotary_tables(head_dim)
    first, second = x.double().chunk(2, dim=-1)
    c, s = cos[positions][:, None].double(), sin[positions][:, None].double()
    expected = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    y = backend.rotary(x, positions, cos, sin)
    assert y.dtype == dtype
    assert y.is_contiguous()
    torch.testing.assert_close(y.double(), expected, rtol=tolerance(dtype)["rtol"], atol=1e-5)
    assert_rows_independent(lambda rows: backend.rotary(x[rows], positions[rows], cos, sin), 33)


@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(backend, dtype, size):
    gate_up = random(33, 2 * size, dtype=dtype) * 6
    gate, up = gate_up.double().chunk(2, dim=-1)
    y = backend.silu_mul(gate_up)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), gate * torch.sigmoid(gate) * up, **tolerance(dtype))
    assert_rows_independent(lambda rows: backend.silu_mul(gate_up[rows]), 33)


def test_silu_mul_at_the_ends_of_the_range(backend, dtype):
    gate = torch.tensor([-1e30, -200.0, -88.5, -87.0, -20.0, 0.0, 20.0, 87.0, 88.5, 200.0, 1e30])
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None].to(dtype)
    gate = gate_up[0, : len(gate)].double()
    y = backend.silu_mul(gate_up)[0].double()
    torch.testing.assert_close(y, gate * torch.sigmoid(gate), rtol=tolerance(dtype)["rtol"], atol=1e-30)


def test_row_wise_bits_do_not_depend_on_threads(make_backend, dtype):
    x, weight = random(70, 1536, dtype=dtype), random(1536, dtype=dtype, seed=1)
    cos, sin = rotary_tables(64)
    positions = torch.arange(70)
    results = []
    for num_threads in (1, 2, 3):
        backend = make_backend(num_threads)
        heads = backend.rotary(x.view(70, 24, 64), positions, cos, sin)
        results.append((backend.rms_norm(x, weight, 1e-5), backend.silu_mul(x), heads))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("block_size", [16, 32])
def test_write_kv_writes_its_slots_and_nothing_else(backend, dtype, block_size):
    pool = random(7, 3, 2, block_size, 3, 64, dtype=dtype, seed=3)
    expected = pool.clone()
    num_tokens = 2 * block_size + 5
    k, v = (random(num_tokens, 3, 64, dtype=dtype, seed=seed) for seed in (4, 5))
    slots = torch.randperm(7 * block_size, generator=torch.Generator().manual_seed(6))[:num_tokens]
    backend.write_kv(k, v, pool, 1, slots)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // block_size, 1, 0, slot % block_size] = k[token]
        expected[slot // block_size, 1, 1, slot % block_size] = v[token]
    assert torch.equal(pool, expected)


def test_slices_of_a_fused_projection_are_taken_as_they_are(backend, dtype):
    """q, k and v as views into one [num_tokens, (heads + 2·kv_heads)·head_dim] tensor."""
    fused = random(9, 15, 64, dtype=dtype)
    q, k, v = fused[:, :9], fused[:, 9:12], fused[:, 12:]
    cos, sin = rotary_tables(64)
    positions = torch.arange(9)
    assert torch.equal(
        backend.rotary(q, positions, cos, sin), backend.rotary(q.contiguous(), positions, cos, sin)
    )
    pools = [torch.zeros(2, 1, 2, 16, 3, 64, dtype=dtype) for _ in range(2)]
    backend.write_kv(k, v, pools[0], 0, positions + 3)
    backend.write_kv(k.contiguous(), v.contiguous(), pools[1], 0, positions + 3)
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0].view(-1, 3, 64)[3:12], k)
