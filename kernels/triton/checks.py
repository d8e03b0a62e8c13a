"""What kernels cannot check: device, dtype and shape of the tensors they get pointers to.

Two answers: a `ValueError` or `TypeError` where the caller is wrong, and a reason in words where the call is
right but no kernel here takes it; then the reference computes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops import pool_head_dim
from kernels.triton.availability import interpreting

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_COLUMNS = 16384  # of a row that one program holds
MOST_HEAD_DIM = 256
ALIGNMENT = 16  # bytes; kernels are compiled for it


def check_device(device: torch.device, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device.type != device.type:
            raise ValueError(f"`{name}` must be on {device}: it is on {tensor.device}")


def check_shape(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"`{name}` must have shape {list(shape)}: {list(tensor.shape)}")


def check_pool(pool: Tensor, layer: int) -> tuple[int, int, int, int, int]:
    """(num_blocks, num_layers, block_size, kv_heads, head_dim)."""
    if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(
            "`pool` must be contiguous [blocks, layers, 2, block_size, kv_heads, row_size]: "
            f"{list(pool.shape)}"
        )
    num_blocks, num_layers, _, block_size, num_kv_heads, _ = pool.shape
    if not 0 <= layer < num_layers:
        raise IndexError(f"layer outside the pool of {num_layers}: {layer}")
    return num_blocks, num_layers, block_size, num_kv_heads, pool_head_dim(pool)


def why_not_dtype(*tensors: Tensor) -> str | None:
    """None if kernels compute in the tensors' common dtype."""
    dtype = tensors[0].dtype
    if any(tensor.dtype is not dtype for tensor in tensors):
        return f"mixed dtypes: {', '.join(str(tensor.dtype) for tensor in tensors)}"
    if dtype not in DTYPES:
        return f"dtype {dtype}"
    if dtype is torch.bfloat16 and interpreting():
        return "bf16 in Triton's interpreter, which computes it wrong"
    return None


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous and at an address kernels are compiled for: which variant of a kernel runs, and so the bits
    of its sums, must not follow from where a row happens to lie."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def rows_on_device(rows: NDArray[Any], device: torch.device) -> Tensor:
    """[k, n] of the host → `device`, each row at an address kernels are compiled for, whatever n is: else
    the first batch of another size would wait for a compiler."""
    count, step = rows.shape[1], ALIGNMENT // rows.itemsize
    padded = np.zeros((len(rows), -(-count // step) * step), rows.dtype)
    padded[:, :count] = rows
    return torch.from_numpy(padded).to(device)[:, :count]


def head_rows(tensor: Tensor) -> Tensor:
    """[num_tokens, heads, head_dim] whose tokens are contiguous, if apart (a slice of a wider projection)."""
    if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]:
        return tensor
    return tensor.contiguous()
