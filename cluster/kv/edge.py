"""The interface of a KV edge: one prefill rank's way to move blocks into one decode rank's pool.

Life of a piece (some finished blocks of one attempt), in order:

1. P and D shook hands (`EdgeHello`/`EdgeWelcome`); `EdgeWelcome.endpoint` is `KVReceiver.endpoint()`, and P
   built its `KVSender` from it.
2. *In-place* edges (`shm`, `cuda_ipc`, `local`): `KVSender.send` copies the blocks into D's pool at the
   granted ids; P then announces `KvPiece`. D reuses such blocks only after the writer's `KvClosed` or death.
3. *Staged* edges (`gloo`, `nccl`): P announces `KvOffer`; D posts a receive (`KVReceiver.post`) and
   answers `KvReady`; P sends. The bytes land in staging and D scatters them into its pool only after it has
   checked attempt and lease again, so a late writer cannot touch reassigned blocks.

P sends exactly the pieces that D said `KvReady` for, in that order, even if the attempt is over by then: a
posted receive cannot be taken back. D discards what it no longer wants.

Between GPUs an engine counts a step as done when its device is: blocks that the core frees or hands over
after a step are touched by no kernel. Edges copy on streams of their own, and are done when these are.

Senders and receivers move bytes and know nothing of requests' fate; the hand-off and the intake decide.
Every method that can wait has a deadline and raises `EdgeError` naming the peer when it passes or the
peer is gone; after that the edge is dead and must be closed and rebuilt with the next epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.ids import Attempt, BlockId, Epoch, PieceIndex, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class EdgeName:
    """Which edge: both workers with their epochs, so a restarted worker's edge is another one."""

    prefill: WorkerId
    prefill_epoch: Epoch
    decode: WorkerId
    decode_epoch: Epoch

    def __str__(self) -> str:
        return f"{self.prefill}.{self.prefill_epoch}/{self.decode}.{self.decode_epoch}"


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """Deadlines and staging of an edge. A staged piece takes as many slots as its bytes need (a slot holds at
    least one block); one that needs more than all of them is refused."""

    connect_timeout_s: float = 10.0
    operation_timeout_s: float = 10.0  # one piece, from its turn to its end
    close_timeout_s: float = 15.0  # more than `connect_timeout_s`: a dial cannot be interrupted
    slot_bytes: int = 8 * 2**20
    num_slots: int = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive blocks of one attempt's prompt. `first_block` indexes the prompt's blocks."""

    request: RequestId
    attempt: Attempt
    index: PieceIndex
    first_block: int
    num_blocks: int


class KVSender(Protocol):
    """P's end. One per (P rank, D rank); `send`s run one at a time, in the order they are called."""

    in_place: bool

    async def ready(self) -> None:
        """Returns when the edge can carry pieces.

        Raises:
            EdgeError: it cannot be built, or not within the deadline.
        """
        ...

    async def send(
        self, piece: Piece, source_blocks: Sequence[BlockId], target_blocks: Sequence[BlockId]
    ) -> int:
        """Move the piece; returns the bytes moved once they are D's to use (in place) or handed to the
        receiver's staging. `target_blocks` is used by in-place edges only.

        Raises:
            EdgeError: the peer is gone, the deadline passed, or the layouts do not match.
        """
        ...

    async def close(self) -> None:
        """Stop, whatever is going on, within a bounded time; on return nothing of this edge writes any more
        and its resources are free. Operations under way raise `EdgeError`. Idempotent.

        Raises:
            EdgeError: it did not stop in time.
        """
        ...


@dataclass(frozen=True, slots=True)
class Staged:
    """A received piece that is not yet in the pool; `slot` is the receiver's own handle."""

    piece: Piece
    slot: int
    num_bytes: int


class KVReceiver(Protocol):
    """D's end."""

    in_place: bool

    def endpoint(self) -> dict[str, str | int]:
        """What the peer needs to build its sender."""
        ...

    async def ready(self) -> None:
        """As `KVSender.ready`; wait for it after `endpoint()` went to the peer."""
        ...

    async def post(self, piece: Piece, num_bytes: int) -> None:
        """Staged edges only: take a staging slot (waiting for one within the deadline) and post the
        receive. Returns once it is posted; only then is `KvReady` sent."""
        ...

    async def wait(self, piece: Piece) -> Staged:
        """The bytes of a posted piece, in staging. One call per piece."""
        ...

    async def scatter(self, staged: Staged, target_blocks: Sequence[BlockId]) -> None:
        """Copy a staged piece into the pool and free its slot. Works on after the peer is lost."""
        ...

    def discard(self, staged: Staged) -> None:
        """Free the slot of a piece that is no longer wanted."""
        ...

    async def close(self) -> None:
        """As `KVSender.close`; nothing of this edge writes into the pool any more."""
        ...
