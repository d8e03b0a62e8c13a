"""What a decode worker's steps come to: how many, how fast, and what was done or guessed in them besides."""

from __future__ import annotations

from cluster.engine.batch import StepOutput
from cluster.engine.rate_meter import RateMeter
from decode_worker.decode_step import DecodeStep

SMOOTHING = 0.2  # weight of the newest step in the smoothed step time


class StepMeter:
    """Owned by whoever books steps."""

    def __init__(self) -> None:
        self.num_steps = 0  # those that failed, too
        self.num_borrowed = 0  # pieces of steps that other workers' cores did
        self.num_drafts = self.num_right_drafts = 0
        self.prefill_rate = RateMeter()
        self.decode_step_s = 0.0

    def add(self, step: DecodeStep, output: StepOutput) -> None:
        """A step ended."""
        self.num_steps += 1
        self.num_borrowed += output.num_borrowed
        if output.num_drafted:
            self.num_drafts += output.num_drafted
            self.num_right_drafts += sum(map(len, output.further.values()))
        if output.compute_s <= 0:
            return
        if step.is_pure_decode:
            old = self.decode_step_s
            self.decode_step_s += (SMOOTHING if old else 1.0) * (output.compute_s - old)
        else:
            self.prefill_rate.add(step.num_tokens, output.compute_s)
