"""Part (a): every kernel against the reference on the same device, over odd shapes and every dtype.

An error is told as a share of what is allowed, |kernel - reference| / (tolerance · (1 + |reference|)): 1 is
the limit. Tokens must be equal to those of the engine's definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_check.report import Line
from bench.gpu_check.worlds import Paged
from cluster.engine.batch import SampleSpec
from cluster.engine.sampler import sample
from cluster.engine.token_choice import TokenChooser
from cluster.sampling import SamplingParams
from kernels.ops import StepResult
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
        yield from check.attention()
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
        told = self._ops.fallbacks.num_told
        actual, expected = kernel().double(), reference().double()
        tolerance = TOLERANCES[self._dtype]
        share = ((actual - expected).abs() / (tolerance * (1 + expected.abs()))).max().item()
        cells = {"dtype": str(self._dtype).removeprefix("torch."), "share of tolerance": round(share, 4)}
        if self._ops.fallbacks.num_told > told:
            return Line(name, cells | {"note": "went to the reference"}, holds=False)
        return Line(name, cells, holds=share <= 1.0)

    def row_wise(self) -> Iterator[Line]:
        ops, reference, num_tokens = self._ops, self._reference, self._sizes.num_tokens
        for width in self._sizes.widths:
            x, residual, weight = (
                self._random(num_tokens, width),
                self._random(num_tokens, width),
            )
            self._random(width)
            yield self._compare(
                f"rms_norm of {width}",
                lambda x=x, w=weight: ops.rms_norm(x, w, 1e-5),
                lambda x=x, w=weight: reference.rms_norm(x, w, 1e-5),
            )
            yield self._compare(
                f"residual and norm of {width}",
                lambda x=x, r=residual, w=weight: torch.cat(rowwise.add_rms_norm(x, r, w, 1e-5)),
                lambda x=x, r=residual, w=weight: torch.cat([reference.rms_norm(r + x, w, 1e-5), r + x]),
            )
            gate_up = self._random(num_tokens, 2 * width) * 4
            yield self._compare(
                f"silu_mul of {width}",
                lambda g=gate_up: ops.silu_mul(g),
                lambda g=gate_up: reference.silu_mul(g),
            )

    def heads(self) -> Iterator[Line]:
        reference, num_tokens, device = self._reference, self._sizes.num_tokens, self._ops.device
        for num_heads, num_kv_heads, head_dim in self._sizes.heads:
            counts = (num_heads, num_kv_heads, num_kv_heads)
            q, k, v = (self._random(num_tokens, count, head_dim) for count in counts)
            positions = torch.randint(0, 200, (num_tokens,), device=device)
            angles = torch.rand(200, head_dim // 2, device=device) * 6
            turn = (positions, angles.cos(), angles.sin())
            slots = torch.randperm(64 * 4, device=device)[:num_tokens]
            pools = [self._random(4, 2, 2, 64, num_kv_heads, head_dim).zero_() for _ in range(2)]

            def fused(q=q, k=k, v=v, turn=turn, pool=pools[0], slots=slots) -> Tensor:  # type: ignore[no-untyped-def]
                rotated = rowwise.rotary_write(q, k, v, *turn, pool, 1, slots)
                return torch.cat([rotated.flatten(), pool.flatten()])

            def apart(q=q, k=k, v=v, turn=turn, pool=pools[1], slots=slots) -> Tensor:  # type: ignore[no-untyped-def]
                reference.write_kv(reference.rotary(k, *turn), v, pool, 1, slots)
                return torch.cat([reference.rotary(q, *turn).flatten(), pool.flatten()])

            yield self._compare(f"rotary and KV write {num_heads}/{num_kv_heads} x {head_dim}", fused, apart)

    def attention(self) -> Iterator[Line]:
        lengths = self._sizes.lengths
        mixed = [(i, length - min(length, 1 + 20 * (i % 2)), length) for i, length in enumerate(lengths)]
        kinds = {
            "prefill": [(i, 0, length) for i, length in enumerate(lengths)],
            "decode": [(i, length - 1, length) for i, length in enumerate(lengths)],
            "chunks and decode": mixed,
        }
        for num_heads, num_kv_heads, head_dim in self._sizes.heads:
            heads = (num_heads, num_kv_heads)
            world = Paged(lengths, heads, head_dim, self._dtype, self._ops.device)
            for kind, spans in kinds.items():
                yield self._compare(
                    f"attention {kind} {num_heads}/{num_kv_heads} x {head_dim}",
                    lambda w=world, s=spans: torch.cat(w.attend(self._ops, s)),
                    lambda w=world, s=spans: torch.cat(w.attend(self._reference, s)),
                )

    def products(self) -> Iterator[Line]:
        for num_rows, in_features, out_features in self._sizes.products:
            x = self._random(num_rows, in_features)
            weight, bias = (self._random(out_features, in_features) * in_features**-0.5,)
            self._random(out_features)
            shape = f"{num_rows} x {in_features} x {out_features}"
            yield self._compare(
                f"linear {shape}",
                lambda x=x, w=weight, b=bias: self._ops.linear(x, w, b),
                lambda x=x, w=weight, b=bias: self._reference.linear(x, w, b),
            )
            yield self._compare(
                f"linear to fp32 {shape}",
                lambda x=x, w=weight: self._ops.linear_fp32(x, w),
                lambda x=x, w=weight: self._reference.linear_fp32(x, w),
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


RULES: tuple[dict[str, float | int], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"top_p": 0.95, "min_p": 0.01},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_k": 200},
    {"num_logprobs": 4, "top_p": 0.5},
)


def tokens(backend: TritonBackend, vocabulary: int) -> Line:
    logits = torch.randn(len(RULES), vocabulary, generator=torch.Generator().manual_seed(1)) * 4
    specs = [
        SampleSpec(SamplingParams(max_tokens=9, seed=i, **rule), (1, 2, 3), (5, 5, 7))  # type: ignore[arg-type]
        for i, rule in enumerate(RULES)
    ]
    on_device = logits.to(backend.device)
    result = StepResult(torch.empty(0), on_device, on_device.argmax(dim=1))
    chosen = TokenChooser(backend, vocabulary)(result, specs, range(len(RULES)))
    expected = sample(logits, specs, range(len(RULES)))
    num_equal = sum(a == b for a, b in zip(chosen, expected, strict=True))
    cells = {"equal": f"{num_equal} of {len(RULES)}"}
    return Line(f"tokens of {vocabulary} logits", cells, holds=num_equal == len(RULES))
