"""What a decode worker tells of itself with its load: counters, rates, and what is here and coming.

1. Each step that ended is measured (`step_done`, `step_failed`); what nobody waits for is counted (`stale`).
2. `load` adds to that what the others own: blocks, leases, rows, the pacer's figures.
"""

from __future__ import annotations

import math

from cluster.engine.batch import StepOutput
from cluster.engine.rate_meter import RateMeter
from cluster.kv.block_manager import BlockManager
from cluster.wire.messages import WorkerLoad
from decode_worker.intake import Intake
from decode_worker.lease_table import LeaseTable
from decode_worker.scheduler import DecodeScheduler

SMOOTHING = 0.2  # weight of the newest step in the smoothed step time


class Gauges:
    """Owns the counters and rates of one decode worker; reads what else it tells."""

    def __init__(
        self, blocks: BlockManager, leases: LeaseTable, intake: Intake, scheduler: DecodeScheduler
    ) -> None:
        self._blocks = blocks
        self._leases = leases
        self._intake = intake
        self._scheduler = scheduler
        self._num_steps = 0
        self._num_borrowed = 0  # pieces of steps that other workers' cores did
        self._num_drafts = self._num_right_drafts = 0
        self._num_stale = 0
        self._prefill_rate = RateMeter()
        self._decode_step_s = 0.0

    def step_done(self, output: StepOutput) -> None:
        """A step ended; the scheduler has not booked it yet."""
        self._num_steps += 1
        self._num_borrowed += output.num_borrowed
        if output.num_drafted:
            self._num_drafts += output.num_drafted
            self._num_right_drafts += sum(map(len, output.further.values()))
        if output.compute_s <= 0:
            return
        step = self._scheduler.step
        assert step is not None
        if step.is_pure_decode:
            old = self._decode_step_s
            self._decode_step_s += (SMOOTHING if old else 1.0) * (output.compute_s - old)
        else:
            self._prefill_rate.add(step.num_tokens, output.compute_s)

    def step_failed(self) -> None:
        self._num_steps += 1

    def stale(self) -> None:
        """A message that nobody here waits for."""
        self._num_stale += 1

    def load(self) -> WorkerLoad:
        counts, scheduler = self._blocks.counts(), self._scheduler
        coming = self._leases.sequences()
        yielding_rows, yielding_context = scheduler.yielding()
        load = WorkerLoad(
            running=scheduler.num_running,
            waiting=scheduler.num_preempted + self._leases.num_live,
            queued_prefill_tokens=scheduler.num_queued_tokens,
            blocks_used=counts.used,
            blocks_cached=counts.cached,
            blocks_free=counts.free,
            steps=self._num_steps,
            borrowed_pieces=self._num_borrowed,
            drafts=self._num_drafts,
            right_drafts=self._num_right_drafts,
            preemptions=scheduler.num_preemptions,
            leases=len(self._leases),
            stale_messages=self._num_stale + self._intake.num_stale,
            prefill_tokens_per_s=self._prefill_rate.tokens_per_s,
            decode_step_s=self._decode_step_s,
            kv_bytes_received=self._intake.num_bytes,
            decode_rows=scheduler.num_decoding,
            decode_context=scheduler.decode_context,
            yielding_rows=yielding_rows,
            yielding_context=yielding_context,
            coming_rows=len(coming),
            coming_context=sum(sequence.num_tokens for sequence in coming),
            row_life_s=0.0 if math.isinf(scheduler.lives.mean_s) else scheduler.lives.mean_s,
        )
        return scheduler.pacer.gauges(load)
