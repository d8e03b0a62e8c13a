"""Rules that workers keep, each with a way to break it."""

from __future__ import annotations

from typing import Any, Final

from bench.simulator.mutation import Broken, Mutation, Patch
from cluster import block_hash
from cluster.engine import drafts
from cluster.engine.fence import AttemptFence
from cluster.engine.sequence import Sequence as TokenSequence
from cluster.kv.block_manager import BlockManager
from cluster.kv.edge import Piece
from cluster.kv.prefix import PrefixIndex
from cluster.sampling import TokenOutput
from cluster.wire.kv_messages import KvClosed, KvPiece
from cluster.worker_io import Peer, RouterLost, ToPeer
from decode_worker import lease_table
from decode_worker.core import DecodeCore
from decode_worker.intake import Intake
from decode_worker.lease import Lease
from decode_worker.lease_table import LeaseTable
from decode_worker.scheduler import DecodeScheduler
from prefill_worker.attempts import AttemptTable, PrefillAttempt
from prefill_worker.core import PrefillCore
from prefill_worker.handoff import Handoff, HandoffState

# ---- the prefill worker's rules ------------------------------------------------------------------


def _free_before_ack(original: Broken) -> Broken:
    def first_token(self: PrefillCore, attempt: PrefillAttempt, token: TokenOutput, now: float) -> Any:
        actions = original(self, attempt, token, now)
        sequence = attempt.sequence
        if sequence.block_ids:
            self._blocks.release(sequence.block_ids)
            setattr(sequence, "release", lambda blocks: None)  # noqa: B010 (a method is replaced)
        return actions

    return first_token


def _free_while_sending(original: Broken) -> Broken:
    def settle(self: AttemptTable, attempt: PrefillAttempt) -> None:
        if attempt.over and attempt.handoff.state is HandoffState.CLOSING:
            attempt.handoff.edge_down()
        original(self, attempt)

    return settle


def _announce_before_written(original: Broken) -> Broken:
    def send(self: Handoff, piece: Piece) -> Any:
        actions = original(self, piece)
        if self._in_place:
            announce = KvPiece(
                request=piece.request,
                attempt=piece.attempt,
                piece=piece.index,
                first_block=piece.first_block,
                num_blocks=piece.num_blocks,
                num_bytes=piece.num_blocks * self._config.block_bytes,
            )
            actions.append(ToPeer(self.peer, announce))
        return actions

    return send


def _commit_while_sending(original: Broken) -> Broken:
    def settle(self: Handoff, now: float) -> Any:
        if self.state is not HandoffState.STREAMING:
            return original(self, now)
        under_way = self._offered, self._sending
        self._offered, self._sending = {}, {}
        try:
            return original(self, now)
        finally:
            self._offered, self._sending = under_way

    return settle


# ---- the decode worker's rules -------------------------------------------------------------------


def _sample_token_0_again(original: Broken) -> Broken:
    def start_if_complete(self: Intake, lease: Lease, now: float) -> Any:
        actions = original(self, lease, now)
        sequence = lease.sequence
        if actions and sequence.num_generated == 1:
            sequence.token_ids.pop()
            sequence.output_ids.pop()
            sequence.num_computed = sequence.num_tokens - 1
        return actions

    return start_if_complete


def _no_bitmap_check(original: Broken) -> Broken:
    def start_if_complete(self: Intake, lease: Lease, now: float) -> Any:
        missing, receives = lease.num_missing, lease.receives
        lease.num_missing, lease.receives = 0, {}
        try:
            return original(self, lease, now)
        finally:
            lease.num_missing, lease.receives = missing, receives

    return start_if_complete


def _restart_proves_death(original: Broken) -> Broken:
    def edge_up(self: Intake, peer: Peer, in_place: bool) -> Any:
        for lease in list(self._leases.values()):
            if lease.writer is not None and lease.writer.worker == peer.worker:
                lease.writer_may_write = False
                self._leases.settle(lease)
        return original(self, peer, in_place)

    return edge_up


def _broken_stream_proves_death(original: Broken) -> Broken:
    def edge_down(self: Intake, peer: Peer) -> None:
        for lease in self._leases.values():
            if lease.writer == peer:
                lease.writer_may_write = False
        original(self, peer)

    return edge_down


def _no_quarantine(_: Broken) -> Any:
    return property(lambda self: bool(self.receives))


def _deaf_to_closed(original: Broken) -> Broken:
    def from_peer(self: Intake, peer: Peer, message: Any, now: float) -> Any:
        return [] if isinstance(message, KvClosed) else original(self, peer, message, now)

    return from_peer


def _free_during_step(original: Broken) -> Broken:
    def cancel(self: DecodeScheduler, sequence: TokenSequence) -> None:
        original(self, sequence)
        self._free(sequence)

    return cancel


def _go_on_without_room(_: Broken) -> Broken:
    return lambda scheduler: scheduler.book.step.is_pure_decode and not scheduler.book.step.cancelled


def _publish_uncomputed(_: Broken) -> Broken:
    def publish(self: TokenSequence, blocks: BlockManager) -> None:
        num_full = min(len(self.token_ids) // blocks.block_size, len(self.block_ids))
        if num_full:
            tokens = self.token_ids[: num_full * blocks.block_size]
            blocks.publish(self.block_ids[:num_full], tokens, self.cache_salt)

    return publish


def _hold_one_more(original: Broken) -> Broken:
    def held(row: Any, spec: Any, token: TokenOutput, after: list[TokenOutput]) -> tuple[TokenOutput, ...]:
        right: tuple[TokenOutput, ...] = original(row, spec, token, after)
        return tuple(after[: len(right) + 1])

    return held


def _guess_beyond_the_room(original: Broken) -> Broken:
    def row(self: TokenSequence, num_tokens: int, drafts_end: int = 0) -> Any:
        return original(self, num_tokens, drafts_end and drafts_end + 4)

    return row


def _room_for_all(original: Broken) -> Broken:
    return lambda *given, **named: original(*given, **{**named, "num_here": 0})


def _deaf_to_lost_routers(original: Broken) -> Broken:
    def apply(self: Any, event: Any, now: float) -> Any:
        return [] if isinstance(event, RouterLost) else original(self, event, now)

    return apply


def _one_salt(original: Broken) -> Broken:
    return lambda key, block_size, salt: original(key, block_size, "")


def _any_salt(_: Any) -> Any:
    def same(node: Any, packed: bytes, salt: str, parent: Any) -> bool:
        return node.parent is parent and bool(node.packed_tokens == packed)

    return staticmethod(same)


WORKER_MUTATIONS: Final[tuple[Mutation, ...]] = (
    Mutation("skip the epoch check", [Patch(Intake, "edge_up", _restart_proves_death)]),
    Mutation("free before ack", [Patch(PrefillCore, "_first_token", _free_before_ack)]),
    Mutation("resample token 0", [Patch(Intake, "_start_if_complete", _sample_token_0_again)]),
    Mutation("lose the bitmap check", [Patch(Intake, "_start_if_complete", _no_bitmap_check)]),
    Mutation("reuse quarantined blocks", [Patch(Lease, "touched", _no_quarantine)]),
    Mutation("ignore KvClosed", [Patch(Intake, "from_peer", _deaf_to_closed)]),
    Mutation("a broken stream proves death", [Patch(Intake, "edge_down", _broken_stream_proves_death)]),
    Mutation("free while a piece is sent", [Patch(AttemptTable, "settle", _free_while_sending)]),
    Mutation("announce a piece before it is written", [Patch(Handoff, "_send", _announce_before_written)]),
    Mutation("commit while pieces are sent", [Patch(Handoff, "settle", _commit_while_sending)]),
    Mutation("free during a step", [Patch(DecodeScheduler, "cancel", _free_during_step)]),
    Mutation("go on without room", [Patch(DecodeScheduler, "may_go_on", _go_on_without_room)]),
    Mutation("keep what follows a wrong guess", [Patch(drafts, "_held", _hold_one_more)]),
    Mutation("guess beyond the room", [Patch(TokenSequence, "row", _guess_beyond_the_room)]),
    Mutation("share blocks before they are computed", [Patch(TokenSequence, "publish", _publish_uncomputed)]),
    Mutation(
        "share blocks across salts",
        [Patch(block_hash, "root_hash", _one_salt), Patch(PrefixIndex, "_is", _any_salt)],
    ),
    Mutation(
        "let leases live for ever",
        [
            Patch(LeaseTable, "expire", lambda _: lambda self, now: []),
            Patch(LeaseTable, "next_deadline", lambda _: lambda self: None),
        ],
    ),
    Mutation(
        "forget which attempts were taken", [Patch(AttemptFence, "is_stale", lambda _: lambda *_: False)]
    ),
    Mutation(
        "work on for routers that are gone",
        [
            Patch(DecodeCore, "_apply", _deaf_to_lost_routers),
            Patch(PrefillCore, "_apply", _deaf_to_lost_routers),
        ],
    ),
    Mutation("grant more places than there are", [Patch(lease_table, "admit", _room_for_all)]),
)
