"""Matrix products whose sums are cut the same way whatever the number of rows.

    y[m, n] = Σ_parts (Σ_{k in part} x[m, k] · w[n, k]) + b[n]

A part is `part_depth` long, by the weight's shape. With many rows a program adds its parts one after another;
with few, each part has a program of its own and `add_parts_kernel` adds them in the same order: the same
bits.
"""

import triton
import triton.language as tl


@triton.jit
def sum_part(
    x_rows, w_rows, first_k, end_k, valid_rows, valid_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Σ over k in [first_k, end_k). x_rows [ROWS, 1], w_rows [1, COLUMNS]: pointers to rows. WHOLE: the part
    is a multiple of DEPTH."""
    depth = tl.arange(0, DEPTH)
    accumulator = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first_k, end_k, DEPTH):
        k = start + depth
        if WHOLE:
            a = tl.load(x_rows + k[None, :], mask=valid_rows[:, None], other=0.0)
            b = tl.load(w_rows + k[:, None], mask=valid_columns[None, :], other=0.0)
        else:
            exists = k < end_k
            a = tl.load(x_rows + k[None, :], mask=valid_rows[:, None] & exists[None, :], other=0.0)
            b = tl.load(w_rows + k[:, None], mask=exists[:, None] & valid_columns[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
    return accumulator


@triton.jit(do_not_specialize=["num_rows", "row_tiles"])
def gemm_kernel(
    x, weight, bias, y, parts, num_rows, row_tiles, out_features, in_features, part_depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles · column tiles, parts if APART else 1). x [num_rows, in_features], weight
    [out_features, in_features], y [num_rows, out_features], all contiguous. APART: sums go to `parts` fp32
    [parts, num_rows, out_features], y and bias are left to `add_parts_kernel`."""
    # rows go first, eight tiles at a time: programs that run together share columns of the weight
    index = tl.program_id(0)
    column_tiles = tl.cdiv(out_features, COLUMNS)
    band = index // (8 * column_tiles)
    height = tl.minimum(row_tiles - band * 8, 8)
    within = index - band * 8 * column_tiles
    rows = (band * 8 + within % height) * ROWS + tl.arange(0, ROWS)
    columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
    valid_rows, valid_columns = rows < num_rows, columns < out_features
    x_rows = x + rows.to(tl.int64)[:, None] * in_features
    w_rows = weight + columns.to(tl.int64)[None, :] * in_features
    places = rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    inside = valid_rows[:, None] & valid_columns[None, :]
    if APART:
        part = tl.program_id(1)
        first_k = part * part_depth
        total = sum_part(
            x_rows, w_rows, first_k, tl.minimum(first_k + part_depth, in_features), valid_rows, valid_columns,
            ROWS, COLUMNS, DEPTH, WHOLE,
        )  # fmt: skip
        size = num_rows.to(tl.int64) * out_features
        tl.store(parts + part * size + places, total, mask=inside)
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first_k in range(0, in_features, part_depth):
            total += sum_part(
                x_rows, w_rows, first_k, tl.minimum(first_k + part_depth, in_features), valid_rows,
                valid_columns, ROWS, COLUMNS, DEPTH, WHOLE,
            )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=valid_columns, other=0.0).to(tl.float32)[None, :]
        tl.store(y + places, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    parts, bias, y, num_rows, out_features, PARTS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """y = 0 + parts[0] + parts[1] + … + bias. Grid (num_rows, ceil(out_features / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < out_features
    places = row * out_features + columns
    size = num_rows.to(tl.int64) * out_features
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + places, mask=valid, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + places, total.to(y.dtype.element_ty), mask=valid)
