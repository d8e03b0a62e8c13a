"""Part (b): in exact mode a row's bits are its own. Every line compares bits; `fast` is told only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_check.report import Line
from bench.gpu_check.served import graph_runner
from bench.gpu_check.worlds import Paged, make_pool, make_runner, random_weights, spec_of
from cluster.engine.batch import Row, Runner, SampleSpec, StepPlan
from cluster.engine.model_spec import Dtype
from cluster.engine.runner import ModelRunner
from cluster.engine.weights import TORCH_DTYPES
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams
from kernels.draw_kind import DrawKind
from kernels.ops import PARTITION_SIZE
from kernels.triton import attention, gemm
from kernels.triton.backend import TritonBackend
from kernels.triton.tiles import HOPPER, Mode, Tiles

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    products: tuple[tuple[int, int], ...]  # in, out
    num_rows: int
    heads: tuple[int, int]
    head_dim: int
    length: int
    model: str
    prompt: int
    num_tokens: int
    graph_rows: int  # of a captured decode step; at least one of them is padding


REAL = Sizes(
    products=((4096, 6144), (14336, 4096), (576, 960)),
    num_rows=300,
    heads=(32, 8),
    head_dim=128,
    length=1500,
    model="SmolLM2-135M",
    prompt=300,
    num_tokens=12,
    graph_rows=8,
)
TINY = Sizes(
    products=((200, 40),),
    num_rows=20,
    heads=(3, 1),
    head_dim=16,
    length=PARTITION_SIZE + 5,
    model="tiny, group 3, norms of heads",
    prompt=9,
    num_tokens=2,
    graph_rows=2,
)


def run(backend: TritonBackend, dtype: Dtype, sizes: Sizes) -> Iterator[Line]:
    torch_dtype = TORCH_DTYPES[dtype]
    for in_features, out_features in sizes.products:
        yield _products(backend, torch_dtype, sizes.num_rows, in_features, out_features)
    yield from _attention(backend, torch_dtype, sizes)
    yield from _engine(backend, dtype, sizes)


def _products(
    backend: TritonBackend, dtype: torch.dtype, num_rows: int, in_features: int, out_features: int
) -> Line:
    device = backend.device
    x = torch.randn(num_rows, in_features, device=device).to(dtype)
    weight = (torch.randn(out_features, in_features, device=device) * in_features**-0.5).to(dtype)
    tile = backend.tiles.gemm_for(dtype.itemsize)
    whole = gemm.linear(x, weight, None, dtype, tile, apart=False)
    cuts = [(0, 1), (num_rows - 1, num_rows), (3, 10), (0, num_rows // 2), (1, num_rows)]
    same = [torch.equal(backend.linear(x[a:b], weight), whole[a:b]) for a, b in cuts]
    same.append(torch.equal(gemm.linear(x, weight, None, dtype, tile, apart=True), whole))
    vendor = torch.nn.functional.linear(x, weight)
    fast = all(torch.equal(torch.nn.functional.linear(x[a:b], weight), vendor[a:b]) for a, b in cuts)
    return Line(
        f"rows of a product {in_features} x {out_features}",
        {"compared": len(same), "equal": sum(same), "note": f"the vendor's are {'equal' if fast else 'not'}"},
        holds=all(same),
    )


class _Attention:
    """The kernel with tiles, mode and number of splits of one's own."""

    def __init__(self, tiles: Tiles, mode: Mode, num_splits: int | None) -> None:
        self._tiles, self._mode, self._num_splits = tiles, mode, num_splits

    def attend(self, world: Paged, spans: list[tuple[int, int, int]]) -> list[Tensor]:
        q, meta = world.meta(spans)
        out = attention.paged_attention(
            q, world.pool, 0, meta, world.scale, self._tiles, self._mode, self._num_splits
        )
        return list(out.split([stop - start for _, start, stop in spans]))


def _attention(backend: TritonBackend, dtype: torch.dtype, sizes: Sizes) -> Iterator[Line]:
    length, tiles = sizes.length, backend.tiles
    world = Paged([length, length // 3], sizes.heads, sizes.head_dim, dtype, backend.device, BLOCK_SIZE)
    exact = _Attention(tiles, Mode.EXACT, None)
    [whole] = exact.attend(world, [(0, 0, length)])
    places = sorted({0, PARTITION_SIZE - 1, PARTITION_SIZE, length // 2, length - 1})

    def steps(kernel: _Attention) -> list[bool]:
        return [torch.equal(kernel.attend(world, [(0, p, p + 1)])[0][0], whole[p]) for p in places]

    for num_splits in (None, 1, 2, 3, 7):
        same = steps(_Attention(tiles, Mode.EXACT, num_splits))
        name = "as many as it likes" if num_splits is None else str(num_splits)
        yield Line(f"decode rows against the prompt, splits: {name}", _count(same), holds=all(same))
    chunk = max(37, length // 5)
    chunks = [(0, start, min(start + chunk, length)) for start in range(0, length, chunk)]
    same = [torch.equal(exact.attend(world, [span])[0], whole[span[1] : span[2]]) for span in chunks]
    yield Line("chunks against the prompt", _count(same), holds=all(same))
    batch = [(1, 0, length // 3), (0, length - 1, length), (1, 5, 9), (0, length // 2, length)]
    together = exact.attend(world, batch)
    same = [
        torch.equal(out, exact.attend(world, [span])[0]) for out, span in zip(together, batch, strict=True)
    ]
    yield Line("sequences side by side", _count(same), holds=all(same))
    yield Line("decode rows, fast", _count(steps(_Attention(tiles, Mode.FAST, 3))))
    if tiles is HOPPER:  # would make prefill faster: is it free?
        wide = dataclasses.replace(tiles.attention, rows=128, num_warps=8)
        [other] = _Attention(dataclasses.replace(tiles, attention=wide), Mode.EXACT, 1).attend(
            world, [(0, 0, length)]
        )
        yield Line("a prompt in tiles of 128 rows", _count([torch.equal(other, whole)]))


def _count(same: list[bool]) -> dict[str, int]:
    return {"compared": len(same), "equal": sum(same)}


def _engine(backend: TritonBackend, dtype: Dtype, sizes: Sizes) -> Iterator[Line]:
    """Tokens and log-probabilities of a request: alone, in chunks, among others, by single operations, and by
    captured steps with padding."""
    spec = spec_of(sizes.model)
    with torch.inference_mode():
        weights = random_weights(spec, TORCH_DTYPES[dtype], backend)
    per_request = -(-(sizes.prompt + sizes.num_tokens) // BLOCK_SIZE)

    def fresh_pool() -> Tensor:  # its last block: for padding
        return make_pool(sizes.model, dtype, backend.device, 5 * per_request + 1, BLOCK_SIZE)

    def runner(pool: Tensor | None = None, fuse: bool = True) -> ModelRunner:
        longest = sizes.prompt + sizes.num_tokens
        pool = fresh_pool() if pool is None else pool
        return make_runner(sizes.model, weights, dtype, backend, pool, longest, fuse)

    prompts = [
        [(7 * i + 31 * r) % (spec.vocab_size - 3) + 3 for i in range(sizes.prompt - r)] for r in range(5)
    ]
    alone = generate(runner(), prompts[:1], sizes.num_tokens, None, per_request)[0]
    pool = fresh_pool()
    captured = graph_runner(runner(pool), pool, backend, (sizes.graph_rows,))
    yield Line(
        f"decode steps of {sizes.model} captured",
        {"expected": len(DrawKind), "found": captured.num_captured},
        holds=captured.num_captured == len(DrawKind),
    )
    kinds = {
        "in chunks": generate(
            runner(), prompts[:1], sizes.num_tokens, max(2, sizes.prompt // 3), per_request
        )[0],
        "among others": generate(runner(), prompts, sizes.num_tokens, None, per_request)[0],
        "by single operations": generate(
            runner(fuse=False), prompts[:1], sizes.num_tokens, None, per_request
        )[0],
        "by captured steps": generate(
            captured.runner, prompts[: sizes.graph_rows - 1], sizes.num_tokens, None, per_request
        )[0],
    }
    for name, outputs in kinds.items():
        same = [a == b for a, b in zip(alone, outputs, strict=True)]
        yield Line(f"tokens and log-probabilities of {sizes.model}, {name}", _count(same), holds=all(same))


def generate(
    runner: Runner, prompts: list[list[int]], num_tokens: int, chunk: int | None, per_request: int
) -> list[list[object]]:
    """Each prompt's outputs, all prompts in one batch, in chunks of the same size; sampled, with
    log-probabilities."""
    ids: list[list[int]] = [[] for _ in prompts]
    outputs: list[list[object]] = [[] for _ in prompts]
    blocks = [
        [BlockId(len(prompts) * b + index) for b in range(per_request)] for index in range(len(prompts))
    ]
    specs = [
        SampleSpec(
            SamplingParams(max_tokens=num_tokens, seed=index, temperature=0.8, top_p=0.9, num_logprobs=2),
            prompt,
            ids[index],
        )
        for index, prompt in enumerate(prompts)
    ]
    computed = 0  # of the prompts
    while len(ids[0]) < num_tokens:
        rows = []
        for index, prompt in enumerate(prompts):
            sequence = [*prompt, *ids[index]]
            first = computed if not ids[index] else len(sequence) - 1
            stop = min(len(sequence), first + chunk) if chunk and not ids[index] else len(sequence)
            rows.append(
                Row(
                    request=RequestId(str(index)),
                    attempt=Attempt(1),
                    token_ids=sequence[first:stop],
                    start=first,
                    block_ids=blocks[index],
                    sample=specs[index] if stop == len(sequence) else None,
                )
            )
        computed += chunk or 0
        for index, output in enumerate(runner.run(StepPlan(rows=tuple(rows))).outputs):
            if output is not None:
                ids[index].append(output.token_id)
                outputs[index].append(output)
    return outputs
