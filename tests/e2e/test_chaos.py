"""A small slice of `make chaos`: workers of a live `baton serve` on SmolLM2 are killed, stopped and drained
under load, and every stream is compared with the undisturbed run."""

from __future__ import annotations

import pytest

from bench.chaos.faults import Kind
from bench.chaos.report import to_json, to_table
from bench.chaos.run import ChaosSettings, run_chaos

SLICE = ChaosSettings(
    num_streams=24, num_faults=3, seed=7, num_bodies=10, concurrency=6, max_prompt_words=60, max_tokens=24
)


@pytest.mark.ray
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stream_survives_and_is_equal() -> None:
    outcome = run_chaos(SLICE, print)
    result = to_json(outcome)
    print(to_table(result))
    assert outcome.num_streams >= SLICE.num_streams
    assert {fault.kind for fault in outcome.faults} == set(Kind)
    assert [
        (body, answer.error, answer.result(), wanted.result()) for body, answer, wanted in outcome.wrong
    ] == []
    assert outcome.num_equal == outcome.num_complete == outcome.num_streams
    assert outcome.is_quiet, "something is left on a worker"
    for fault in result["faults"]:
        assert fault["detected_s"] is not None, f"the router did not notice {fault}"
        assert (fault["process_ended_s"] is not None) == (fault["kind"] == "KILL")
