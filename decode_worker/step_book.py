"""The step in flight on a decode worker, and what steps took: for the step model, and for gauges.

1. `begin` opens a step that was planned, `end` and `fail` close it. What they say of its time is kept until
   somebody looks, too: a few steps of it at once cost little more than one.
2. A step that nothing waits for may have gone on to the next one with the same rows. Mostly all there is then
   is a token each: the step itself tells it (`DecodeStep.go_on`), and the rest is booked for all such steps
   together when somebody is about to look (`settle`). Otherwise `went_on` books it at once.
"""

from __future__ import annotations

from typing import Final

from cluster.engine.batch import StepOutput
from cluster.engine.pacing import Pacer
from cluster.step_model import StepWork
from decode_worker.decode_step import DecodeStep
from decode_worker.step_meter import StepMeter

_MOST_SAID: Final = 32  # of steps that nobody has asked about: two for each


class StepBook:
    """Its scheduler is the only writer. Whatever it hands out is settled."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._meter = StepMeter()
        self.unsettled: DecodeStep | None = None  # in flight, for those who ask neither what it has brought
        # nor of its sequences
        # said, and not told to the others yet: the work of a step that began, or one that ended with what
        self._said: list[tuple[StepWork | DecodeStep, StepOutput | None, float]] = []

    @property
    def busy(self) -> bool:
        """A step is in flight."""
        return self.unsettled is not None

    @property
    def step(self) -> DecodeStep | None:
        """In flight."""
        self.settle()
        return self.unsettled

    @property
    def pacer(self) -> Pacer:
        self.settle()
        return self._pacer

    @property
    def meter(self) -> StepMeter:
        self.settle()
        return self._meter

    def begin(self, step: DecodeStep, work: StepWork, now: float) -> None:
        self.unsettled = step
        self._said.append((work, None, now))

    def end(self, output: StepOutput, now: float) -> DecodeStep:
        """The step in flight has ended, and no other is."""
        step = self._closed()
        self._said.append((step, output, now))
        if len(self._said) > _MOST_SAID:
            self._tell()
        return step

    def fail(self) -> DecodeStep:
        """The step in flight raised."""
        step = self._closed()
        self._tell()
        self._meter.num_steps += 1
        self._pacer.drop()
        return step

    def went_on(self, output: StepOutput, now: float) -> None:
        """The same rows are in flight again, with their tokens of `output`, perhaps several of a row."""
        step = self.step
        assert step is not None
        self._meter.add(step, output)
        step.went_on(len(step.rows) + sum(map(len, output.further.values())))
        self._pace_on(step, output, now)

    def settle(self) -> None:
        """Somebody is about to look at what a run leaves behind: its sequences, and what its steps took."""
        if self._said:
            self._tell()
        step = self.unsettled
        if step is None or not step.behind:
            return
        for output, now in step.settle():
            step.context += len(step.rows)
            self._meter.add(step, output)
            self._pace_on(step, output, now)

    def _tell(self) -> None:
        said, self._said = self._said, []
        for what, output, now in said:
            if output is None:
                assert isinstance(what, StepWork)
                self._pacer.begin(what, now)
            else:
                assert isinstance(what, DecodeStep)
                self._meter.add(what, output)
                self._pacer.end(output.compute_s, now, is_typical=not output.num_drafted)

    def _closed(self) -> DecodeStep:
        step = self.unsettled
        assert step is not None
        if step.behind:
            self.settle()
        self.unsettled = None
        return step

    def _pace_on(self, step: DecodeStep, output: StepOutput, now: float) -> None:
        work = StepWork(len(step.rows), step.context)
        self._pacer.go_on(output.compute_s, work, now, is_typical=not output.num_drafted)
