"""Part (c): prefill in one process, decode in another, on one GPU: the same tokens as in one.

1. Here everything is computed over one pool, the prompts in chunks of one size: what is expected.
2. Another process computes the prompts in chunks of another size, into other blocks of its own pool, and
   writes every finished block into this process's second pool over the edge. It says token 0 of each.
3. Here the second pool is decoded, all requests in one batch. Tokens and log-probabilities must be equal, bit
   for bit, and so must the keys and values of the prompts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
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
from cluster.engine.runner import ModelRunner
from cluster.engine.weights import TORCH_DTYPES
from cluster.ids import BlockId, Epoch, WorkerId
from cluster.kv.edge import EdgeConfig, EdgeName
from cluster.kv.edges import EdgeKind, make_pool, make_receiver, make_source_pool
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from cluster.sampling import TokenOutput

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
    with ExitStack() as stack:
        world = _World(kind, backend, dtype, sizes, stack)
        expected = _requests(world.prompts, sizes.num_tokens, range(world.layout.num_blocks))
        found = _requests(world.prompts, sizes.num_tokens, range(world.layout.num_blocks)[::-1])
        runner = world.runner(world.own)
        for request in expected:
            start = 0
            while start < len(request.prompt):
                start = compute_chunk(runner, request, start, sizes.chunks[0])
        decode(runner, expected)

        num_bytes, firsts = await world.compute_elsewhere(found)
        num_blocks = sum(world.num_prompt_blocks(request) for request in found)
        yield Line(
            f"blocks written over {kind.value}",
            {"expected": num_blocks, "found": num_bytes // world.layout.bytes_per_block},
            holds=num_bytes == num_blocks * world.layout.bytes_per_block,
        )
        pools = world.own.tensor, world.shared.tensor
        kept = [_same_prompt(*pools, one, other) for one, other in zip(expected, found, strict=True)]
        yield Line("keys and values of prompts", {"expected": len(kept), "found": sum(kept)}, holds=all(kept))
        for request, first in zip(found, firsts, strict=True):
            request.outputs.append(first)
        decode(world.runner(world.shared), found)
        for one, other in zip(expected, found, strict=True):
            same = [a == b for a, b in zip(one.outputs, other.outputs, strict=True)]
            yield Line(
                f"tokens and log-probabilities after a prompt of {len(one.prompt)}",
                {"expected": len(same), "found": sum(same)},
                holds=all(same),
            )


class _World:
    """A model, prompts, and two pools here: one for everything, one that the other process writes into."""

    def __init__(self, kind: EdgeKind, backend: str, dtype: Dtype, sizes: Sizes, stack: ExitStack) -> None:
        """`stack` closes the pools."""
        spec = spec_of(sizes.model)
        self._kind, self._backend, self._dtype, self._sizes = kind, backend, dtype, sizes
        self._ops = make_backend(backend, 1)
        with torch.inference_mode():
            self._weights = random_weights(spec, TORCH_DTYPES[dtype], self._ops)
        self._longest = max(sizes.prompts) + sizes.num_tokens
        self.prompts = [
            [(7 * i + 31 * r) % (spec.vocab_size - 3) + 3 for i in range(length)]
            for r, length in enumerate(sizes.prompts)
        ]
        self.layout = KVLayout(
            layers=range(spec.num_layers),
            heads=range(spec.num_kv_heads),
            head_dim=spec.head_dim,
            block_size=sizes.block_size,
            num_blocks=-(-self._longest // sizes.block_size) * len(sizes.prompts),
            dtype=dtype.wire_name,
        )
        self.own = make_source_pool(kind, self.layout)
        stack.callback(self.own.close)
        self.shared = make_pool(kind, self.layout)
        stack.callback(self.shared.close)

    def runner(self, pool: KVPool) -> ModelRunner:
        return make_runner(
            self._sizes.model, self._weights, self._dtype, self._ops, pool.tensor, self._longest
        )

    def num_prompt_blocks(self, request: CheckRequest) -> int:
        return -(-len(request.prompt) // self.layout.block_size)

    async def compute_elsewhere(self, requests: list[CheckRequest]) -> tuple[int, list[TokenOutput]]:
        """Have the prompts computed in another process, into these requests' blocks here; returns the bytes
        written and token 0 of each."""
        name = EdgeName(WorkerId(PREFILL), Epoch(1), WorkerId(DECODE), Epoch(1))
        geometry = self.layout.to_geometry()
        receiver = make_receiver(self._kind, self.shared, name=name, peer=geometry)
        dial = Dial(
            kind=self._kind.value,
            prefill=PREFILL,
            prefill_epoch=1,
            decode=DECODE,
            geometry=geometry,
            endpoint=receiver.endpoint(),
            slot_bytes=EdgeConfig().slot_bytes,
        )
        compute = Compute(
            backend=self._backend,
            model=self._sizes.model,
            dtype=self._dtype.value,
            prompts=self.prompts,
            chunk=self._sizes.chunks[1],
            num_tokens=self._sizes.num_tokens,
            num_threads=torch.get_num_threads(),
            target_blocks=[list(request.blocks[: self.num_prompt_blocks(request)]) for request in requests],
        )
        peer = await PeerProcess.start({})
        try:
            await peer.ask(dial)
            done = await peer.ask(compute)
        finally:
            await peer.end()
            await receiver.close()
        return done.num_bytes, done.outputs


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
    num_tokens = len(one.prompt)
    kept: list[Tensor] = []
    for pool, request in ((own, one), (shared, other)):
        blocks = (
            pool[list(request.blocks)].transpose(0, 2).transpose(0, 1)
        )  # [layers, 2, blocks, tokens, ...]
        kept.append(blocks.flatten(2, 3)[:, :, :num_tokens].contiguous().view(torch.int16))
    return bool(torch.equal(*kept))
