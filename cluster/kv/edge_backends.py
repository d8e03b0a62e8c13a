"""What differs between the two kinds of process group that carry staged edges: gloo for host memory between
any two processes, NCCL for GPU memory.

Everything else about a staged edge (store, ring, order, watchdog) is the same class for both, so what is
tested over gloo is what runs over NCCL. The differences:

- *Waiting.* gloo waits for a transfer on the host. NCCL's transfers are kernels: a wait enqueues an event
  behind the transfer on a stream of the waiter's own, and sleeps until it comes.
- *Breaking off.* gloo closes a connection on which a receive is late. NCCL is aborted, which ends its
  kernels.
- *Receipts.* gloo fails a dead peer's short transfers at once, so P waits for a receipt. NCCL runs one
  direction per group only: a receive and a send in opposite order on the two sides would wait for one
  another.
- *Stalls.* A posted NCCL receive spins on the GPU until its bytes come: the time for one part is short.

- *Staging.* gloo moves host memory, so blocks of a pool on a GPU are copied there and back, and are there
  before they are sent. NCCL's staging lies beside the pool, and its transfers follow the copies in their
  stream.

NCCL ends the whole process on an error unless told otherwise, which would make a dead decode worker take its
prefill workers along: `Nccl` sets that right before the first group, and refuses settings that undo it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist

from cluster.errors import EdgeError
from cluster.kv.edge_device import finish_stream, new_stream

NUM_RANKS = 2
BREAK_TAG = 0  # no transfer uses it
NCCL_STALL_TIMEOUT_S = 0.9
_WAITS_PRIORITY = -2  # of no stream that copies or computes: see `cluster.kv.edge_device`
_NCCL_MAX_BLOCKS = 4  # thread blocks per group: what a spinning receive takes from the engine, at most

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_KEEPS_PROCESS = ("0", "2")  # nothing, or only clean up; 1 and 3 end the process


class GroupBackend(Protocol):
    """One edge's use of one kind of process group."""

    name: str
    has_receipts: bool
    follows_streams: bool  # a transfer begins when the stream of who posts it has done what is in it
    stall_timeout_s: float | None  # for one part, from its turn; None: as long as the piece may take

    def staging_device(self, pool: torch.device) -> torch.device:
        """Where parts lie while they are on their way between pools on `pool`."""
        ...

    def make_group(self, store: Any, rank: int, host: str, timeout_s: float) -> Any:
        """A group of two from a store that both have. May wait for the peer.

        Raises:
            RuntimeError, OSError: it cannot be built.
        """
        ...

    def wait(self, work: Any, timeout_s: float) -> bool:
        """Until a transfer is done or broken off; whether it is done.

        Raises:
            RuntimeError: it failed.
        """
        ...

    def break_off(self, group: Any, peer_rank: int) -> None:
        """End every transfer of the group, from any thread; takes milliseconds."""
        ...


class Gloo:
    """Host memory; torch.distributed's gloo over TCP."""

    name = "gloo"
    has_receipts = True
    follows_streams = False

    def __init__(self, stall_timeout_s: float | None = None) -> None:
        self.stall_timeout_s = stall_timeout_s

    def staging_device(self, pool: torch.device) -> torch.device:
        return torch.device("cpu")

    def make_group(self, store: Any, rank: int, host: str, timeout_s: float) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return dist.ProcessGroupGloo(store, rank, NUM_RANKS, options)

    def wait(self, work: Any, timeout_s: float) -> bool:
        return bool(work.wait(timedelta(seconds=timeout_s)))

    def break_off(self, group: Any, peer_rank: int) -> None:
        # gloo has no call for this, but a receive whose time is up closes the connection.
        try:
            group.recv([torch.empty(1)], peer_rank, BREAK_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # as it should: the connection is closed, now or already


class Nccl:
    """Memory of the GPU `device`; one communicator per edge, used in one direction."""

    name = "nccl"
    has_receipts = False
    follows_streams = True

    def __init__(self, device: torch.device, stall_timeout_s: float = NCCL_STALL_TIMEOUT_S) -> None:
        """
        Raises:
            EdgeError: this torch has no NCCL, a setting would end the process with its first dead peer, or
                the device gives no stream.
        """
        if reason := why_no_nccl(os.environ):
            raise EdgeError(reason)
        self._device = device
        self.stall_timeout_s: float | None = stall_timeout_s
        self._waits: Any = new_stream(device, _WAITS_PRIORITY)
        self._is_aborted = False

    def staging_device(self, pool: torch.device) -> torch.device:
        return pool

    def make_group(self, store: Any, rank: int, host: str, timeout_s: float) -> Any:
        settle_nccl(os.environ, timeout_s)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0  # no call waits for ever for a peer that died while it connected
        options.config.min_ctas = 1
        options.config.max_ctas = _NCCL_MAX_BLOCKS
        with torch.cuda.device(self._device):
            return dist.ProcessGroupNCCL(store, rank, NUM_RANKS, options)

    def wait(self, work: Any, timeout_s: float) -> bool:
        with torch.cuda.device(self._device), torch.cuda.stream(self._waits):
            work.wait()  # enqueues
            finish_stream(self._waits)
        return not self._is_aborted  # what was aborted looks done

    def break_off(self, group: Any, peer_rank: int) -> None:
        if not self._is_aborted:
            self._is_aborted = True  # first: nobody takes an aborted transfer for a good one
            group.abort()


def why_no_nccl(environment: Mapping[str, str]) -> str | None:
    """Why no edge should be made over NCCL here: a sentence; None: it can be."""
    if not dist.is_nccl_available():
        return "this torch is built without NCCL: use `--kv-edge gloo`"
    chosen = environment.get(_ERROR_HANDLING, _KEEPS_PROCESS[0])
    if chosen not in _KEEPS_PROCESS:
        return (
            f"{_ERROR_HANDLING}={chosen} ends this process when one peer dies: unset it, or set it to 0 or 2"
        )
    return None


def settle_nccl(environment: MutableMapping[str, str], connect_timeout_s: float) -> None:
    """What NCCL's process groups read from the environment when they are made: errors are ours to handle,
    at once, and a peer that does not come is waited for no longer than `connect_timeout_s`. What the user
    has set stays."""
    environment.setdefault(_ERROR_HANDLING, _KEEPS_PROCESS[0])
    environment.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")  # the same, when an abort takes long
    # After an error a group's own thread would wait for a minute, and that of the process's first group for
    # eight, so that somebody may write down what happened: as long, a lost edge could not be closed.
    environment.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")
    environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    environment.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(connect_timeout_s)))
