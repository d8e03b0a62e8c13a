"""What the compiled kernels cannot check: dtype, device and shape of the tensors they get pointers to."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops import pool_head_dim

_MOST_INT8_HEAD_DIM = 1024  # more elements' sums could leave 32 bits (`attention_bytes.h`)


def check(tensor: Tensor, num_dims: int | None, name: str) -> bool:
    """True for bf16, False for fp32."""
    if not tensor.is_cpu or (num_dims is not None and tensor.dim() != num_dims):
        raise ValueError(f"`{name}` must have {num_dims} dimensions on the CPU: {tuple(tensor.shape)}")
    if tensor.dtype is torch.bfloat16:
        return True
    if tensor.dtype is torch.float32:
        return False
    raise TypeError(f"`{name}` must be fp32 or bf16: {tensor.dtype}")


def check_same_dtype(tensor: Tensor, other: Tensor, name: str) -> None:
    if tensor.dtype is not other.dtype or not tensor.is_cpu:
        raise TypeError(f"`{name}` must be {other.dtype} on the CPU: {tensor.dtype} on {tensor.device}")


def check_shape(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"`{name}` must have shape {shape}: {tuple(tensor.shape)}")


def check_index(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_cpu:
        raise ValueError(f"`{name}` must be {dtype} of shape {shape}: {tensor.dtype} {tuple(tensor.shape)}")


def check_pool(pool: Tensor, layer: int, like: Tensor) -> tuple[int, int, int, int, int]:
    """(num_blocks, num_layers, block_size, kv_heads, head_dim) of a pool that `layer` and `like` fit."""
    if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(
            "`pool` must be contiguous [blocks, layers, 2, block_size, kv_heads, row_size]: "
            f"{tuple(pool.shape)}"
        )
    if pool.dtype is not torch.int8:
        check_same_dtype(pool, like, "pool")
    elif not pool.is_cpu:
        raise ValueError(f"`pool` must be on the CPU: {pool.device}")
    if pool.dtype is torch.int8 and pool_head_dim(pool) > _MOST_INT8_HEAD_DIM:
        raise ValueError(
            f"int8 keys and values have at most {_MOST_INT8_HEAD_DIM} elements a head, not "
            f"{pool_head_dim(pool)}: keep them as the model's dtype"
        )
    num_blocks, num_layers, _, block_size, num_kv_heads, _ = pool.shape
    if not 0 <= layer < num_layers:
        raise IndexError(f"layer outside the pool of {num_layers}: {layer}")
    return num_blocks, num_layers, block_size, num_kv_heads, pool_head_dim(pool)


def rows(tensor: Tensor) -> Tensor:
    """[num_tokens, heads, head_dim] whose rows are contiguous, if apart (a slice of a wider one)."""
    head_dim = tensor.shape[2]
    if tensor.stride(2) == 1 and tensor.stride(1) == head_dim:
        return tensor
    return tensor.contiguous()
