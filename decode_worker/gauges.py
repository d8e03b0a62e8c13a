"""What a decode worker tells of itself with its load: counters, rates, and what is here and coming.

1. What nobody waits for is counted (`stale`).
2. `load` adds to that what the others own: blocks, leases, rows, steps, the pacer's figures.
"""

from __future__ import annotations

import math

from cluster.kv.block_manager import BlockManager
from cluster.wire.messages import WorkerLoad
from decode_worker.intake import Intake
from decode_worker.lease_table import LeaseTable
from decode_worker.scheduler import DecodeScheduler


class Gauges:
    """Owns a counter of one decode worker; reads what else it tells."""

    def __init__(
        self, blocks: BlockManager, leases: LeaseTable, intake: Intake, scheduler: DecodeScheduler
    ) -> None:
        self._blocks = blocks
        self._leases = leases
        self._intake = intake
        self._scheduler = scheduler
        self._num_stale = 0

    def stale(self) -> None:
        """A message that nobody here waits for."""
        self._num_stale += 1

    def load(self) -> WorkerLoad:
        counts, scheduler, meter = self._blocks.counts(), self._scheduler, self._scheduler.book.meter
        coming = self._leases.sequences()
        yielding_rows, yielding_context = scheduler.yielding()
        load = WorkerLoad(
            running=scheduler.num_running,
            waiting=scheduler.num_preempted + self._leases.num_live,
            queued_prefill_tokens=scheduler.num_queued_tokens,
            blocks_used=counts.used,
            blocks_cached=counts.cached,
            blocks_free=counts.free,
            steps=meter.num_steps,
            borrowed_pieces=meter.num_borrowed,
            drafts=meter.num_drafts,
            right_drafts=meter.num_right_drafts,
            preemptions=scheduler.num_preemptions,
            leases=len(self._leases),
            stale_messages=self._num_stale + self._intake.num_stale,
            prefill_tokens_per_s=meter.prefill_rate.tokens_per_s,
            decode_step_s=meter.decode_step_s,
            kv_bytes_received=self._intake.num_bytes,
            decode_rows=scheduler.num_decoding,
            decode_context=scheduler.decode_context,
            yielding_rows=yielding_rows,
            yielding_context=yielding_context,
            coming_rows=len(coming),
            coming_context=sum(sequence.num_tokens for sequence in coming),
            row_life_s=0.0 if math.isinf(scheduler.lives.mean_s) else scheduler.lives.mean_s,
        )
        return scheduler.book.pacer.gauges(load)
