"""The second process of a transfer check: a prefill worker's end of an edge, and its engine.

Run as `python -m bench.gpu_check.peer FD` by `peer_process`: commands come in and answers go out on that
socket, one JSON value per line (`peer_messages`); the first answer says that it is there. It ends when the
other end is closed.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import msgspec
import torch

from bench.gpu_check.peer_messages import Compute, Dial, Done, Send, ToPeer
from bench.gpu_check.requests import CheckRequest, compute_chunk
from bench.gpu_check.worlds import make_runner, random_weights, spec_of
from cluster.engine.backends import make_backend
from cluster.engine.block_mover import BlockMover
from cluster.engine.model_spec import Dtype
from cluster.engine.weights import TORCH_DTYPES
from cluster.errors import BatonError
from cluster.ids import Attempt, BlockId, Epoch, PieceIndex, RequestId, WorkerId
from cluster.kv.edge import EdgeConfig, EdgeName, KVSender, Piece
from cluster.kv.edges import EdgeKind, edge_kind, make_sender, make_source_pool
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from cluster.sampling import TokenOutput


def random_bytes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The same in every process; on the host, as 16-bit words."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape, dtype=torch.int16).random_(-(2**15), 2**15, generator=generator)


def mover_for(kind: EdgeKind) -> BlockMover | None:
    """Between GPUs the kernel moves every part of a piece, so that it is checked whether it pays or not."""
    return BlockMover(always=True) if kind is EdgeKind.NCCL else None


def edge_config(slot_bytes: int) -> EdgeConfig:
    """Of both ends. A process that has just begun connects slowly: device and NCCL are loaded only then."""
    return EdgeConfig(connect_timeout_s=30.0, close_timeout_s=40.0, slot_bytes=slot_bytes)


class Peer:
    """One prefill worker; commands one at a time."""

    def __init__(self) -> None:
        self._pool: KVPool | None = None
        self._sender: KVSender | None = None

    async def obey(self, command: ToPeer) -> Done:
        try:
            match command:
                case Dial():
                    return await self._dial(command)
                case Send():
                    return await self._send(command)
                case Compute():
                    return await self._compute(command)
        except BatonError as error:
            return Done(error=str(error))

    async def _dial(self, command: Dial) -> Done:
        kind, layout = edge_kind(command.kind), KVLayout.from_geometry(command.geometry)
        self._pool = make_source_pool(kind, layout)
        if command.seed is not None:
            words = self._pool.tensor.view(torch.int16)
            words.copy_(random_bytes(tuple(words.shape), command.seed))
        name = EdgeName(
            WorkerId(command.prefill), Epoch(command.prefill_epoch), WorkerId(command.decode), Epoch(1)
        )
        self._sender = make_sender(
            kind,
            self._pool,
            name=name,
            peer=command.geometry,
            endpoint=command.endpoint,
            config=edge_config(command.slot_bytes),
            mover=mover_for(kind),
        )
        await self._sender.ready()
        return Done()

    async def _send(self, command: Send) -> Done:
        assert self._sender is not None, "it was not told to dial"
        piece = Piece(RequestId("r"), Attempt(1), PieceIndex(command.index), 0, len(command.sources))
        blocks = [BlockId(block) for block in command.sources]
        return Done(num_bytes=await self._sender.send(piece, blocks, ()))

    async def _compute(self, command: Compute) -> Done:
        assert self._pool is not None, "it was not told to dial"
        torch.set_num_threads(command.num_threads)
        dtype, backend = Dtype(command.dtype), make_backend(command.backend, command.num_threads)
        with torch.inference_mode():
            weights = random_weights(spec_of(command.model), TORCH_DTYPES[dtype], backend)
        longest = max(len(prompt) for prompt in command.prompts) + command.num_tokens
        runner = make_runner(command.model, weights, dtype, backend, self._pool.tensor, longest)
        num_bytes = 0
        outputs: list[TokenOutput] = []
        free = list(range(self._pool.layout.num_blocks - 1, -1, -1))  # other blocks than D's
        for index, (prompt, targets) in enumerate(zip(command.prompts, command.target_blocks, strict=True)):
            blocks = [BlockId(free.pop(0)) for _ in targets]
            request = CheckRequest(index, prompt, command.num_tokens, blocks)
            start, num_sent, piece_index = 0, 0, 0
            while start < len(prompt):
                start = compute_chunk(runner, request, start, command.chunk)
                finished = len(targets) if start == len(prompt) else start // self._pool.layout.block_size
                if finished > num_sent:
                    num_bytes += await self._write(index, piece_index, num_sent, blocks, targets, finished)
                    num_sent, piece_index = finished, piece_index + 1
            outputs.append(request.outputs[0])
        return Done(num_bytes=num_bytes, outputs=outputs)

    async def _write(
        self, request: int, index: int, first: int, blocks: list[BlockId], targets: list[int], stop: int
    ) -> int:
        assert self._sender is not None, "it was not told to dial"
        piece = Piece(RequestId(str(request)), Attempt(1), PieceIndex(index), first, stop - first)
        into = [BlockId(block) for block in targets[first:stop]]
        return await self._sender.send(piece, blocks[first:stop], into)

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender.close()
        if self._pool is not None:
            self._pool.close()


async def serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=2**24)
    peer = Peer()
    try:
        writer.write(msgspec.json.encode(Done()) + b"\n")
        while line := await reader.readline():
            done = await peer.obey(msgspec.json.decode(line, type=ToPeer))
            writer.write(msgspec.json.encode(done) + b"\n")
            await writer.drain()
    finally:
        await peer.close()
        writer.close()


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
