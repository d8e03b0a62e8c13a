"""The gather and scatter kernel behind edges that stage KV on its GPU (`cluster.kv.block_copy.Mover`).

1. A part of a piece lies scattered over the pool and has to lie together in a staging slot, or the other way
   round. Copied in runs of neighbouring blocks that is one operation each; the kernel does it in one launch.
2. `pays` says which is less: of the host's time, since the device moves the same bytes either way.
3. `prepare` compiles both directions before anybody waits. What the kernel cannot do here (it does not
   compile, or there is no memory for the list of blocks) is copied in runs, the first with one log line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from cluster.kv.block_copy import Cut
from kernels.triton import blocks
from kernels.triton.launch import KernelError

logger = logging.getLogger(__name__)

# Of the host's time: one copy, and one launch through Triton with its list of blocks. Orders of magnitude
# that such calls have on hosts of GPUs; bench.gpu_check measures the device's part.
COPY_S: Final = 4e-6
LAUNCH_S: Final = 40e-6
DEVICE_BYTES_S: Final = 1.5e12  # copied, by a GPU whose memory does 3 TB/s


def pays(num_runs: int, num_bytes: int) -> bool:
    """Whether one launch is through before `num_runs` copies of `num_bytes` in all: the longer of host and
    device, for each. Where the device takes longer than the host it is the same."""
    device_s = num_bytes / DEVICE_BYTES_S
    return max(LAUNCH_S, device_s) < max(num_runs * COPY_S, device_s)


class BlockMover:
    """Implements `cluster.kv.block_copy.Mover`. Any thread: work goes into the calling thread's stream."""

    def __init__(self, *, always: bool = False) -> None:
        """`always`: whether it pays or not, for tests."""
        self._always = always
        self._is_broken = False

    def prepare(self, pool: Tensor, block_id: int) -> None:
        """Compile for blocks of `pool`; block `block_id` is nobody's, and keeps what is in it."""
        cut = Cut(pool, range(pool.shape[1]), range(pool.shape[4]))
        with _on(pool.device):
            staging = torch.zeros_like(pool[:1])
            if self._move(lambda: blocks.gather_blocks(*_of(cut, [block_id]), out=staging)):
                self._move(lambda: blocks.scatter_blocks(staging, *_of(cut, [block_id])))

    def gather(self, cut: Cut, block_ids: Sequence[int], staging: Tensor, num_runs: int) -> bool:
        return self._takes(num_runs, staging) and self._move(
            lambda: blocks.gather_blocks(*_of(cut, block_ids), out=staging)
        )

    def scatter(self, staging: Tensor, cut: Cut, block_ids: Sequence[int], num_runs: int) -> bool:
        return self._takes(num_runs, staging) and self._move(
            lambda: blocks.scatter_blocks(staging, *_of(cut, block_ids))
        )

    def _takes(self, num_runs: int, staging: Tensor) -> bool:
        return not self._is_broken and (self._always or pays(num_runs, staging.nbytes))

    def _move(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except torch.OutOfMemoryError:  # nothing was launched: the list of blocks comes first
            return False
        except KernelError as error:
            self._is_broken = True
            logger.warning("KV blocks are copied one by one on this device, slower: %s", error)
            return False
        return True


def _of(cut: Cut, block_ids: Sequence[int]) -> tuple[Tensor, Sequence[int], range, range]:
    return cut.pool, block_ids, cut.layers, cut.heads


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
