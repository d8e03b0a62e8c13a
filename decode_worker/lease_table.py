"""The leases of a decode worker: who holds which blocks, for how long, and when they are given back.

1. `reserve`: `decode_worker.admission` takes the blocks → `Grant`, or refuses → `Nack`. A prompt that D
   prefills itself starts at once.
2. A lease that waits for its KV is kept alive by `renew`; `expire` ends those that nobody renewed.
3. `start`: its KV is complete, so the sequence leaves with its blocks.
4. `end`: it is over before that (`Abort`, `Finish`, `RouterLost`, expiry, a newer attempt, KV that breaks the
   protocol). The writer is told (`KvAbort`). The full blocks it got without a gap become cached prefix for
   the next attempt: at once, since a writer writes each block once and these are announced as written.
5. `settle`: the rest stays in quarantine until nothing can touch it: an in-place writer has promised
   `KvClosed` or is proven dead, and every posted receive was dropped or lost with its edge.

Apart from `decode_worker.intake`, which brings the KV in: this is the router's side, and the one owner of
which leases there are.
"""

from __future__ import annotations

from collections.abc import Collection

from cluster.engine.fence import AttemptFence
from cluster.engine.sequence import Sequence, SequenceKey, num_blocks_for
from cluster.ids import LeaseId, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.wire.kv_messages import KvAbort
from cluster.wire.messages import Grant, RenewLeases, Reserve
from cluster.worker_io import Action, Peer, ToPeer, ToRouter
from decode_worker.admission import IntakeConfig, admit, attempt_failed
from decode_worker.lease import Block, Lease, LeaseState


class LeaseTable:
    """Owns the leases and their blocks until a sequence starts."""

    def __init__(self, config: IntakeConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._by_key: dict[SequenceKey, Lease] = {}  # all that hold blocks
        self._by_id: dict[LeaseId, Lease] = {}
        self._live: dict[RequestId, Lease] = {}  # one attempt of a request at a time
        self._fence = AttemptFence()
        self._num_reserves = 0
        self._started: list[Sequence] = []

    def __len__(self) -> int:
        """All leases that hold blocks, those on their way out included."""
        return len(self._by_key)

    @property
    def num_live(self) -> int:
        """Leases that wait for KV."""
        return len(self._live)

    def values(self) -> Collection[Lease]:
        """All leases that hold blocks."""
        return self._by_key.values()

    def live(self) -> Collection[Lease]:
        """Those that wait for KV."""
        return self._live.values()

    def written_by(self, peer: Peer) -> list[Lease]:
        """Those that this writer has opened."""
        return [lease for lease in self._by_key.values() if lease.writer == peer]

    def get(self, key: SequenceKey) -> Lease | None:
        """The lease of an attempt, live or on its way out."""
        return self._by_key.get(key)

    def of_request(self, request: RequestId) -> Lease | None:
        """The live lease of a request."""
        return self._live.get(request)

    def sequences(self) -> tuple[Sequence, ...]:
        """Those of the live leases."""
        return tuple(lease.sequence for lease in self._live.values())

    def next_deadline(self) -> float | None:
        return min([lease.expires_s for lease in self._live.values()]) if self._live else None

    def take_started(self) -> list[Sequence]:
        """Sequences that became ready to decode, or to prefill here, since the last call."""
        started, self._started = self._started, []
        return started

    # ---- what the router asks for

    def reserve(
        self, router: RouterId, message: Reserve, now: float, *, num_running: int, has_preempted: bool
    ) -> list[Action]:
        """Grant or refuse; no older attempt of the request is here. `num_running` sequences run here already,
        `has_preempted`: others wait to get their blocks back."""
        self._num_reserves += 1
        num_here = num_running + len(self._live)
        admitted = admit(
            router,
            message,
            self._blocks,
            self._config,
            self._num_reserves,
            now,
            num_here=num_here,
            has_preempted=has_preempted,
        )
        return [self._grant(admitted, message, now)] if isinstance(admitted, Sequence) else [admitted]

    def _grant(self, sequence: Sequence, message: Reserve, now: float) -> Action:
        num_prompt = num_blocks_for(sequence.num_tokens, self._blocks.block_size)
        ttl_s = min(message.lease_ttl_s, self._config.max_ttl_s)
        self._fence.take(sequence.request, sequence.attempt)
        lease = Lease(sequence, LeaseId(sequence.order), ttl_s, now + ttl_s, num_prompt)
        num_cached = sequence.num_computed // self._blocks.block_size
        lease.blocks = [Block.COMPLETE] * num_cached + [Block.MISSING] * (num_prompt - num_cached)
        lease.num_missing = num_prompt - num_cached
        if message.local:
            lease.move(LeaseState.STARTED)
            self._started.append(sequence)
        else:
            assert sequence.request not in self._live, "the older attempt is still live"
            self._by_key[sequence.key] = self._by_id[lease.lease] = lease
            self._live[sequence.request] = lease
        grant = Grant(
            request=message.request,
            attempt=message.attempt,
            lease=lease.lease,
            ttl_s=ttl_s,
            cached_tokens=sequence.num_cached,
        )
        return ToRouter(sequence.router, grant)

    def is_stale(self, message: Reserve) -> bool:
        """This attempt or a later one was granted before. A refused one may be asked for again."""
        return self._fence.is_stale(message.request, message.attempt)

    def renew(self, router: RouterId, message: RenewLeases, now: float) -> None:
        """Leases that started or ended meanwhile need no renewal: not an error."""
        for lease_id in message.leases:
            lease = self._by_id.get(lease_id)
            if lease is not None and lease.sequence.router == router:
                lease.expires_s = now + lease.ttl_s

    def expire(self, now: float) -> list[Action]:
        """End the leases whose time is over."""
        late = [lease for lease in self._live.values() if now >= lease.expires_s]
        return [
            action
            for lease in late
            for action in self.fail(lease, "lease_expired", "the lease was not renewed in time")
        ]

    # ---- how a lease ends

    def start(self, lease: Lease) -> None:
        """Its KV is here: the sequence goes on with its blocks, the lease is no more."""
        lease.move(LeaseState.STARTED)
        del self._live[lease.sequence.request]
        self._forget(lease)
        self._started.append(lease.sequence)

    def fail(self, lease: Lease, code: str, reason: str) -> list[Action]:
        """End it and tell the router why."""
        failed = attempt_failed(lease.sequence.router, lease.sequence, code, reason)
        return [failed, *self.end(lease, reason)]

    def end(self, lease: Lease, reason: str) -> list[Action]:
        """The lease is over for the router; its blocks follow as soon as nothing can touch them."""
        lease.move(LeaseState.ENDING)
        del self._live[lease.sequence.request]
        self._publish(lease)
        actions = ask_to_stop(lease, reason) if lease.peer_holds else []
        self.settle(lease)
        return actions

    def settle(self, lease: Lease) -> None:
        """Phase two: release the blocks of an ended lease if nothing can touch them any more."""
        if lease.state is not LeaseState.ENDING or lease.touched:
            return
        lease.move(LeaseState.ENDED)
        self._forget(lease)
        self._publish(lease)  # pieces may have been scattered since it ended
        lease.sequence.release(self._blocks)

    def _publish(self, lease: Lease) -> None:
        if lease.intact:
            lease.sequence.num_computed = lease.num_leading_tokens(self._blocks.block_size)
            lease.sequence.publish(self._blocks)

    def _forget(self, lease: Lease) -> None:
        del self._by_key[lease.sequence.key]
        del self._by_id[lease.lease]


def ask_to_stop(lease: Lease, reason: str) -> list[Action]:
    """Its writer is to move no more KV."""
    assert lease.writer is not None
    request, attempt = lease.sequence.key
    return [ToPeer(lease.writer, KvAbort(request=request, attempt=attempt, reason=reason))]
