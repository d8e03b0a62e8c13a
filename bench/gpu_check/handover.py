"""Part (d): prefill in one process, decode in another, on one GPU: the same tokens as in one.

1. Here everything is computed over one pool, the prompts in chunks of one size: what is expected.
2. Another process computes the prompts in chunks of another size, into other blocks of its own pool, and
   writes every finished block into this process's second pool over the edge. It says token 0 of each.
3. Here the second pool is decoded, all requests in one batch. Tokens and log-probabilities must be equal, bit
   for bit, and so must the keys and values of the prompts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_check.peer_messages import Compute, Dial
from bench.gpu_check.peer_process import PeerProcess
from bench.gpu_check.report import Line
from bench.gpu_check.requests import CheckRequest, compute_chunk, decode
from bench.gpu_check.worlds import make_runner, random_weights, spec_of
from cluster.engine.backends import make_backend
from cluster.engine.model_spec import Dtype
from cluster.engine.weights import TORCH_DTYPES
from cluster.ids import BlockId, Epoch, WorkerId
from cluster.kv.edge import EdgeConfig, EdgeName
from cluster.kv.edges import EdgeKind, make_pool, make_receiver, make_source_pool
from cluster.kv.layout import KVLayout

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Sizes:
    model: str
    prompts: tuple[int, ...]  # their lengths
    num_tokens: int
    chunks: tuple[int, int]  # prompt tokens per step: here, and in the other process
    block_size: int


REAL = Sizes("SmolLM2-135M", prompts=(700, 333, 64, 5), num_tokens=16, chunks=(512, 150), block_size=64)
TINY = Sizes(
    "tiny, group 3, norms of heads", prompts=(21, 16, 3), num_tokens=3, chunks=(16, 9), block_size=16
)


async def check(kind: EdgeKind, backend: str, dtype: Dtype, sizes: Sizes) -> AsyncIterator[Line]:
    """`kind` is an edge in place; `backend` is a name that `make_backend` knows."""
    spec, ops = spec_of(sizes.model), make_backend(backend, 1)
    with torch.inference_mode():
        weights = random_weights(spec, TORCH_DTYPES[dtype], ops)
    longest = max(sizes.prompts) + sizes.num_tokens
    per_request = -(-longest // sizes.block_size)
    layout = KVLayout(
        layers=range(spec.num_layers),
        heads=range(spec.num_kv_heads),
        head_dim=spec.head_dim,
        block_size=sizes.block_size,
        num_blocks=per_request * len(sizes.prompts),
        dtype=dtype.wire_name,
    )
    prompts = [
        [(7 * i + 31 * r) % (spec.vocab_size - 3) + 3 for i in range(length)]
        for r, length in enumerate(sizes.prompts)
    ]
    block_ids = range(layout.num_blocks)
    expected = _requests(prompts, sizes.num_tokens, block_ids)
    found = _requests(prompts, sizes.num_tokens, block_ids[::-1])
    own, shared = make_source_pool(kind, layout), make_pool(kind, layout)
    runner = make_runner(sizes.model, weights, dtype, ops, own.tensor, longest)
    for request in expected:
        start = 0
        while start < len(request.prompt):
            start = compute_chunk(runner, request, start, sizes.chunks[0])
    decode(runner, expected)

    name = EdgeName(WorkerId(PREFILL), Epoch(1), WorkerId(DECODE), Epoch(1))
    geometry = layout.to_geometry()
    receiver = make_receiver(kind, shared, name=name, peer=geometry)
    peer = await PeerProcess.start({})
    try:
        dial = Dial(
            kind=kind.value,
            prefill=PREFILL,
            prefill_epoch=1,
            decode=DECODE,
            geometry=geometry,
            endpoint=receiver.endpoint(),
            slot_bytes=EdgeConfig().slot_bytes,
        )
        await peer.ask(dial)
        targets = [list(request.blocks[: -(-len(request.prompt) // sizes.block_size)]) for request in found]
        done = await peer.ask(
            Compute(
                backend=backend,
                model=sizes.model,
                dtype=dtype.value,
                prompts=prompts,
                chunk=sizes.chunks[1],
                num_tokens=sizes.num_tokens,
                target_blocks=targets,
            )
        )
    finally:
        await peer.end()
        await receiver.close()
    num_blocks = sum(len(blocks) for blocks in targets)
    yield Line(
        f"blocks written over {kind.value}",
        {"expected": num_blocks, "found": done.num_bytes // layout.bytes_per_block},
        holds=done.num_bytes == num_blocks * layout.bytes_per_block,
    )
    kept = [
        _same_prompt(own.tensor, shared.tensor, one, other)
        for one, other in zip(expected, found, strict=True)
    ]
    yield Line("keys and values of prompts", {"expected": len(kept), "found": sum(kept)}, holds=all(kept))
    for request, first in zip(found, done.outputs, strict=True):
        request.outputs.append(first)
    decode(make_runner(sizes.model, weights, dtype, ops, shared.tensor, longest), found)
    for one, other in zip(expected, found, strict=True):
        same = [a == b for a, b in zip(one.outputs, other.outputs, strict=True)]
        yield Line(
            f"tokens and log-probabilities after a prompt of {len(one.prompt)}",
            {"expected": len(same), "found": sum(same)},
            holds=all(same),
        )
    own.close()
    shared.close()


def _requests(prompts: list[list[int]], num_tokens: int, block_ids: Sequence[int]) -> list[CheckRequest]:
    """Each with its share of the blocks, in order."""
    share = len(block_ids) // len(prompts)
    return [
        CheckRequest(
            index, prompt, num_tokens, [BlockId(b) for b in block_ids[share * index : share * (index + 1)]]
        )
        for index, prompt in enumerate(prompts)
    ]


def _same_prompt(own: Tensor, shared: Tensor, one: CheckRequest, other: CheckRequest) -> bool:
    """Whether both pools hold the same bits for the tokens of the prompt."""
    num_tokens, kept = len(one.prompt), []
    for pool, request in ((own, one), (shared, other)):
        blocks = (
            pool[list(request.blocks)].transpose(0, 2).transpose(0, 1)
        )  # [layers, 2, blocks, tokens, ...]
        kept.append(blocks.flatten(2, 3)[:, :, :num_tokens].contiguous().view(torch.int16))
    return torch.equal(*kept)
