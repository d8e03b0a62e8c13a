"""What goes into a worker's core and what comes out of it: the seam between decisions and IO.

A core (`prefill_worker.core`, `decode_worker.core`) is sans-IO: `handle(event, now) -> actions`. The live
driver turns sockets, the engine thread and KV edges into these events and carries the actions out;
the simulator does the same with modelled time. One step is in flight at a time: a core emits `RunStep`
only when none is, and gets exactly one `StepDone` or `StepFailed` for it. Where `may_go_on` gives leave, the
engine may begin the step after it by itself (`cluster.engine.following`): `StepDone.went_on`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from cluster.engine.batch import StepOutput, StepPlan
from cluster.ids import BlockId, Epoch, RouterId, WorkerId
from cluster.kv.edge import Piece, Staged
from cluster.step_model import StepModel
from cluster.wire.kv_messages import DecodeToPrefill, PrefillToDecode
from cluster.wire.messages import RouterToWorker, WorkerLoad, WorkerState, WorkerToRouter


class Peer(NamedTuple):
    """The other end of an edge; a restarted worker is another peer."""

    worker: WorkerId
    epoch: Epoch


# ---- events --------------------------------------------------------------------------------------


class FromRouter(msgspec.Struct, frozen=True):
    router: RouterId
    message: RouterToWorker


class RouterLost(msgspec.Struct, frozen=True):
    """The stream to this router broke: everything of it is to be freed."""

    router: RouterId


class FromPeer(msgspec.Struct, frozen=True):
    """A message on a KV stream, after its handshake."""

    peer: Peer
    message: PrefillToDecode | DecodeToPrefill


class EdgeUp(msgspec.Struct, frozen=True):
    """The handshake with this peer is done. `in_place`: see `cluster.kv.edge`. P only: `better_after_s`, when
    an edge of a better kind may be tried instead; None: there is none. `is_capped`: it is one of those of
    which a worker holds only so many."""

    peer: Peer
    in_place: bool
    better_after_s: float | None = None
    is_capped: bool = False


class EdgeDown(msgspec.Struct, frozen=True):
    """The KV stream or the edge itself broke, or could not be built; nothing more comes from it.

    On P it also says that `SendPiece`s in flight are over: the driver reports it after `KVSender.close`.
    `is_crowded`: a dial of P's failed because P holds as many capped edges as it may.
    """

    peer: Peer
    reason: str
    is_crowded: bool = False


class WriterGone(msgspec.Struct, frozen=True):
    """D only, after `EdgeDown` of an in-place edge: the writer's process is proven dead, so nothing can
    write into the blocks it had open."""

    peer: Peer


class PieceSent(msgspec.Struct, frozen=True):
    """P only: `SendPiece` is done."""

    peer: Peer
    piece: Piece
    num_bytes: int


class ReceivePosted(msgspec.Struct, frozen=True):
    """D only: the receive asked for by `PostReceive` is posted."""

    peer: Peer
    piece: Piece


class PieceStaged(msgspec.Struct, frozen=True):
    """D only: the bytes of a posted receive are in staging."""

    peer: Peer
    staged: Staged


class PieceScattered(msgspec.Struct, frozen=True):
    """D only: `Scatter` is done, the blocks hold the bytes."""

    peer: Peer
    piece: Piece
    num_bytes: int


class ScatterFailed(msgspec.Struct, frozen=True):
    """D only: `Scatter` is over, and nobody knows what the blocks hold. Its edge goes down, too."""

    peer: Peer
    piece: Piece
    reason: str


class StepDone(msgspec.Struct, frozen=True):
    """`went_on`: the same rows are in flight again, each with the token it has got here. That step ends
    with a `StepDone` or `StepFailed` of its own."""

    output: StepOutput
    went_on: bool = False


class StepFailed(msgspec.Struct, frozen=True):
    """The step raised: its rows' requests fail, their blocks are freed, the worker goes on."""

    message: str


class Calibrated(msgspec.Struct, frozen=True):
    """Before the first step: how long steps take on this machine."""

    model: StepModel


class Tick(msgspec.Struct, frozen=True):
    """`next_deadline()` passed."""


Event = (
    FromRouter
    | RouterLost
    | FromPeer
    | EdgeUp
    | EdgeDown
    | WriterGone
    | PieceSent
    | ReceivePosted
    | PieceStaged
    | PieceScattered
    | ScatterFailed
    | StepDone
    | StepFailed
    | Calibrated
    | Tick
)


# ---- actions -------------------------------------------------------------------------------------


class ToRouter(msgspec.Struct, frozen=True):
    router: RouterId
    message: WorkerToRouter


class ToPeer(msgspec.Struct, frozen=True):
    peer: Peer
    message: PrefillToDecode | DecodeToPrefill


class RunStep(msgspec.Struct, frozen=True):
    plan: StepPlan


class OpenEdge(msgspec.Struct, frozen=True):
    """P only: dial this decode worker, unless a dial or an edge is up. Answered by `EdgeUp`/`EdgeDown`.
    The same peer may be dialled again after `EdgeDown`. `warm`: no request needs it yet; `timeout_s`: for all
    of it, None: the driver's own; `uncapped`: as another kind than those that are capped, if it can be."""

    peer: Peer
    address: str
    warm: bool = False
    timeout_s: float | None = None
    uncapped: bool = False


class CloseEdge(msgspec.Struct, frozen=True):
    """P only: tear the edge down; the decode worker does not answer, or nobody uses it. Answered by
    `EdgeDown`."""

    peer: Peer
    reason: str


class SendPiece(msgspec.Struct, frozen=True):
    """P only: move blocks over the edge; answered by `PieceSent` or `EdgeDown`."""

    peer: Peer
    piece: Piece
    source_blocks: Sequence[BlockId]
    target_blocks: Sequence[BlockId]


class PostReceive(msgspec.Struct, frozen=True):
    """D only: answered by `ReceivePosted`, then `PieceStaged`; or by `EdgeDown`."""

    peer: Peer
    piece: Piece
    num_bytes: int


class Scatter(msgspec.Struct, frozen=True):
    """D only: answered by `PieceScattered` or `ScatterFailed`, always, even after `EdgeDown`: it is a local
    copy."""

    peer: Peer
    staged: Staged
    target_blocks: Sequence[BlockId]


class Discard(msgspec.Struct, frozen=True):
    """D only: the staged piece is not wanted any more."""

    peer: Peer
    staged: Staged


Action = ToRouter | ToPeer | RunStep | OpenEdge | CloseEdge | SendPiece | PostReceive | Scatter | Discard


class WorkerCore(Protocol):
    """Both roles' cores, as drivers see them."""

    def handle(self, event: Event, now: float) -> list[Action]: ...

    def next_deadline(self) -> float | None:
        """When `Tick` is due, in the clock of `now`; None if nothing waits."""
        ...

    def may_go_on(self) -> bool:
        """Whether the step in flight may be followed by `following_plan` of it, with nothing asked between.
        Asked after every event; the answer holds until the next one."""
        ...

    def load(self) -> WorkerLoad: ...

    def state(self) -> WorkerState: ...
