"""What this machine can do at most, measured by the kernels' own library: the yardstick of `bench.engine`."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import torch

from kernels.cpu.build import load_library
from kernels.cpu.isa import Isa
from kernels.cpu.native import bind, isa_of

READ_BYTES = 256 * 2**20  # far more than any cache
ROUNDS = 200_000  # of ten vectors of multiply-adds: about a millisecond
TILE_ROUNDS = 40_000  # of four products of tiles: about the same
GEMM_SHAPES = ((1024, 1536, 1536), (2048, 2048, 2048))  # rows, depth, columns
REPEATS = 5


class MachineProbe:
    """Short measurements on `num_threads` threads; each call gives the best of several."""

    def __init__(self, num_threads: int) -> None:
        """Raises:
        BuildError: the library cannot be compiled or loaded here.
        IsaError: the user asks for instructions not to be had.
        """
        self._library = bind(load_library())
        self.has_unit = isa_of(self._library).isa is Isa.AMX
        self._num_threads = num_threads
        # on huge pages where the system has any, as weights and KV are: shared memory has small ones
        memory = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._data = torch.frombuffer(memory, dtype=torch.float32).fill_(1)

    def measure(self) -> tuple[float, float]:
        """(bytes read per second, multiply-adds per second: of bf16 pairs if the CPU has them, else fp32)."""
        library, threads, data = self._library, self._num_threads, self._data
        reads = [library.baton_probe_read(data.data_ptr(), data.numel(), threads) for _ in range(REPEATS)]
        return max(reads), self._best(library.baton_probe_multiply_adds)

    def fp32_multiply_adds_per_s(self) -> float:
        return self._best(self._library.baton_probe_fp32_multiply_adds)

    def byte_multiply_adds_per_s(self) -> float:
        """Of bytes, summed in 32 bits."""
        return self._best(self._library.baton_probe_byte_multiply_adds)

    def tile_multiply_adds_per_s(self, is_bf16: bool) -> float:
        """Of the matrix unit, in bf16 or bytes; 0 where products do not use one."""
        if not self.has_unit:
            return 0.0
        probe = self._library.baton_probe_tile_multiply_adds
        rates: list[float] = [probe(TILE_ROUNDS, self._num_threads, is_bf16) for _ in range(4 * REPEATS)]
        return max(rates)

    def gemm_multiply_adds_per_s(self) -> float:
        """The best of torch's bf16 products, on torch's threads."""
        best = 0.0
        for rows, depth, columns in GEMM_SHAPES:
            a, b = torch.rand(rows, depth).bfloat16(), torch.rand(depth, columns).bfloat16()
            out = torch.empty(rows, columns, dtype=torch.bfloat16)
            for _ in range(REPEATS):
                start_s = time.perf_counter()
                torch.mm(a, b, out=out)
                best = max(best, rows * depth * columns / (time.perf_counter() - start_s))
        return best

    def _best(self, rate: Callable[[int, int], float]) -> float:
        return max(rate(ROUNDS, self._num_threads) for _ in range(4 * REPEATS))
