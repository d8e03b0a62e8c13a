"""How fast edges move KV between two processes: `python tests/kv/measure_edges.py [num_blocks] [repeats]`.

SmolLM2-135M's geometry (30 layers, 3 KV heads of 64, bf16), blocks of 32 tokens, scattered on the decode
side, in pieces of at most 8 MiB as the hand-off cuts them. The first repeat touches fresh memory and is shown
apart. A plain memory copy of as much, in the same minute, shows what the machine gives.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from cluster.ids import Attempt, BlockId, PieceIndex, RequestId
from cluster.kv.edge import EdgeConfig, Piece
from cluster.kv.edges import EdgeKind, make_sender
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from tests.kv.edge_harness import PeerProcess, edge_name, setup_of
from tests.kv.edge_peer import checksum, fill


async def measure(kind: EdgeKind, socket_path: str, num_blocks: int, repeats: int) -> None:
    layout = KVLayout(range(30), range(3), 64, 32, 2 * num_blocks, "bfloat16")
    config = EdgeConfig()
    reader, writer = await asyncio.open_unix_connection(socket_path)
    peer = PeerProcess(reader, writer, json.loads(await reader.readline())["pid"])
    source = KVPool.private(layout)
    fill(source.tensor, 1)
    geometry = layout.to_geometry()
    answer = await peer.ask("decode", **setup_of(kind, edge_name(), geometry, config))
    sender = make_sender(kind, source, name=edge_name(), peer=geometry, endpoint=answer["endpoint"])
    await sender.ready()
    sources = list(range(num_blocks))
    targets = random.Random(0).sample(range(2 * num_blocks), num_blocks)
    step = max(1, config.slot_bytes // layout.bytes_per_block)
    rates: list[float] = []
    for repeat in range(repeats):
        begin, num_bytes = time.perf_counter(), 0
        for index, first in enumerate(range(0, num_blocks, step)):
            part = slice(first, min(first + step, num_blocks))
            piece = Piece(RequestId("r"), Attempt(repeat), PieceIndex(index), first, part.stop - part.start)
            if not sender.in_place:
                peer.tell("receive", piece=list(dataclasses.astuple(piece)), targets=targets[part])
            num_bytes += await sender.send(
                piece, [BlockId(b) for b in sources[part]], [BlockId(b) for b in targets[part]]
            )
            if not sender.in_place:
                await peer.answer()
        rates.append(num_bytes / (time.perf_counter() - begin) / 1e9)
    found = await peer.ask("checksum", blocks=targets)
    assert found["checksum"] == checksum(source.tensor[sources])
    print(
        f"{kind.value:5} {num_blocks} blocks, {num_bytes / 1e6:.1f} MB: first {rates[0]:.2f} GB/s, "
        f"then median {statistics.median(rates[1:]):.2f}, best {max(rates):.2f}"
    )
    await sender.close()
    peer.end()
    source.close()


def measure_copy(num_bytes: int, repeats: int) -> None:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    rates: list[float] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)
        rates.append(num_bytes / (time.perf_counter() - begin) / 1e9)
    print(f"plain memory copy: median {statistics.median(rates):.2f} GB/s, best {max(rates):.2f}")


def main() -> None:
    torch.set_num_threads(1)
    num_blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 63
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/peers"
        command = [sys.executable, str(Path(__file__).with_name("edge_peer.py")), path]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        ) as server:
            assert server.stdout is not None
            assert server.stdin is not None
            server.stdout.readline()
            measure_copy(num_blocks * 737_280, repeats)
            for kind in (EdgeKind.SHM, EdgeKind.GLOO):
                asyncio.run(measure(kind, path, num_blocks, repeats))
            server.stdin.close()


if __name__ == "__main__":
    main()
