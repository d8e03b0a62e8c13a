"""The oracle: every operation in plain torch, written to be read, and to run on any torch device.

It keeps both promises of `kernels.ops` with nothing but library calls:

1. Matrix products run on tiles of one fixed shape (`ROW_TILE` rows, other sizes padded to
   `PAD_MULTIPLE`, `IN_TILE` in features at most), so the library takes the same code path whatever
   the number of tokens, and of threads.
2. Attention walks the partitions of a sequence from position 0 and folds each into a running
   (max, sum, accumulator) of fp32; a query tile that does not see a partition is left untouched by it.
3. Sums and transcendentals of the row-wise operations are taken in fp64 and rounded once to fp32:
   torch uses different code for the body and the tail of a loop, whose last bits differ in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.coded import CodedMatrix
from kernels.ops import KV_SCALE_BYTES, PARTITION_SIZE, AttentionMeta, DecoderShape, DecoderWeights
from kernels.quantization import Quantization, quantize_rows, quantize_weight

ROW_TILE = 16  # rows of one matrix product; missing rows are zeros
PAD_MULTIPLE = 64  # in and out features are padded to this: ragged sizes take ragged code paths
IN_TILE = 512  # in features of one matrix product: longer sums some libraries split among threads
INTEGER_COLUMNS = 4096  # of an integer product at a time: it is carried in fp64, which is exact and large
SCALE_BYTES = 4


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class ReferenceBackend:
    """`kernels.ops.Backend` in plain torch; weights stay in their published layout. An int8 weight is rows of
    int8, each followed by the bytes of its fp32 scale."""

    name = "reference"

    def __init__(
        self, device: torch.device | str = "cpu", quantization: Quantization = Quantization.NONE
    ) -> None:
        self.device = torch.device(device)
        self.quantization = quantization

    @property
    def packed_layout(self) -> str:
        return "rows" if self.quantization is Quantization.NONE else f"rows-{self.quantization.value}"

    def pack_linear(self, weight: Tensor) -> Tensor:
        weight = weight.to(self.device)
        if self.quantization is Quantization.NONE:
            return weight.contiguous()
        values, scales = quantize_weight(weight, self.quantization)
        return torch.cat([values, scales[:, None].view(torch.int8)], dim=1)

    @property
    def coded_layout(self) -> str:
        return ""

    def pack_coded(self, weight: CodedMatrix, dtype: torch.dtype, expands: bool) -> None:
        return None

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._linear(x, packed, bias).to(x.dtype)

    def linear_fp32(self, x: Tensor, packed: Tensor) -> Tensor:
        return self._linear(x, packed, None)

    def _linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        if packed.dtype is not torch.int8:
            return tiled_linear(x, packed, bias)
        values = packed[:, :-SCALE_BYTES]
        scales = packed[:, -SCALE_BYTES:].reshape(-1).clone().view(torch.float32)
        if self.quantization is Quantization.INT8:
            rows, row_scales = quantize_rows(x)
            y = integer_product(rows, values) * (row_scales[:, None] * scales)
        else:
            y = tiled_linear(x, values, None) * scales
        return y + bias.float() if bias is not None else y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = x.double().square().mean(dim=-1, keepdim=True).float()
        inverse_rms = (mean_square + eps).double().rsqrt().float()
        return (x.float() * inverse_rms).to(x.dtype) * weight

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        row_cos, row_sin = cos[positions][:, None, :], sin[positions][:, None, :]
        rotated = (first * row_cos - second * row_sin, second * row_cos + first * row_sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.double().chunk(2, dim=-1)
        silu = (gate / (1.0 + torch.exp(-gate))).float()
        return (silu * up.float()).to(gate_up.dtype)

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
        if pool.dtype is torch.int8:
            k, v = quantize_kv(k), quantize_kv(v)
        block_size = pool.shape[3]
        blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
        pool[blocks, layer, 0, offsets] = k
        pool[blocks, layer, 1, offsets] = v

    def paged_attention(
        self, q: Tensor, pool: Tensor, layer: int, meta: AttentionMeta, scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        starts = meta.query_starts.tolist()
        for sequence, context_len in enumerate(meta.context_lens.tolist()):
            rows = slice(starts[sequence], starts[sequence + 1])
            if rows.start == rows.stop:
                continue
            keys, values = gather_kv(pool, layer, meta.block_tables[sequence], context_len)
            out[rows] = attend(q[rows], keys, values, context_len, scale)
        return out

    def fuse(self, shape: DecoderShape, weights: DecoderWeights, cos: Tensor, sin: Tensor) -> None:
        return None

    def make_sampler(self) -> None:
        return None

    def make_device_sampler(self, max_rows: int, vocab_size: int) -> None:
        return None


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [num_tokens, in]·weight [out, in]ᵀ + bias [out] → fp32 [num_tokens, out]."""
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    pad_in = _round_up(in_features, PAD_MULTIPLE) - in_features
    pad_out = _round_up(out_features, PAD_MULTIPLE) - out_features
    columns = functional.pad(weight.float(), (0, pad_in, 0, pad_out)).t()
    rows = functional.pad(x.float(), (0, pad_in, 0, _round_up(num_tokens, ROW_TILE) - num_tokens))
    out = rows.new_zeros(rows.shape[0], columns.shape[1])
    for start in range(0, rows.shape[0], ROW_TILE):
        tile = slice(start, start + ROW_TILE)
        for piece in zip(rows[tile].split(IN_TILE, dim=1), columns.split(IN_TILE), strict=True):
            out[tile].addmm_(*piece)
    out = out[:num_tokens, :out_features]
    return (out + bias.float() if bias is not None else out).contiguous()


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """int8 [num_tokens, in]·int8 [out, in]ᵀ → fp32 [num_tokens, out], the exact integer rounded once."""
    rows = x.double()
    parts = [(rows @ part.double().t()).float() for part in weight.split(INTEGER_COLUMNS)]
    return torch.cat(parts, dim=1)


def quantize_kv(x: Tensor) -> Tensor:
    """x [..., head_dim] → int8 [..., head_dim + KV_SCALE_BYTES], see `kernels.ops`."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scale = (largest.double() / 127).float().clamp_min(torch.finfo(torch.float32).tiny)
    scale = scale.where(largest.isfinite(), torch.nan)
    values = (wide / scale).round().nan_to_num(0.0).to(torch.int8)
    return torch.cat([values, scale.view(torch.int8)], dim=-1)


def dequantize_kv(rows: Tensor) -> Tensor:
    """What `quantize_kv` returned → fp32 [..., head_dim]."""
    values, scale = rows.tensor_split([-KV_SCALE_BYTES], dim=-1)
    return values.float() * scale.contiguous().view(torch.float32)


def gather_kv(pool: Tensor, layer: int, block_table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
    """One sequence's keys and values, fp32 [partitions, kv_heads, PARTITION_SIZE, head_dim]; what lies
    past the context is zero, whatever the pool holds there."""
    block_size, num_kv_heads, row_size = pool.shape[3:]
    blocks = block_table[: _round_up(context_len, block_size) // block_size].long()
    padding = _round_up(context_len, PARTITION_SIZE) - context_len

    def partitions(which: int) -> Tensor:
        rows = pool[blocks, layer, which].reshape(-1, num_kv_heads, row_size)[:context_len]
        wide = dequantize_kv(rows) if pool.dtype is torch.int8 else rows.float()
        padded = functional.pad(wide, (0, 0, 0, 0, 0, padding))
        return padded.view(-1, PARTITION_SIZE, num_kv_heads, wide.shape[-1]).transpose(1, 2).contiguous()

    return partitions(0), partitions(1)


def attend(q: Tensor, keys: Tensor, values: Tensor, context_len: int, scale: float) -> Tensor:
    """Causal attention of the last len(q) positions of one sequence, in tiles of `ROW_TILE` queries.

    q [num_queries, heads, head_dim]; keys and values as `gather_kv` returns them; result as q.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    out = torch.empty_like(q)
    for start in range(0, num_queries, ROW_TILE):
        tile = q[start : start + ROW_TILE]
        num_rows = tile.shape[0]
        # [kv_heads, ROW_TILE · group, head_dim]; a padding row is a zero query at position 0
        rows = functional.pad(tile.float(), (0, 0, 0, 0, 0, ROW_TILE - num_rows))
        rows = rows.view(ROW_TILE, num_kv_heads, -1, head_dim).transpose(0, 1)
        rows = rows.reshape(num_kv_heads, -1, head_dim)
        positions = torch.arange(ROW_TILE, device=q.device) + (context_len - num_queries + start)
        positions[num_rows:] = 0
        positions = positions.repeat_interleave(num_heads // num_kv_heads)
        result = attend_tile(rows, positions, keys, values, scale)
        result = result.view(num_kv_heads, ROW_TILE, -1, head_dim).transpose(0, 1)
        out[start : start + num_rows] = result.reshape(ROW_TILE, num_heads, head_dim)[:num_rows].to(q.dtype)
    return out


def attend_tile(rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Online softmax (Milakov & Gimelshein 2018) over the partitions in order.

    rows fp32 [kv_heads, num_rows, head_dim], positions [num_rows]; result fp32 as rows.
    """
    running_max = rows.new_full((*rows.shape[:2], 1), -torch.inf)
    running_sum = torch.zeros_like(running_max)
    accumulator = torch.zeros_like(rows)
    for index in range(int(positions.max()) // PARTITION_SIZE + 1):
        first_key = index * PARTITION_SIZE
        key_positions = torch.arange(first_key, first_key + PARTITION_SIZE, device=rows.device)
        visible = key_positions[None, :] <= positions[:, None]
        scores = (rows @ keys[index].transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)

        new_max = torch.maximum(running_max, scores.amax(dim=-1, keepdim=True))
        weights = (scores - new_max).double().exp()
        rescale = (running_max - new_max).double().exp().float()
        new_sum = running_sum * rescale + weights.sum(dim=-1, keepdim=True).float()
        new_accumulator = accumulator * rescale + weights.float() @ values[index]

        sees_partition = (positions >= first_key)[None, :, None]
        running_max = torch.where(sees_partition, new_max, running_max)
        running_sum = torch.where(sees_partition, new_sum, running_sum)
        accumulator = torch.where(sees_partition, new_accumulator, accumulator)
    return accumulator / running_sum
