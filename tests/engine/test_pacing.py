"""A worker's steps aim below their targets by what it has seen them err."""

from __future__ import annotations

from cluster.engine.pacing import Pacer, WaitingPrompt
from cluster.slo_classes import DecodeBatch, Targets
from cluster.step_model import StepModel, StepWork
from tests.engine.test_sequence import sequence

MODEL = StepModel(2e-3, 8e-3, 1e-3, 1e-6, 1e-8)
WORK = StepWork(64, 2_000, 1_000.0)


def paced(times: list[float]) -> Pacer:
    """After steps that took so many times what was predicted of them."""
    pacer, now = Pacer(Targets(2.0, 0.1), 512), 0.0
    pacer.calibrated(MODEL)
    for one in times:
        pacer.begin(WORK, now)
        now += one * pacer.model.step_s(WORK)
        pacer.end(0.0, now)
    return pacer


def test_steps_that_err_leave_room_for_it() -> None:
    plain = Pacer(Targets(2.0, 0.1), 512).settings
    assert paced([1.0] * 128).settings == plain
    noisy = paced([0.8, 1.2, 1.0, 1.0] * 32)
    assert noisy.settings.safety < 0.95
    assert noisy.prompts.settings is noisy.settings  # one for rows and for prompts


def test_while_prompts_are_late_they_come_before_room() -> None:
    plain = Pacer(Targets(2.0, 0.1), 512).settings
    pacer = paced([0.8, 1.2, 1.0, 1.0] * 32)
    pacer.prompts.add(WaitingPrompt(sequence([1] * 2000), deadline_s=1.0))
    for now, is_late in ((0.5, False), (2.0, True)):
        pacer.prompts.plan(now, DecodeBatch(), room=0)
        pacer.begin(WORK, now)
        pacer.end(0.0, now + pacer.model.step_s(WORK))
        assert (pacer.settings == plain) == is_late


def test_a_few_steps_say_nothing_and_errors_are_forgotten() -> None:
    plain = Pacer(Targets(2.0, 0.1), 512).settings
    assert paced([0.8, 1.2] * 12).settings == plain
    assert paced([0.8, 1.2, 1.0, 1.0] * 32 + [1.0] * 160).settings.safety == plain.safety
