"""Fleets in cells and processes: with one cell the run it always was, the same result from any number of
processes, and many steps at once are what they are one by one."""

from __future__ import annotations

import json
import random
import socket
import threading
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.figures.latency import Latency
from bench.load.figures.slo import evaluate, parse_slos
from bench.load.records import Status
from bench.simulator.fleet.elastic import ElasticPolicy
from bench.simulator.fleet.policies import parse_policy
from bench.simulator.fleet.request import Request
from bench.simulator.fleet.simulation import Simulation
from bench.simulator.fleet.worker import Worker
from bench.simulator.fleet.workload import make_requests
from bench.simulator.hardware import KINDS
from bench.simulator.large.__main__ import hour_s, main
from bench.simulator.large.links import Link
from bench.simulator.large.plan import Plan, made_rows
from bench.simulator.large.prefixes import SentPrefixes
from bench.simulator.large.processes import run
from bench.simulator.large.quantiles import ERROR, EXACT, Collected, Quantiles
from bench.simulator.large.shard import Shard
from bench.simulator.large.stream import Stream
from bench.simulator.large.tally import Tally, total
from cluster.errors import BatonError
from cluster.slo_classes import Targets
from router.cells import CellLoad

H100 = "h100-llama3-8b"
TARGETS = Targets(0.5, 0.025)
Times = dict[int, tuple[float | None, float | None, float, int, int]]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace of conversations whose turns share their beginnings."""
    draw, lines, free = random.Random(3), [], 1
    chats: list[list[int]] = [[0] for _ in range(40)]
    for index in range(400):
        blocks = draw.choice(chats)
        if len(blocks) > 12:
            del blocks[1:]
        blocks += range(free, free + draw.randint(1, 4))
        free = blocks[-1] + 1
        row = {
            "timestamp": 100 * index,
            "input_length": 512 * len(blocks) - draw.randrange(512),
            "output_length": draw.randint(1, 200),
            "hash_ids": blocks,
        }
        lines.append(json.dumps(row))
    path = tmp_path_factory.mktemp("traces") / "chats.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def plan(workers: int = 8, rate: float = 60.0, seconds: float = 4.0, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "workers": workers,
        "hardware": H100,
        "rate": rate,
        "seconds": seconds,
        "slo": "ttft=0.5s,tpot=25ms",
        "seed": 1,
        "cell_workers": 4,
        "window_s": 0.05,
    }
    return Plan(**(values | changes))


def times(request: Request) -> tuple[float | None, float | None, float, int, int]:
    return request.first_s, request.finish_s, request.worst_gap_s, request.prefill_at, request.decode_at


def served(what: Plan, num_processes: int = 1) -> tuple[Times, list[Shard]]:
    """All shards, a thread each; what became of each request."""
    ends: list[list[Link]] = [[] for _ in range(num_processes)]
    for left, right in combinations(range(num_processes), 2):
        one, other = socket.socketpair()
        ends[left].append(Link(one))
        ends[right].append(Link(other))
    found: list[Times] = [{} for _ in range(num_processes)]
    shards = []
    for process in range(num_processes):

        def note(request: Request, into: Times = found[process]) -> None:
            assert request.index not in into
            into[request.index] = times(request)

        shards.append(Shard(what, process, ends[process], on_end=note))
    threads = [threading.Thread(target=shard.run) for shard in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for link in (link for own in ends for link in own):
        link.close()
    return {index: one for part in found for index, one in part.items()}, shards


# ---- one cell, many cells, many processes


@pytest.mark.parametrize("has_prefixes", [False, True])
@pytest.mark.parametrize("hardware", [f"{H100}:6", f"{H100}:3,h20-llama3-8b:3"])
def test_one_cell_is_the_same_run_request_by_request(chats: str, has_prefixes: bool, hardware: str) -> None:
    what = plan(6, 90.0, cell_workers=6, hardware=hardware, trace=chats if has_prefixes else None)
    found, shards = served(what)
    requests = [one for one in make_requests(what.rows(), 90.0, 600, 1) if one.arrival_s < what.seconds]
    whole = Simulation(what.pool(), requests, ElasticPolicy(TARGETS), TARGETS.tpot_s)
    whole.run(1e9)
    assert found == {one.index: times(one) for one in requests}
    assert (whole.num_cached_tokens > 0) == has_prefixes
    assert shards[0].cells[0].simulation.num_steps == whole.num_steps


@pytest.mark.parametrize("has_prefixes", [False, True])
def test_the_number_of_processes_changes_nothing(chats: str, has_prefixes: bool) -> None:
    what = plan(20, 250.0, trace=chats if has_prefixes else None)
    found, shards = served(what)
    assert len(shards[0].cells) == 5
    for num_processes in (2, 3):
        again, parts = served(what, num_processes)
        assert again == found
        cells = [cell for shard in parts for cell in shard.cells.values()]
        assert sum(cell.simulation.num_cached_tokens for cell in cells) == sum(
            cell.simulation.num_cached_tokens for cell in shards[0].cells.values()
        )


def test_all_cells_get_their_share_and_the_choice_follows_what_they_said() -> None:
    _, shards = served(plan(32, 900.0))
    steps = [cell.simulation.num_steps for cell in shards[0].cells.values()]
    assert len(steps) == 8
    assert max(steps) < 1.35 * min(steps)


def test_turns_of_a_chat_find_their_prefix_in_the_cell_they_were_in(chats: str) -> None:
    def cached_tokens(cell_workers: int) -> int:
        _, shards = served(plan(20, 100.0, trace=chats, cell_workers=cell_workers))
        return sum(cell.simulation.num_cached_tokens for cell in shards[0].cells.values())

    assert cached_tokens(4) > 0.8 * cached_tokens(20)


def test_a_prompt_too_large_for_most_cells_is_served_by_one_that_can(tmp_path: Path) -> None:
    small = {"fixed_s": 1e-3, "floor_s": 5e-3, "per_token_s": 2e-5, "per_context_s": 5e-8}
    path = tmp_path / "small.json"
    path.write_text(json.dumps(small | {"per_attention_s": 1e-9, "kv_tokens": 1_500}))
    pool = f"{path}:7,{H100}:1"
    what = plan(8, 40.0, hardware=pool, cell_workers=2)
    found, shards = served(what)
    requests = [one for one in make_requests(what.rows(), 40.0, 400, 1) if one.arrival_s < what.seconds]
    large = {one.index for one in requests if one.num_prompt >= 1_500}
    small_ones = {one.index for one in requests if one.num_prompt + one.num_output <= 1_500}
    assert len(large) > 10
    assert found.keys() >= large | small_ones
    only_small = plan(8, 40.0, hardware=f"{path}:8", cell_workers=2)
    found, shards = served(only_small)
    assert found.keys() == small_ones
    measured = [one for one in requests if 0.8 <= one.arrival_s <= 3.6]
    assert shards[0].tally.counts().num_offered == len(measured)
    assert shards[0].tally.counts().num_rejected == sum(one.index not in small_ones for one in measured)


# ---- many steps at once


class _StepByStep:
    """Lets no worker take more than one step at a time."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def is_waiting(self, worker: Worker) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@pytest.mark.parametrize(
    ("text", "num_workers"), [("elastic", 1), ("colocated:256:rr", 3), ("static:1p2d:rr", 3)]
)
@pytest.mark.parametrize("seed", range(3))
def test_steps_taken_at_once_are_those_taken_one_by_one(text: str, num_workers: int, seed: int) -> None:
    """Policies whose choice of a worker does not depend on when they look."""
    rows = made_rows()[seed * 300 : seed * 300 + 300]
    pool = [KINDS[H100]] * num_workers

    def run_of(is_by_step: bool) -> tuple[list[Request], Simulation]:
        requests = make_requests(rows, 12.0 * num_workers, 120, seed)
        policy: Any = parse_policy(text, num_workers).make(TARGETS, True)
        simulation = Simulation(pool, requests, _StepByStep(policy) if is_by_step else policy, TARGETS.tpot_s)
        simulation.run(1e9)
        return requests, simulation

    (at_once, fast), (one_by_one, slow) = run_of(False), run_of(True)
    assert fast.num_steps == slow.num_steps
    assert fast._order < 0.5 * slow._order  # events
    for one, other in zip(at_once, one_by_one, strict=True):
        assert one.first_s == pytest.approx(other.first_s, rel=1e-9)
        assert one.finish_s == pytest.approx(other.finish_s, rel=1e-9)
        assert one.worst_gap_s == pytest.approx(other.worst_gap_s, rel=1e-6)
        assert (one.prefill_at, one.decode_at) == (other.prefill_at, other.decode_at)


def test_a_worker_that_is_never_idle_keeps_nothing_of_requests_that_have_ended() -> None:
    requests = make_requests(made_rows()[:2_000], 20.0, 1_500, 2)
    policy = parse_policy("colocated:512", 1).make(TARGETS, True)
    simulation = Simulation([KINDS[H100]], requests, policy, TARGETS.tpot_s)
    [worker] = simulation.workers
    most_due = most_steps = 0
    for second in range(5, 70):
        simulation.run(float(second))
        assert worker.rows > 0
        most_due = max(most_due, len(worker.due) - 2 * worker.batch.rows)
        most_steps = max(most_steps, len(worker.batch.long_steps))
    assert most_due <= 17 + 64  # rows may just have left
    assert most_steps <= 64


# ---- what comes in


@pytest.mark.parametrize("has_prefixes", [False, True])
def test_the_stream_is_what_make_requests_makes(chats: str, has_prefixes: bool) -> None:
    rows = plan(trace=chats).rows() if has_prefixes else made_rows()[:300]
    stream = Stream(rows, 50.0, 1e9, 7)
    arrivals = [one for end in np.arange(0.25, 40.0, 0.25) for one in stream.until(end)][:1_000]
    expected = make_requests(rows, 50.0, 1_000, 7)
    assert [one.request().blocks for one in arrivals] == [one.blocks for one in expected]
    assert [(one.index, one.at_s, one.num_prompt, one.num_output) for one in arrivals] == [
        (one.index, one.arrival_s, one.num_prompt, one.num_output) for one in expected
    ]


def test_the_stream_ends_where_it_should() -> None:
    stream = Stream(made_rows()[:10], 100.0, 2.0, 0)
    arrivals = list(islice(stream.until(50.0), 1_000))
    assert max(one.at_s for one in arrivals) < 2.0
    assert 150 < len(arrivals) < 250
    assert list(stream.until(100.0)) == []


def test_made_rows_have_the_lengths_they_are_said_to_have() -> None:
    rows = made_rows()
    assert rows == made_rows()
    assert 0.9 * 1_155 < np.mean([row.input_tokens for row in rows]) < 1.05 * 1_155
    assert 0.9 * 211 < np.mean([row.output_tokens for row in rows]) < 1.05 * 211


def test_prefixes_are_known_by_cell_and_the_oldest_is_forgotten() -> None:
    sent = SentPrefixes(most=4)
    sent.sent((1, 2, 3), 0)
    assert sent.longest((1, 2, 9)) == (2, 0b1)
    assert sent.longest((9, 1)) == (2, 0b1)  # ids name prefixes: whoever has 1 has what is before it
    sent.sent((1, 2), 3)
    assert sent.longest((1, 2)) == (2, 0b1001)
    assert sent.of((1, 2, 3), 3) == 2
    assert sent.of((1, 2, 3), 0) == 3
    assert sent.of((1, 2, 3), 1) == 0
    sent.sent((7, 8), 5)
    assert len(sent) == 4
    assert sent.longest((1, 2, 3)) == (2, 0b1001)  # 3 was sent longest ago


# ---- what comes out


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50))
def test_few_values_are_exact(values: list[float]) -> None:
    found = Quantiles()
    found.add(np.array(values))
    assert found.is_exact
    for percent in (0, 50, 90, 99, 100):
        assert found.at(percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)
    figures = found.figures((50.0,))
    assert figures["max_s"] == max(values)
    assert figures["mean_s"] == pytest.approx(np.mean(values))


@pytest.mark.parametrize("seed", range(3))
def test_many_values_are_within_the_stated_error_however_they_were_collected(seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = np.exp(draw.normal(-4, 2, 3 * EXACT)).tolist()
    whole, parts = Quantiles(), [Quantiles(), Quantiles(), Quantiles()]
    for at in range(0, len(values), 100):
        some = np.array(values[at : at + 100])
        whole.add(some)
        parts[0 if at == 0 else 1 + (at // 100) % 2].add(some)
    collected = [msgspec.json.decode(msgspec.json.encode(one.collected()), type=Collected) for one in parts]
    merged = Quantiles.merged(collected)
    assert parts[0].is_exact
    assert not merged.is_exact
    for percent in (1, 50, 90, 95, 99, 99.9):
        exact = float(np.percentile(values, percent))
        assert whole.at(percent) == pytest.approx(exact, rel=1.01 * ERROR)
        assert merged.at(percent) == pytest.approx(whole.at(percent), rel=1e-12)
    assert merged.figures(())["num"] == len(values)
    assert merged.figures(())["max_s"] == max(values)


def test_few_values_of_several_processes_stay_exact() -> None:
    parts = [Collected(1, 2.0, 2.0, [2.0]), Collected(2, 5.0, 4.0, [1.0, 4.0]), Collected()]
    assert Quantiles.merged(parts).at(50) == 2.0
    assert Quantiles().at(50) is None


def test_requests_are_judged_as_the_load_test_judges_them() -> None:
    draw = random.Random(4)
    slos = parse_slos("ttft=0.5s,tpot=25ms,gap=60ms")
    tally, good, met = Tally(Targets(0.5, 0.025, 0.06), 2.0, 8.0), 0, np.zeros(3)
    for index in range(500):
        one = Request(index, draw.uniform(0, 10), 10, draw.choice((1, 2, 100)))
        one.first_s = one.arrival_s + draw.choice((0.1, 0.5, 0.9))
        one.finish_s = one.first_s + (one.num_output - 1) * draw.choice((0.01, 0.03))
        one.worst_gap_s = draw.choice((0.05, 0.07)) if one.num_output > 1 else 0.0
        tally.arrived(one.arrival_s)
        tally.ended(one)
        if 2.0 <= one.arrival_s <= 8.0:
            has_more = one.num_output > 1
            latency = Latency(
                output_len=one.num_output,
                ttft_s=one.first_s - one.arrival_s,
                tpot_s=one.tpot_s if has_more else None,
                itl_s=None,
                gap_s=one.worst_gap_s if has_more else None,
                e2e_s=one.finish_s - one.arrival_s,
                send_lag_s=0.0,
                ttft_from_send_s=None,
                e2e_from_send_s=None,
            )
            verdict = evaluate(slos, Status.OK, latency)
            good, met = good + all(verdict), met + verdict
    counts, _ = total([tally.tallied()])
    assert counts.num_arrived == 500
    assert counts.num_good == good > 0
    assert [counts.num_in_ttft, counts.num_in_tpot, counts.num_in_gap] == met.tolist()


# ---- processes


def test_a_process_that_is_lost_ends_the_run_with_a_sentence() -> None:
    one, other = socket.socketpair()
    link = Link(one)
    other.close()
    with pytest.raises(BatonError, match="has ended before its time"):
        link.receive(0)
    with pytest.raises(BatonError, match="has ended before its time"):
        link.send(0, [CellLoad()])
    link.close()


def test_loads_arrive_as_they_were_sent() -> None:
    ends = [Link(end) for end in socket.socketpair()]
    loads = [CellLoad(1.0, 2.0, 0.1, 1e-9, 3.0, 4.0, 5.0, 6.0, 0.3), CellLoad()]
    ends[0].send(3, loads)
    assert ends[1].receive(3) == loads
    for end in ends:
        end.close()


def test_the_command_measures_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "large.json"
    sizes = ["--workers", "16", "--rate", "40", "--seconds", "3", "--cell-workers", "8"]
    arguments = [*sizes, "--processes", "2"]
    assert main([*arguments, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["num_cells"] == result["processes"] == 2
    assert result["requests"] == pytest.approx(120, abs=40)
    assert result["attainment"] == 1.0
    assert result["goodput"] == pytest.approx(40, abs=12)
    assert result["peak_rss_bytes"] > 2**24
    assert result["distributions"]["ttft"]["is_exact"]
    assert "requests/s simulated by 2 processes" in capsys.readouterr().out
    assert main([*sizes, "--processes", "1", "--limit-minutes", "0"]) == 1
    assert main([*arguments, "--rate", "-1"]) == 2
    assert "--rate" in capsys.readouterr().err


def test_a_failed_process_is_told() -> None:
    with pytest.raises(BatonError, match="ended with status"):
        run(plan(hardware="unheard-of", trace=None), 2, lambda progress: None)


def test_an_hour_is_foretold_from_the_second_half() -> None:
    [report] = run(plan(), 1, lambda progress: None)
    report.marks = [(1.0, 5.0), (2.0, 6.0), (3.0, 6.5), (4.0, 7.0)]
    assert hour_s(report, 4.0) == pytest.approx(0.5 * 3600)
