"""Part (e), kernels: rates against this device's ceilings in this run, and against torch's own operations.

Bytes are those an operation cannot do without, read and written; operations count a multiply-add as two. A
decode row's KV is read once per KV head. `torch` times what torch offers for the same result: SDPA over
contiguous keys and values, the vendor's product, a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu_check import goals
from bench.gpu_check.report import Line
from bench.gpu_check.timing import Ceilings, Clock
from bench.gpu_check.worlds import Paged
from cluster.sampling import SamplingParams
from kernels.draw_kind import DrawKind
from kernels.triton import blocks, rowwise
from kernels.triton.backend import TritonBackend
from kernels.triton.tiles import Mode


@dataclass(frozen=True, slots=True)
class Sizes:
    decode: tuple[tuple[int, int], ...]  # batch, context
    prefill: tuple[int, ...]  # prompt lengths
    products: tuple[tuple[int, int, int], ...]  # rows, in, out
    row_bytes: int  # of what row-wise operations read
    width: int
    heads: tuple[int, int]
    head_dim: int
    vocabulary: int
    sampled_rows: tuple[int, ...]

    def num_rotated(self, item_bytes: int) -> int:
        """Tokens whose queries, keys and values are `row_bytes` together."""
        per_token = (self.heads[0] + 2 * self.heads[1]) * self.head_dim * item_bytes
        return max(1, self.row_bytes // per_token)


REAL = Sizes(
    decode=((1, 1024), (1, 8192), (1, 32768), (16, 1024), (16, 8192), (64, 2048), (128, 1024)),
    prefill=(512, 2048, 8192),
    products=tuple(
        (rows, in_features, out_features)
        for in_features, out_features in ((4096, 6144), (4096, 28672), (14336, 4096))
        for rows in (1, 16, 64, 512, 4096)
    ),
    row_bytes=2**29,
    width=4096,
    heads=(32, 8),
    head_dim=128,
    vocabulary=128_256,
    sampled_rows=(1, 64),
)
TINY = Sizes(
    decode=((1, 130), (2, 20)),
    prefill=(17,),
    products=((1, 70, 40),),
    row_bytes=2**9,
    width=32,
    heads=(3, 1),
    head_dim=16,
    vocabulary=300,
    sampled_rows=(2,),
)


class KernelSpeed:
    """Measures one kernel after another on `exact`'s device; `fast` shares it."""

    def __init__(
        self, exact: TritonBackend, fast: TritonBackend, clock: Clock, ceilings: Ceilings, dtype: torch.dtype,
        sizes: Sizes,
    ) -> None:  # fmt: skip
        self._exact, self._fast, self._clock, self._ceilings = exact, fast, clock, ceilings
        self._dtype, self._sizes, self._device = dtype, sizes, exact.device

    def run(self) -> Iterator[Line]:
        yield from self.decode()
        yield from self.prefill()
        yield from self.products()
        yield from self.row_wise()
        yield from self.moves()
        yield from self.sampling()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(self._dtype)

    def _memory(
        self, name: str, num_bytes: float, run: Callable[[], object], aim: float | None = None,
        **others: Callable[[], object],
    ) -> Line:  # fmt: skip
        return self._line(name, num_bytes, self._ceilings.copy_bytes_per_s, "TB/s", run, aim, others)

    def _compute(
        self, name: str, flops: float, run: Callable[[], object], aim: float | None = None,
        **others: Callable[[], object],
    ) -> Line:  # fmt: skip
        return self._line(name, flops, self._ceilings.product_flops_per_s, "TFLOP/s", run, aim, others)

    def _line(
        self, name: str, amount: float, ceiling: float, unit: str, run: Callable[[], object],
        aim: float | None,
        others: dict[str, Callable[[], object]],
    ) -> Line:  # fmt: skip
        """`aim`: the share of the ceiling that is aimed at, in both modes where both are timed."""
        seconds = self._clock.seconds(run)
        cells: dict[str, object] = {
            "us": round(seconds * 1e6, 1),
            unit: round(amount / seconds / 1e12, 4),
            "of ceiling": f"{amount / seconds / ceiling:.0%}",
        }
        shares = {"": amount / seconds / ceiling}
        for other, run_other in others.items():
            other_s = self._clock.seconds(run_other)
            cells[f"{other} us"] = round(other_s * 1e6, 1)
            if other == Mode.FAST:
                shares["fast, "] = amount / other_s / ceiling
        of = "of copy bandwidth" if unit == "TB/s" else "of the product"
        reached = () if aim is None else tuple(
            goals.of_ceiling(f"{mode}{of}", share, aim) for mode, share in shares.items()
        )  # fmt: skip
        return Line(name, cells, goals=reached)

    def decode(self) -> Iterator[Line]:
        for batch, context in self._sizes.decode:
            yield self._decode(batch, context)

    def _decode(self, batch: int, context: int) -> Line:
        heads, head_dim = self._sizes.heads, self._sizes.head_dim
        world = Paged([context] * batch, heads, head_dim, self._dtype, self._device)
        q, meta = world.meta([(i, context - 1, context) for i in range(batch)])
        num_bytes = batch * context * heads[1] * head_dim * 2 * self._dtype.itemsize
        keys, values = self._random(2, batch, heads[1], context, head_dim)
        rows = q.view(batch, heads[0], 1, head_dim)
        return self._memory(
            f"decode attention {batch} x {context}",
            num_bytes,
            lambda: self._exact.paged_attention(q, world.pool, 0, meta, world.scale),
            goals.decode_attention(batch, context),
            fast=lambda: self._fast.paged_attention(q, world.pool, 0, meta, world.scale),
            torch=lambda: functional.scaled_dot_product_attention(rows, keys, values, enable_gqa=True),
        )

    def prefill(self) -> Iterator[Line]:
        for length in self._sizes.prefill:
            yield self._prefill(length)

    def _prefill(self, length: int) -> Line:
        heads, head_dim = self._sizes.heads, self._sizes.head_dim
        world = Paged([length], heads, head_dim, self._dtype, self._device)
        q, meta = world.meta([(0, 0, length)])
        flops = 4.0 * heads[0] * head_dim * length * (length + 1) / 2
        rows = q.transpose(0, 1)[None].contiguous()
        keys, values = self._random(2, 1, heads[1], length, head_dim)
        return self._compute(
            f"prefill attention {length}",
            flops,
            lambda: self._exact.paged_attention(q, world.pool, 0, meta, world.scale),
            goals.prefill_attention(length),
            fast=lambda: self._fast.paged_attention(q, world.pool, 0, meta, world.scale),
            torch=lambda: functional.scaled_dot_product_attention(
                rows, keys, values, is_causal=True, enable_gqa=True
            ),
        )

    def products(self) -> Iterator[Line]:
        for num_rows, in_features, out_features in self._sizes.products:
            yield self._product(num_rows, in_features, out_features)

    def _product(self, num_rows: int, in_features: int, out_features: int) -> Line:
        x, weight = self._random(num_rows, in_features), self._random(out_features, in_features)
        flops = 2.0 * num_rows * in_features * out_features
        num_bytes = float(weight.nbytes + x.nbytes + num_rows * out_features * self._dtype.itemsize)
        by_memory = num_bytes / self._ceilings.copy_bytes_per_s > flops / self._ceilings.product_flops_per_s
        measure, amount = (self._memory, num_bytes) if by_memory else (self._compute, flops)
        return measure(
            f"product {num_rows} x {in_features} x {out_features}",
            amount,
            lambda: self._exact.linear(x, weight),
            torch=lambda: functional.linear(x, weight),
        )

    def row_wise(self) -> Iterator[Line]:
        width, item = self._sizes.width, self._dtype.itemsize
        num_rows = max(1, self._sizes.row_bytes // (width * item))
        x, residual, weight = (
            self._random(num_rows, width),
            self._random(num_rows, width),
            self._random(width),
        )
        num_bytes = num_rows * width * item
        yield self._memory(
            f"rms_norm {num_rows} x {width}",
            2 * num_bytes,
            lambda: self._exact.rms_norm(x, weight, 1e-5),
            goals.row_wise(2 * num_bytes),
            torch=lambda: functional.rms_norm(x, (width,), weight, 1e-5),
        )
        yield self._memory(
            f"residual and norm {num_rows} x {width}",
            4 * num_bytes,
            lambda: rowwise.add_rms_norm(x, residual, weight, 1e-5),
            goals.row_wise(4 * num_bytes),
        )
        yield self._memory(f"silu_mul {num_rows} x {width}", 1.5 * num_bytes, lambda: self._exact.silu_mul(x))
        heads, head_dim = self._sizes.heads, self._sizes.head_dim
        num_tokens = self._sizes.num_rotated(item)
        q, k, v = (self._random(num_tokens, n, head_dim) for n in (heads[0], heads[1], heads[1]))
        positions = torch.arange(num_tokens, device=self._device)
        angles = torch.rand(num_tokens, head_dim // 2, device=self._device)
        pool = self._random(-(-num_tokens // 64), 1, 2, 64, heads[1], head_dim)
        moved = 2 * (q.nbytes + k.nbytes + v.nbytes)
        yield self._memory(
            f"rotary and KV write {num_tokens}",
            moved,
            lambda: rowwise.rotary_write(q, k, v, positions, angles, angles, pool, 0, positions),
            goals.row_wise(moved),
        )

    def moves(self) -> Iterator[Line]:
        heads, head_dim = self._sizes.heads, self._sizes.head_dim
        layers = 4
        block_bytes = layers * 2 * 64 * heads[1] * head_dim * self._dtype.itemsize
        num_blocks = max(2, self._sizes.row_bytes // block_bytes)
        pool = self._random(num_blocks, layers, 2, 64, heads[1], head_dim)
        ids = torch.randperm(num_blocks).tolist()
        part = (range(layers), range(heads[1]))
        for layout in blocks.StagingLayout:
            staging = blocks.gather_blocks(pool, ids, *part, layout)
            yield self._memory(
                f"gather of {num_blocks} blocks, {layout.value}",
                2 * pool.nbytes,
                partial(blocks.gather_blocks, pool, ids, *part, layout),
                goals.row_wise(2 * pool.nbytes),
                torch=pool.clone,
            )
            yield self._memory(
                f"scatter of {num_blocks} blocks, {layout.value}",
                2 * pool.nbytes,
                partial(blocks.scatter_blocks, staging, pool, ids, *part, layout),
                goals.row_wise(2 * pool.nbytes),
            )

    def sampling(self) -> Iterator[Line]:
        """As decode steps have it, captured: its launches are many and short. Each row has a rule of every
        kind; what it cannot do without is to read the logits once."""
        for num_rows in self._sizes.sampled_rows:
            sampler = self._exact.make_device_sampler(num_rows, self._sizes.vocabulary)
            assert sampler is not None, "such a vocabulary is not too large"
            rules = [
                SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=seed)
                for seed in range(num_rows)
            ]
            sampler.set_rules(rules)
            logits = torch.randn(num_rows, self._sizes.vocabulary, device=self._device) * 4
            best, positions = logits.argmax(dim=1), torch.arange(num_rows, device=self._device)
            chosen = torch.zeros(2, num_rows, dtype=torch.int64, device=self._device)
            choose = partial(sampler.choose, logits, best, positions, DrawKind.NARROW, chosen)
            yield self._memory(
                f"top-k, top-p, min-p and draw {num_rows} x {self._sizes.vocabulary}",
                logits.nbytes,
                self._clock.captured(choose),
            )


def both_modes(exact: TritonBackend) -> tuple[TritonBackend, TritonBackend]:
    return exact, TritonBackend(Mode.FAST, exact.device, exact.tiles)
