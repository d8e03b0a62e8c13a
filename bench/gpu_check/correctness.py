"""Part (a): every kernel against the reference on the same device, over odd shapes and every dtype.

An error is told as a share of what is allowed, |kernel - reference| / (tolerance · (1 + |reference|)): 1 is
the limit. Tokens must be equal to those of the engine's definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import Tensor

from bench.gpu_check.report import Line
from bench.gpu_check.worlds import Paged
from cluster.engine.batch import SampleSpec
from cluster.engine.sampler import sample
from cluster.engine.token_choice import TokenChooser
from cluster.sampling import SamplingParams
from kernels.ops import Backend, StepResult
from kernels.reference import ReferenceBackend
from kernels.triton import blocks, rowwise
from kernels.triton.backend import TritonBackend

TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Sizes:
    widths: tuple[int, ...]  # of rows
    num_tokens: int
    heads: tuple[tuple[int, int, int], ...]  # query heads, KV heads, head_dim
    lengths: tuple[int, ...]  # of sequences
    products: tuple[tuple[int, int, int], ...]  # rows, in, out
    vocabulary: int


REAL = Sizes(
    widths=(4096, 576, 1023, 7),
    num_tokens=77,
    heads=((32, 8, 128), (9, 3, 64), (8, 8, 80), (16, 1, 256)),
    lengths=(1, 63, 64, 129, 1000),
    products=((1, 4096, 6144), (77, 576, 960), (300, 1023, 517), (5, 14336, 4096), (129, 7, 3)),
    vocabulary=128_256,
)
FEWER = Sizes(  # of dtypes that no model is served in on a GPU
    widths=(576,),
    num_tokens=77,
    heads=((9, 3, 64),),
    lengths=(1, 63, 64, 129, 1000),
    products=((77, 576, 960), (5, 1023, 517)),
    vocabulary=0,
)
TINY = Sizes(
    widths=(40, 7),
    num_tokens=5,
    heads=((3, 1, 24), (4, 4, 16)),
    lengths=(1, 17, 130),
    products=((1, 130, 40), (18, 33, 7)),
    vocabulary=300,
)


def run(backend: TritonBackend, sizes: dict[torch.dtype, Sizes]) -> Iterator[Line]:
    for dtype, of_dtype in sizes.items():
        check = _Check(backend, dtype, of_dtype)
        yield from check.row_wise()
        yield from check.heads()
        yield from check.products()
        yield from check.moves()
    yield tokens(backend, max(of_dtype.vocabulary for of_dtype in sizes.values()))


class _Check:
    def __init__(self, backend: TritonBackend, dtype: torch.dtype, sizes: Sizes) -> None:
        self._ops, self._reference = backend, ReferenceBackend(backend.device)
        self._dtype, self._sizes = dtype, sizes

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._ops.device).to(self._dtype)

    def _compare(self, name: str, kernel: Callable[[], Tensor], reference: Callable[[], Tensor]) -> Line:
        before = self._ops.fallbacks.num_calls
        actual, expected = kernel().double(), reference().double()
        tolerance = TOLERANCES[self._dtype]
        share = ((actual - expected).abs() / (tolerance * (1 + expected.abs()))).max().item()
        cells = {"dtype": str(self._dtype).removeprefix("torch."), "share of tolerance": round(share, 4)}
        if self._ops.fallbacks.num_calls > before:
            return Line(name, cells | {"note": "went to the reference"}, holds=False)
        return Line(name, cells, holds=share <= 1.0)

    def row_wise(self) -> Iterator[Line]:
        for width in self._sizes.widths:
            yield from self._rows_of(width)

    def _rows_of(self, width: int) -> Iterator[Line]:
        ops, reference, num_tokens = self._ops, self._reference, self._sizes.num_tokens
        x, residual = self._random(num_tokens, width), self._random(num_tokens, width)
        weight, gate_up = self._random(width), self._random(num_tokens, 2 * width) * 4
        yield self._compare(
            f"rms_norm of {width}",
            lambda: ops.rms_norm(x, weight, 1e-5),
            lambda: reference.rms_norm(x, weight, 1e-5),
        )
        yield self._compare(
            f"residual and norm of {width}",
            lambda: torch.cat(rowwise.add_rms_norm(x, residual, weight, 1e-5)),
            lambda: torch.cat([reference.rms_norm(residual + x, weight, 1e-5), residual + x]),
        )
        yield self._compare(
            f"silu_mul of {width}", lambda: ops.silu_mul(gate_up), lambda: reference.silu_mul(gate_up)
        )

    def heads(self) -> Iterator[Line]:
        for num_heads, num_kv_heads, head_dim in self._sizes.heads:
            yield from self._rotary_and_write(num_heads, num_kv_heads, head_dim)
            yield from self._attention(num_heads, num_kv_heads, head_dim)

    def _rotary_and_write(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Iterator[Line]:
        """In one launch, and apart."""
        ops, reference, num_tokens, device = (
            self._ops, self._reference, self._sizes.num_tokens, self._ops.device,
        )  # fmt: skip
        counts = (num_heads, num_kv_heads, num_kv_heads)
        q, k, v = (self._random(num_tokens, count, head_dim) for count in counts)
        positions = torch.randint(0, 200, (num_tokens,), device=device)
        angles = torch.rand(200, head_dim // 2, device=device) * 6
        cos, sin = angles.cos(), angles.sin()
        slots = torch.randperm(64 * 4, device=device)[:num_tokens]
        pools = [self._random(4, 2, 2, 64, num_kv_heads, head_dim).zero_() for _ in range(2)]

        def fused() -> Tensor:
            rotated = rowwise.rotary_write(q, k, v, positions, cos, sin, pools[0], 1, slots)
            return torch.cat([rotated.flatten(), pools[0].flatten()])

        def apart() -> Tensor:
            reference.write_kv(reference.rotary(k, positions, cos, sin), v, pools[1], 1, slots)
            return torch.cat([reference.rotary(q, positions, cos, sin).flatten(), pools[1].flatten()])

        def written(backend: Backend) -> Tensor:
            pool = torch.zeros_like(pools[0])
            backend.write_kv(k, v, pool, 1, slots)
            return pool

        yield self._compare(f"rotary and KV write {num_heads}/{num_kv_heads} x {head_dim}", fused, apart)
        yield self._compare(
            f"rotary {num_heads} x {head_dim}",
            lambda: ops.rotary(q, positions, cos, sin),
            lambda: reference.rotary(q, positions, cos, sin),
        )
        yield self._compare(
            f"KV write {num_kv_heads} x {head_dim}", lambda: written(ops), lambda: written(reference)
        )

    def _attention(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Iterator[Line]:
        lengths = self._sizes.lengths
        world = Paged(lengths, (num_heads, num_kv_heads), head_dim, self._dtype, self._ops.device)
        mixed = [(i, length - min(length, 1 + 20 * (i % 2)), length) for i, length in enumerate(lengths)]
        kinds = {
            "prefill": [(i, 0, length) for i, length in enumerate(lengths)],
            "decode": [(i, length - 1, length) for i, length in enumerate(lengths)],
            "chunks and decode": mixed,
        }
        for kind, spans in kinds.items():
            yield self._compare(
                f"attention {kind} {num_heads}/{num_kv_heads} x {head_dim}",
                partial(_attended, world, self._ops, spans),
                partial(_attended, world, self._reference, spans),
            )

    def products(self) -> Iterator[Line]:
        for num_rows, in_features, out_features in self._sizes.products:
            yield from self._product(num_rows, in_features, out_features)

    def _product(self, num_rows: int, in_features: int, out_features: int) -> Iterator[Line]:
        x, bias = self._random(num_rows, in_features), self._random(out_features)
        weight = self._random(out_features, in_features) * in_features**-0.5
        shape = f"{num_rows} x {in_features} x {out_features}"
        yield self._compare(
            f"linear {shape}",
            lambda: self._ops.linear(x, weight, bias),
            lambda: self._reference.linear(x, weight, bias),
        )
        yield self._compare(
            f"linear to fp32 {shape}",
            lambda: self._ops.linear_fp32(x, weight),
            lambda: self._reference.linear_fp32(x, weight),
        )

    def moves(self) -> Iterator[Line]:
        pool = self._random(5, 3, 2, 16, 3, 24)
        layout, dtype = blocks.StagingLayout.HEADS_FIRST, torch.float32
        yield self._compare(
            "gather of blocks",
            lambda: blocks.gather_blocks(pool, [4, 1], range(1, 3), range(2), layout, dtype),
            lambda: pool[[4, 1], 1:3, :, :, :2].permute(0, 4, 1, 2, 3, 5).to(dtype),
        )
        staging, target = self._random(2, 2, 2, 2, 16, 24).float(), pool.clone()

        def scattered() -> Tensor:
            blocks.scatter_blocks(staging, target, [0, 3], range(1, 3), range(2), layout)
            return target[[0, 3], 1:3, :, :, :2]

        yield self._compare(
            "scatter of blocks", scattered, lambda: staging.permute(0, 2, 3, 4, 1, 5).to(self._dtype)
        )


def _attended(world: Paged, ops: Backend, spans: list[tuple[int, int, int]]) -> Tensor:
    return torch.cat(world.attend(ops, spans))


RULES = (
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, temperature=0.7, top_k=50, top_p=0.9),
    SamplingParams(max_tokens=9, top_p=0.95, min_p=0.01),
    SamplingParams(max_tokens=9, repetition_penalty=1.2, frequency_penalty=0.3, top_k=200),
    SamplingParams(max_tokens=9, num_logprobs=4, top_p=0.5),
)


def tokens(backend: TritonBackend, vocabulary: int) -> Line:
    logits = torch.randn(len(RULES), vocabulary, generator=torch.Generator().manual_seed(1)) * 4
    specs = [
        SampleSpec(msgspec.structs.replace(rule, seed=i), (1, 2, 3), (5, 5, 7))
        for i, rule in enumerate(RULES)
    ]
    on_device = logits.to(backend.device)
    result = StepResult(torch.empty(0), on_device, on_device.argmax(dim=1))
    chosen = TokenChooser(backend, vocabulary)(result, specs, range(len(RULES)))
    expected = sample(logits, specs, range(len(RULES)))
    num_equal = sum(a == b for a, b in zip(chosen, expected, strict=True))
    cells = {"equal": f"{num_equal} of {len(RULES)}"}
    return Line(f"tokens of {vocabulary} logits", cells, holds=num_equal == len(RULES))
