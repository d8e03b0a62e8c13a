"""Looks inside cores and block managers: what no message says, checked against the invariants.

`check_write` is asked at every write into a decode worker's memory; `check_books`, `check_lease_times` and
`check_orphans` now and then, because they walk all there is; `check_empty` and what is `left` at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.simulator.violation import Violation
from cluster.ids import BlockId
from cluster.kv.allocator import BlockError
from cluster.kv.block_manager import BlockManager
from cluster.kv.edge import Piece
from decode_worker.core import DecodeCore
from prefill_worker.handoff import HandoffState

if TYPE_CHECKING:
    from bench.simulator.decode_process import DecodeProcess
    from bench.simulator.router_process import RouterProcess
    from bench.simulator.worker_process import WorkerProcess

LEASE_GRACE_S = 0.5
ORPHAN_GRACE_S = 1.0


def references(blocks: BlockManager, block_id: BlockId) -> int:
    """How many hold this block."""
    return blocks._allocator.references(block_id)


def check_write(decode: DecodeProcess, piece: Piece, block_ids: Sequence[BlockId]) -> None:
    """Bytes of this piece are written into these blocks: the attempt's own, still held and not shared.

    Raises:
        Violation: I1 or I2.
    """
    if not decode.is_alive:
        return  # its memory is nobody's any more
    lease = decode.core._leases.get((piece.request, piece.attempt))
    if lease is None:
        raise Violation("I2", f"{_late_write(decode, piece, block_ids)}: D has released them")
    own = lease.sequence.block_ids[piece.first_block : piece.first_block + piece.num_blocks]
    if list(block_ids) != own:
        raise Violation("I1", f"{_late_write(decode, piece, block_ids)}: the attempt's are {own}")
    for block_id in block_ids:
        if (count := references(decode.blocks, block_id)) != 1:
            where = _late_write(decode, piece, block_ids)
            raise Violation("I1", f"{where}: block {block_id} has {count} holders")


def _late_write(decode: DecodeProcess, piece: Piece, block_ids: Sequence[BlockId]) -> str:
    return f"{decode}: a late write of {piece} to blocks {list(block_ids)}"


def check_books(worker: WorkerProcess) -> None:
    """References equal owners, and what an owner may write belongs to it alone.

    Raises:
        Violation: I1 or I6.
    """
    try:
        worker.blocks.check_integrity()
    except BlockError as error:
        raise Violation("I6", f"{worker}: {error}") from error
    core, size = worker.core, worker.blocks.block_size
    owners: Counter[BlockId] = Counter()
    writable: Counter[BlockId] = Counter()
    if isinstance(core, DecodeCore):
        scheduler, leases = core._scheduler, core._leases
        sequences = list(scheduler.sequences())
        if (step := scheduler.book.step) is not None:
            sequences += [one for one, _ in step.rows if one.key in step.cancelled]
        for lease in leases.values():
            owners.update(lease.sequence.block_ids)
            writable.update(lease.sequence.block_ids[lease.sequence.num_computed // size :])
        limit = worker.site.scenario.decode.max_num_seqs
        if (num_here := scheduler.num_sequences + core._leases.num_live) > limit:
            raise Violation("I6", f"{worker}: {num_here} sequences, at most {limit} may be here")
    else:
        sequences = [attempt.sequence for attempt in core._attempts]
    for sequence in sequences:
        owners.update(sequence.block_ids)
        writable.update(sequence.block_ids[sequence.num_computed // size :])
    counts = worker.blocks._allocator._references
    if any(counts[block_id] != held for block_id, held in owners.items()) or sum(counts) != owners.total():
        for block_id, count in enumerate(counts):
            if count != (held := owners.get(BlockId(block_id), 0)):
                raise Violation("I6", f"{worker}: block {block_id}: {count} references, {held} owners")
    shared = [block_id for block_id in writable if owners[block_id] > 1]
    if shared:
        raise Violation("I1", f"{worker}: blocks {shared} are writable and have several owners")


def check_lease_times(worker: WorkerProcess) -> None:
    """No live lease outlives its time; nothing that waits has no deadline.

    Raises:
        Violation: I3.
    """
    core = worker.core
    if not isinstance(core, DecodeCore) or worker.is_stopped:
        return
    if worker.queue.now - worker.undisturbed_since < LEASE_GRACE_S:
        return
    now = worker.now()
    for lease in core._leases.live():
        if lease.expires_s < now - LEASE_GRACE_S or lease.expires_s > now + lease.ttl_s:
            raise Violation("I3", f"{worker}: {lease.sequence.key} ends in {lease.expires_s - now:.3f} s")


def check_orphans(worker: WorkerProcess) -> None:
    """No worker works for a request that ended a while ago, unless somebody was held up.

    Raises:
        Violation: I3.
    """
    site, core = worker.site, worker.core
    now = site.queue.now
    if worker.is_stopped or now - max(worker.undisturbed_since, site.held_up_until) < ORPHAN_GRACE_S:
        return
    if isinstance(core, DecodeCore):
        sequences = [*core._leases.sequences(), *core._scheduler.sequences()]
    else:
        sequences = [  # who has committed waits for D's word alone
            attempt.sequence
            for attempt in core._attempts
            if not attempt.over and attempt.handoff.state is not HandoffState.COMMITTING
        ]
    for sequence in sequences:
        ended_at = site.ended_at.get(sequence.request, now)
        if now - ended_at > ORPHAN_GRACE_S:
            raise Violation(
                "I3", f"{worker}: {sequence.key} ended {now - ended_at:.2f} s ago and is still here"
            )


def check_conductor(router: RouterProcess) -> None:
    """Who holds an attempt is there: a worker that is gone has none of any request.

    Raises:
        Violation: lost.
    """
    claims = router.conductor.workers.in_flight()
    for live in router.conductor._requests.values():
        attempt = live.attempt
        if attempt is None:
            continue
        holders = [attempt.decode] if attempt.decode_holds else []
        if attempt.prefill is not None and attempt.prefill_holds:
            holders.append(attempt.prefill)
        for worker in holders:
            if live.request not in claims.get(worker, ()):
                raise Violation("lost", f"{router}: {live.request}/{attempt.number} is with {worker}")


def left_on_worker(worker: WorkerProcess) -> str | None:
    """What a worker still holds when nothing is wanted any more; None if nothing."""
    if worker.core.quiet():
        return None
    return f"{worker}: {worker.core.load()}, next deadline {worker.core.next_deadline()}"


def left_on_router(router: RouterProcess) -> str | None:
    """As `left_on_worker`."""
    conductor = router.conductor
    if conductor.quiet() and router.limits_are_quiet() and not router.clients:
        return None
    return (
        f"{router}: {conductor.num_live} requests, {conductor._requests.num_deadlines} deadlines, "
        f"{len(conductor._legs.leases)} leases, {conductor.workers.in_flight()} in flight"
    )


def check_index(router: RouterProcess, worker: WorkerProcess) -> None:
    """What a router believes cached is what the worker has, once nothing changes any more.

    Raises:
        Violation: index.
    """
    view = router.conductor.workers.view()
    row = view.rows.get(worker.worker)
    if row is not None and view.prefix.stored(row) != set(worker.blocks.cached_hashes()):
        believed, cached = len(view.prefix.stored(row)), len(worker.blocks.cached_hashes())
        raise Violation("index", f"{router}: {believed} blocks believed on {worker}, which has {cached}")


def check_empty(worker: WorkerProcess) -> None:
    """Of a quiet worker: without its cache, every block is free.

    Raises:
        Violation: quiet.
    """
    check_books(worker)
    worker.blocks.reset_cache()
    counts = worker.blocks.counts()
    if counts.free != worker.blocks.num_blocks:
        raise Violation("quiet", f"{worker}: {counts} of {worker.blocks.num_blocks} blocks")
