"""RMSNorm, rotary positions, SiLU·mul and the KV write: one pass over memory each, sums in fp32."""

import triton
import triton.language as tl


@triton.jit
def normalize(wide, weight, size, eps, dtype: tl.constexpr):
    """y = (x · rsqrt(Σ x² / size + eps)) · w, rounded to `dtype` before and after the weight. wide [R, B]
    fp32, zeros past `size`; weight [B]."""
    mean_square = tl.sum(wide * wide, axis=1) / size
    inverse = tl.rsqrt(mean_square + eps)
    rounded = (wide * inverse[:, None]).to(dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)[None, :]).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(x, weight, y, num_rows, size, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (ceil(num_rows / ROWS),). x, y [num_rows, size], contiguous."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    places = rows[:, None] * size + columns[None, :]
    loaded = tl.load(x + places, mask=inside, other=0.0)
    w = tl.load(weight + columns, mask=columns < size, other=0.0)
    result = normalize(loaded.to(tl.float32), w, size, eps, y.dtype.element_ty)
    tl.store(y + places, result, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    x, residual, weight, y, total, num_rows, size, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """total = x + residual, rounded; y = its norm. Grid (ceil(num_rows / ROWS),); all contiguous [num_rows,
    size]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    places = rows[:, None] * size + columns[None, :]
    left = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    added = (left + right).to(total.dtype.element_ty)
    tl.store(total + places, added, mask=inside)
    w = tl.load(weight + columns, mask=columns < size, other=0.0)
    result = normalize(added.to(tl.float32), w, size, eps, y.dtype.element_ty)
    tl.store(y + places, result, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def silu_mul_kernel(gate_up, y, num_rows, size, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y = g / (1 + e^-g) · u, silu rounded to fp32 only. Grid (ceil(num_rows / ROWS), ceil(size / BLOCK));
    gate_up [num_rows, 2·size], rows `stride` apart; y [num_rows, size]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    places = rows[:, None] * stride + columns[None, :]
    gate = tl.load(gate_up + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + size + places, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + rows[:, None] * size + columns[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def rotated(first, second, c, s):
    """(a, b) → (a·cos - b·sin, b·cos + a·sin), fp32."""
    return first * c - second * s, second * c + first * s


@triton.jit
def load_angles(cos, sin, position, half, inside):
    """Row `position` of both tables [positions, half dim], as [1, half dim]."""
    places = position * half + tl.arange(0, inside.shape[0])
    c = tl.load(cos + places, mask=inside, other=0.0)
    s = tl.load(sin + places, mask=inside, other=0.0)
    return c[None, :], s[None, :]


@triton.jit
def rotate_heads(x, y, c, s, num_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """x, y: pointers to [num_heads, 2·half], contiguous; halves turn against one another."""
    heads, columns = tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (heads < num_heads)[:, None] & (columns < half)[None, :]
    places = heads[:, None] * (2 * half) + columns[None, :]
    first = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half + places, mask=inside, other=0.0).to(tl.float32)
    left, right = rotated(first, second, c, s)
    tl.store(y + places, left.to(y.dtype.element_ty), mask=inside)
    tl.store(y + half + places, right.to(y.dtype.element_ty), mask=inside)


@triton.jit
def copy_heads(x, y, num_heads, size, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """x → y, pointers to [num_heads, size], contiguous."""
    heads, columns = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (heads < num_heads)[:, None] & (columns < size)[None, :]
    places = heads[:, None] * size + columns[None, :]
    tl.store(y + places, tl.load(x + places, mask=inside, other=0.0), mask=inside)


@triton.jit
def rotary_kernel(
    x, positions, cos, sin, y, num_heads, half, stride_x, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """Grid (num_tokens,). x [num_tokens, num_heads, 2·half], tokens `stride_x` apart; y contiguous."""
    token = tl.program_id(0).to(tl.int64)
    c, s = load_angles(cos, sin, tl.load(positions + token), half, tl.arange(0, HALF) < half)
    rotate_heads(x + token * stride_x, y + token * num_heads * 2 * half, c, s, num_heads, half, HEADS, HALF)


@triton.jit
def write_kv_kernel(
    k, v, pool, slots, stride_k, stride_v, block_size, stride_block, stride_kv, num_heads, size,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pool[slot] = k, v. Grid (num_tokens,). k, v [num_tokens, num_heads, size]; `pool` points at a layer of
    block 0: [2, block_size, num_heads, size], blocks `stride_block` apart."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    target = pool + (slot // block_size) * stride_block + (slot % block_size) * num_heads * size
    copy_heads(k + token * stride_k, target, num_heads, size, HEADS, BLOCK)
    copy_heads(v + token * stride_v, target + stride_kv, num_heads, size, HEADS, BLOCK)


@triton.jit
def rotary_write_kernel(
    q, k, v, q_out, positions, slots, cos, sin, pool, stride_q, stride_k, stride_v, num_heads, num_kv_heads,
    half,
    block_size, stride_block, stride_kv,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`rotary_kernel` of q to q_out and of k into the pool, and v into the pool as `write_kv_kernel`, in one
    launch. Grid (num_tokens,). q [num_tokens, num_heads, 2·half], k, v [num_tokens, num_kv_heads, 2·half]."""
    token = tl.program_id(0).to(tl.int64)
    c, s = load_angles(cos, sin, tl.load(positions + token), half, tl.arange(0, HALF) < half)
    rotate_heads(
        q + token * stride_q, q_out + token * num_heads * 2 * half, c, s, num_heads, half, HEADS, HALF
    )
    slot = tl.load(slots + token).to(tl.int64)
    target = pool + (slot // block_size) * stride_block + (slot % block_size) * num_kv_heads * 2 * half
    rotate_heads(k + token * stride_k, target, c, s, num_kv_heads, half, KV_HEADS, HALF)
    copy_heads(v + token * stride_v, target + stride_kv, num_kv_heads, 2 * half, KV_HEADS, BLOCK)
