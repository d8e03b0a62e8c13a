"""Host side of the matrix products: `kernels.triton.jit.gemm` says how sums are cut.

Whether a call spreads the parts of its sums over programs depends on the number of rows; the bits do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton.checks import aligned, check_shape
from kernels.triton.jit.gemm import add_parts_kernel, gemm_kernel
from kernels.triton.launch import cdiv, launch
from kernels.triton.tiles import GemmTile

_ADD_BLOCK = 1024


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, tile: GemmTile,
    apart: bool | None = None,
) -> Tensor:  # fmt: skip
    """x [num_rows, in]·weight [out, in]ᵀ + bias [out] → `out_dtype` [num_rows, out], rounded once.

    `apart`: whether parts of a sum get programs of their own; None: where few programs would run otherwise.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    check_shape(weight, (out_features, in_features), "weight")
    if bias is not None:
        check_shape(bias, (out_features,), "bias")
    y = x.new_empty(num_rows, out_features, dtype=out_dtype)
    if num_rows == 0 or out_features == 0:
        return y
    x = aligned(x)
    part_depth = tile.part_depth(out_features, in_features)
    num_parts = cdiv(in_features, part_depth)
    row_tiles, column_tiles = cdiv(num_rows, tile.rows), cdiv(out_features, tile.columns)
    if apart is None:
        apart = row_tiles * column_tiles < tile.most_programs
    apart = apart and num_parts > 1
    parts = x.new_empty(num_parts, num_rows, out_features, dtype=torch.float32) if apart else y
    launch(
        gemm_kernel,
        (row_tiles * column_tiles, num_parts if apart else 1),
        x, weight, bias if bias is not None else x, y, parts, num_rows, row_tiles, out_features, in_features,
        part_depth,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, WHOLE=in_features % tile.depth == 0,
        HAS_BIAS=bias is not None, APART=apart, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if apart:
        launch(
            add_parts_kernel, (num_rows, cdiv(out_features, _ADD_BLOCK)), parts,
            bias if bias is not None else x, y, num_rows, out_features,
            PARTS=num_parts, BLOCK=_ADD_BLOCK, HAS_BIAS=bias is not None,
        )  # fmt: skip
    return y
