"""A recorded load replayed: what the world is made of, exact times of tiny runs, and the comparison."""

from __future__ import annotations

import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.simulator.against_live import recording as recording_module
from bench.simulator.against_live.__main__ import main
from bench.simulator.against_live.compare import capacity, compare
from bench.simulator.against_live.measured import (
    BOTH,
    DECODE,
    MeasuredWorker,
    World,
    spread,
    world_of,
)
from bench.simulator.against_live.processes import replay_processes
from bench.simulator.against_live.recording import (
    Load,
    Moment,
    Phase,
    Recording,
    Served,
    Watch,
    WorkerSeen,
    seen,
)
from bench.simulator.against_live.replay import replay
from bench.simulator.hardware import HANDOFF_S
from cluster.errors import BatonError
from cluster.step_model import StepModel, StepWork, chunk_attention
from cluster.wire.messages import Role

ALONE = StepModel(2e-3, 8e-3, 7e-4, 2e-6, 1e-7)
BESIDE = StepModel(4e-3, 14e-3, 1.2e-3, 3e-6, 2e-7)
DECODER = MeasuredWorker(Role.DECODE, 3_000, ((0.0, ALONE, 0.0),))
PREFILLER = MeasuredWorker(Role.PREFILL, 3_000, ((0.0, ALONE, 0.0), (0.9, BESIDE, 0.0)))


def prompt_s(model: StepModel, num_tokens: int) -> float:
    """In one step."""
    return model.step_s(StepWork(num_tokens, 0, chunk_attention(0, num_tokens)))


def rows_s(model: StepModel, *keys: int) -> float:
    return model.step_s(StepWork(len(keys), sum(keys)))


def seen_worker(name: str, model: StepModel) -> WorkerSeen:
    role = name.split("-")[0]
    return WorkerSeen(
        worker=name, role=role, step_model=model, step_error=0.1, step_error_p90=0.2, num_blocks=100, steps=9
    )


def served(at_s: float, ttft_s: float, transfer_s: float = 0.0) -> Served:
    return Served(
        scheduled_s=at_s,
        input_tokens=60,
        output_tokens=3,
        ttft_s=ttft_s,
        tpot_s=0.02,
        queue_s=0.003,
        prefill_s=0.05,
        transfer_s=transfer_s,
        tail_s=0.001,
        is_local=transfer_s == 0,
    )


def phase(name: str, workers: list[WorkerSeen], requests: list[Served]) -> Phase:
    models = [one.step_model for one in workers]
    moment = Moment(at_s=0.0, models=models, errors_p90=[0.0] * len(workers))
    return Phase(
        load=Load(name=name, input="60", output="3", rate=1.0),
        moments=[moment] if workers else [],
        others_cores=0.1,
        stolen_cores=0.0,
        arrivals=[(one.scheduled_s, one.input_tokens, one.output_tokens) for one in requests],
        requests=requests,
        workers=workers,
    )


def recording(num_workers: int) -> Recording:
    """The models differ by phase: 1 in `decode`, 2 in `both`."""
    names = ["decode-0", "prefill-0"][:num_workers]
    phases = {}
    for number, name in enumerate((DECODE, BOTH), start=1):
        workers = [seen_worker(one, StepModel(number * 1e-3, 1e-3, 1e-4, 0.0, 0.0)) for one in names]
        requests = [served(0.0, 0.054, 0.0105), served(1.0, 0.056, 0.0105), served(2.0, 0.099, 0.0305)]
        phases[name] = phase(name, workers, requests)
    return Recording(
        layout="1p1d",
        arguments=[],
        cpu="a machine",
        started_with=[],
        measuring=phases,
        loads=[phase("60%", [], [served(float(at), 0.06) for at in range(10)])],
    )


def test_the_world_is_what_the_measuring_phases_say() -> None:
    world = world_of(recording(2))
    assert [one.role for one in world.workers] == [Role.DECODE, Role.PREFILL]
    assert [1e3 * one.model_at(7.0).fixed_s for one in world.workers] == pytest.approx([2, 2])
    assert world.front_s == pytest.approx(0.006)
    assert world.tail_s == pytest.approx(0.001)
    assert world.tokens_s == pytest.approx(60 / (0.0105 - HANDOFF_S))


def test_during_a_load_steps_take_what_workers_found_at_that_time() -> None:
    whole = recording(2)
    moments = [
        Moment(at_s=0.1, models=[ALONE, BESIDE], errors_p90=[0.0, 0.1]),
        Moment(at_s=0.6, models=[BESIDE, BESIDE], errors_p90=[0.0, 0.1]),
        Moment(at_s=1.1, models=[ALONE, ALONE], errors_p90=[0.0, 0.1]),
    ]
    load = msgspec.structs.replace(whole.loads[0], moments=moments)
    decoder, prefiller = world_of(whole, load).workers
    assert [decoder.model_at(at_s) for at_s in (0.0, 0.1, 0.59, 0.6, 1.0)] == [ALONE] * 3 + [BESIDE] * 2
    assert [prefiller.model_at(at_s) for at_s in (-1.0, 1.0, 1.1, 99.0)] == [BESIDE] * 2 + [ALONE] * 2


def test_a_recording_without_a_phase_says_so() -> None:
    whole = recording(1)
    broken = msgspec.structs.replace(whole, measuring={BOTH: whole.measuring[BOTH]})
    with pytest.raises(BatonError, match="lacks its phase `decode`: record it again"):
        world_of(broken)


@pytest.mark.parametrize(("others", "stolen"), [(0.3, 0.0), (0.1, 0.2)])
def test_a_machine_that_was_not_quiet_is_not_measured(others: float, stolen: float) -> None:
    whole = recording(1)
    phase = msgspec.structs.replace(whole.measuring[BOTH], others_cores=others, stolen_cores=stolen)
    with pytest.raises(BatonError, match=r"others used 0\.30 cores while `both` ran"):
        world_of(msgspec.structs.replace(whole, measuring=whole.measuring | {BOTH: phase}))


def test_steps_that_follow_no_model_are_no_measurement() -> None:
    whole = recording(1)
    workers = [seen_worker("decode-0", StepModel(36e-3, 0.0, 0.0, 0.0, 1e-5))]
    phase = msgspec.structs.replace(whole.measuring[BOTH], workers=workers)
    with pytest.raises(BatonError, match="the steps of decode-0 in `both` follow no model"):
        world_of(msgspec.structs.replace(whole, measuring=whole.measuring | {BOTH: phase}))


def test_alone_a_request_takes_its_steps_and_what_was_measured_beside_them() -> None:
    world = World((DECODER,), front_s=0.004, tail_s=0.0005, tokens_s=1e9)
    [answer] = replay(world, [(1.0, 60, 3)], 32)
    assert answer.ttft_s == pytest.approx(0.004 + prompt_s(ALONE, 60))
    decode_s = rows_s(ALONE, 61) + rows_s(ALONE, 62)
    assert answer.tpot_s == pytest.approx((decode_s + 0.0005) / 2)
    assert answer.is_local


def test_with_two_workers_the_prompt_moves_and_steps_take_what_they_took_then() -> None:
    world = World((DECODER, PREFILLER), front_s=0.0, tail_s=0.0, tokens_s=6_000.0)
    [one] = replay(world, [(0.0, 60, 3)], 32)
    assert not one.is_local
    moved_s = 60 / 6_000 + HANDOFF_S
    assert one.tpot_s == pytest.approx((moved_s + rows_s(ALONE, 61) + rows_s(ALONE, 62)) / 2)
    early, late = replay(world, [(0.0, 60, 200), (1.0, 60, 2)], 32)
    assert early.ttft_s == pytest.approx(prompt_s(ALONE, 60))
    assert late.ttft_s == pytest.approx(prompt_s(BESIDE, 60))


def test_steps_are_as_far_from_their_middle_as_they_were() -> None:
    worker = MeasuredWorker(Role.DECODE, 3_000, ((0.0, ALONE, spread(0.3)),))
    rng, work = random.Random(0), StepWork(4, 400)
    found = sorted(worker.step_s(work, 1.0, rng) / ALONE.step_s(work) for _ in range(4_000))
    assert found[2_000] == pytest.approx(1.0, abs=0.02)
    assert found[3_600] == pytest.approx(1.3, abs=0.03)
    assert spread(-0.1) == 0.0
    assert DECODER.step_s(work, 1.0, rng) == ALONE.step_s(work)


def test_both_simulators_know_the_time_of_the_load() -> None:
    slow = MeasuredWorker(Role.DECODE, 3_000, ((0.0, ALONE, 0.0), (5.0, BESIDE, 0.0)))
    world = World((slow,), front_s=0.0, tail_s=0.0, tokens_s=1e9)
    arrivals = [(1.0, 60, 2), (6.0, 60, 2)]
    for answers in (replay(world, arrivals, 32), replay_processes(world, arrivals, 32)):
        quick, late = answers
        assert quick.ttft_s == pytest.approx(prompt_s(ALONE, 60), abs=2e-3)
        assert late.ttft_s == pytest.approx(prompt_s(BESIDE, 60), abs=2e-3)


def test_answers_alone_take_the_same_in_both_simulators() -> None:
    """Whose steps follow one another at once, without the router."""
    world = World((DECODER,), front_s=0.0, tail_s=0.0, tokens_s=1e9)
    arrivals = [(1.0, 60, 50), (1.2, 80, 40)]
    pairs = zip(replay(world, arrivals, 32), replay_processes(world, arrivals, 32), strict=True)
    for of_pool, of_processes in pairs:
        assert of_processes.tpot_s == pytest.approx(of_pool.tpot_s, rel=0.03)


def test_ratios_are_of_the_requests_that_were_served() -> None:
    world = World((DECODER,), front_s=0.01, tail_s=0.0, tokens_s=1e9)
    load = recording(1).loads[0]
    arrivals = [*load.arrivals, (20.0, 4_000, 2)]  # offered and not served: it would be slow
    result = compare(msgspec.structs.replace(load, arrivals=arrivals), world, 32)
    assert (result["num_offered"], result["num_served"]) == (11, 10)
    pool, processes = result["simulated"]["pool"], result["simulated"]["processes"]
    figures = pool["figures"]["ttft_p50"]
    assert figures["live_ms"] == pytest.approx(60.0)
    assert figures["simulated_ms"] == pytest.approx(1e3 * (0.01 + prompt_s(ALONE, 60)))
    assert figures["ratio"] == pytest.approx(figures["simulated_ms"] / 60.0)
    assert not pool["within"]
    assert processes["figures"]["ttft_p50"]["ratio"] == pytest.approx(figures["ratio"], rel=0.02)
    assert processes["figures"]["tpot_p50"]["simulated_ms"] == pytest.approx(
        pool["figures"]["tpot_p50"]["simulated_ms"], rel=0.02
    )
    exact = World((DECODER,), 0.06 - prompt_s(ALONE, 60), 0.04 - rows_s(ALONE, 61) - rows_s(ALONE, 62), 1e9)
    assert compare(load, exact, 32)["simulated"]["pool"]["within"]


def test_capacity_is_where_requests_begin_to_miss_their_targets() -> None:
    world = World((DECODER,), 0.0, 0.0, 1e9)
    lengths = [(160, 64)] * 100
    most = capacity(world, lengths, 1.0, 32)
    assert most > capacity(world, [(320, 128)] * 100, 1.0, 32) > 0
    assert capacity(world, lengths, 64.0, 32) == pytest.approx(most, rel=0.2)


def test_workers_tell_their_step_models() -> None:
    worker = {
        "id": "decode-0",
        "role": "decode",
        "step_model": msgspec.to_builtins(ALONE),
        "step_error": 0.1,
        "step_error_p90": 0.2,
        "kv_blocks": {"total": 7},
        "steps": 3,
    }
    [found] = seen({"workers": [worker]})
    assert (found.step_model, found.num_blocks) == (ALONE, 7)
    with pytest.raises(BatonError, match="decode-0 has no step model"):
        seen({"workers": [worker | {"step_model": None}]})


class _Cluster:
    """Answers as many times as it is told, then no more."""

    def __init__(self, reply: dict[str, Any], *, answers: float = math.inf) -> None:
        self._reply = reply
        self.asked = threading.Semaphore(0)
        self._left = answers

    def get(self, path: str) -> Any:
        assert path == "/cluster"
        self._left -= 1
        if self._left < 0:
            raise OSError("it is gone")
        self.asked.release()
        return self._reply


def test_a_load_is_watched_while_it_runs_and_a_cluster_that_goes_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording_module, "WATCH_EVERY_S", 0.001)
    worker = {"id": "decode-0", "role": "decode", "step_model": msgspec.to_builtins(ALONE)}
    worker |= {"step_error": 0.1, "step_error_p90": 0.2, "kv_blocks": {"total": 7}, "steps": 3}
    cluster: Any = _Cluster({"workers": [worker]})
    with Watch(cluster) as watch:
        assert cluster.asked.acquire(timeout=10)
    [first, *_] = watch.moments(time.perf_counter() - 60)
    assert (first.models, first.errors_p90, 0 < first.at_s < 70) == ([ALONE], [0.2], True)
    gone: Any = _Cluster({"workers": []}, answers=2)
    with Watch(gone) as watch:
        for _ in range(2):
            assert gone.asked.acquire(timeout=10)
        watch._thread.join(10)
    with pytest.raises(BatonError, match="could not be watched: it is gone"):
        watch.moments(0.0)


def test_the_command_compares_again_what_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path
    (directory / "colocated.json").write_bytes(msgspec.json.encode(recording(1)))
    out = directory / "out.json"
    arguments = ["--recordings", str(directory), "--again", "--layouts", "colocated", "--out", str(out)]
    assert main(arguments) == 1
    assert "60%" in capsys.readouterr().out
    result = msgspec.json.decode(out.read_bytes())
    assert result["layouts"][0]["loads"][0]["num_served"] == 10
    with pytest.raises(BatonError, match="record it first"):
        main(["--recordings", str(directory), "--again", "--layouts", "1p1d"])
