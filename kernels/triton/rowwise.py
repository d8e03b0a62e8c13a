"""Host side of the row-wise kernels: shapes to grids. Formulas are in `kernels.triton.jit.rowwise`.

How many rows a program takes follows from the row's size alone, so that a row's sum is always laid out the
same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton.checks import aligned, check_shape, head_rows
from kernels.triton.jit.rowwise import (
    add_rms_norm_kernel,
    rms_norm_kernel,
    rotary_kernel,
    rotary_write_kernel,
    silu_mul_kernel,
    write_kv_kernel,
)
from kernels.triton.launch import cdiv, launch, next_power_of_2

_ELEMENTS = 4096  # about so many per program


def _rows_per_program(block: int) -> int:
    return max(1, min(32, _ELEMENTS // block))


def _num_warps(elements: int) -> int:
    return 8 if elements > 4096 else 4


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size] → x's shape and dtype."""
    check_shape(weight, (x.shape[-1],), "weight")
    x, weight = aligned(x), aligned(weight)
    y = torch.empty_like(x)
    size = x.shape[-1]
    num_rows = x.numel() // size if size else 0
    block = next_power_of_2(size)
    rows = _rows_per_program(block)
    grid = (cdiv(num_rows, rows),)
    launch(
        rms_norm_kernel, grid, x, weight, y, num_rows, size, eps,
        ROWS=rows, BLOCK=block, num_warps=_num_warps(rows * block),
    )  # fmt: skip
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual): the same bits as the addition and `rms_norm` apart."""
    check_shape(residual, tuple(x.shape), "residual")
    check_shape(weight, (x.shape[-1],), "weight")
    x, residual, weight = aligned(x), aligned(residual), aligned(weight)
    y, total = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    num_rows = x.numel() // size if size else 0
    block = next_power_of_2(size)
    rows = _rows_per_program(block)
    launch(
        add_rms_norm_kernel, (cdiv(num_rows, rows),), x, residual, weight, y, total, num_rows, size, eps,
        ROWS=rows, BLOCK=block, num_warps=_num_warps(rows * block),
    )  # fmt: skip
    return y, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2·n] → [num_tokens, n]."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"`gate_up` must be [num_tokens, 2·n]: {list(gate_up.shape)}")
    gate_up = aligned(gate_up)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(num_rows, size)
    block = min(next_power_of_2(max(size, 1)), 2048)
    rows = max(1, 2048 // block)
    grid = (cdiv(num_rows, rows), cdiv(size, block))
    launch(silu_mul_kernel, grid, gate_up, y, num_rows, size, 2 * size, ROWS=rows, BLOCK=block)
    return y


def rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim], positions [num_tokens], cos, sin fp32 [max_positions, head_dim //
    2]."""
    num_tokens, num_heads, head_dim = x.shape
    _check_angles(positions, cos, sin, num_tokens, head_dim)
    x = head_rows(x)
    y = x.new_empty(x.shape)
    half = head_dim // 2
    launch(
        rotary_kernel, (num_tokens,), x, positions, cos, sin, y, num_heads, half, x.stride(0),
        HEADS=next_power_of_2(num_heads), HALF=next_power_of_2(half),
    )  # fmt: skip
    return y


def write_kv(k: Tensor, v: Tensor, pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """k, v [num_tokens, kv_heads, head_dim] → their slots of `pool` at `layer`."""
    num_tokens, num_heads, head_dim = k.shape
    _check_kv(k, v, pool, slot_mapping)
    k, v = head_rows(k), head_rows(v)
    launch(
        write_kv_kernel, (num_tokens,), k, v, pool[0, layer], slot_mapping, k.stride(0), v.stride(0),
        pool.shape[3], pool.stride(0), pool.stride(2), num_heads, head_dim,
        HEADS=next_power_of_2(num_heads), BLOCK=next_power_of_2(head_dim),
    )  # fmt: skip


def rotary_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, layer: int,
    slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """`rotary` of q, returned; `rotary` of k and v as they are, written as `write_kv` does: the same bits."""
    num_tokens, num_heads, head_dim = q.shape
    _check_angles(positions, cos, sin, num_tokens, head_dim)
    _check_kv(k, v, pool, slot_mapping)
    q, k, v = head_rows(q), head_rows(k), head_rows(v)
    q_out = q.new_empty(q.shape)
    num_kv_heads, half = k.shape[1], head_dim // 2
    launch(
        rotary_write_kernel, (num_tokens,), q, k, v, q_out, positions, slot_mapping, cos, sin, pool[0, layer],
        q.stride(0), k.stride(0), v.stride(0), num_heads, num_kv_heads, half,
        pool.shape[3], pool.stride(0), pool.stride(2),
        HEADS=next_power_of_2(num_heads), KV_HEADS=next_power_of_2(num_kv_heads),
        HALF=next_power_of_2(half), BLOCK=next_power_of_2(head_dim),
    )  # fmt: skip
    return q_out


def _check_angles(positions: Tensor, cos: Tensor, sin: Tensor, num_tokens: int, head_dim: int) -> None:
    check_shape(positions, (num_tokens,), "positions")
    check_shape(cos, (cos.shape[0], head_dim // 2), "cos")
    check_shape(sin, tuple(cos.shape), "sin")
    if head_dim % 2 or cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
        raise ValueError(f"rotary needs an even head_dim and fp32 tables: {head_dim}, {cos.dtype}")
    if not (positions.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("`positions`, `cos` and `sin` must be contiguous")


def _check_kv(k: Tensor, v: Tensor, pool: Tensor, slot_mapping: Tensor) -> None:
    num_tokens, num_heads, head_dim = k.shape
    check_shape(v, tuple(k.shape), "v")
    check_shape(slot_mapping, (num_tokens,), "slot_mapping")
    if tuple(pool.shape[4:]) != (num_heads, head_dim) or not slot_mapping.is_contiguous():
        raise ValueError(f"`pool` of {list(pool.shape)} does not fit keys of {list(k.shape)}")
