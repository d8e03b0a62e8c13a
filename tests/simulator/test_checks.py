"""The checks themselves: a violation that is planted is seen, for every rule there is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.simulator import inspection
from bench.simulator.clients import Client
from bench.simulator.decode_process import DecodeProcess
from bench.simulator.model import NOTHING, Engine, Oracle, Pool
from bench.simulator.prefill_process import PrefillProcess
from bench.simulator.scenario import draw
from bench.simulator.simulation import Simulation
from bench.simulator.verdict import Outcome, judge, judge_deadline, judge_lifecycle
from bench.simulator.violation import RULES, Violation
from cluster.engine.batch import Row, SampleSpec, StepPlan
from cluster.errors import ContextLengthExceeded, DeadlineExceeded, WorkerLost
from cluster.ids import Attempt, BlockHash, BlockId, RequestId
from cluster.kv.block_manager import BlockManager
from cluster.kv.edge import Piece
from cluster.request import LifecycleEvent, RequestSpec
from cluster.sampling import FinishReason, SamplingParams, TokenOutput
from decode_worker.core import DecodeCore
from router.conductor_io import Lifecycle
from router.delivery import Failed, NewTokens

R = RequestId("r")
SIZE = 4


def spec(num_prompt: int = 9, max_tokens: int = 3) -> RequestSpec:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return RequestSpec(request=R, token_ids=tuple(range(num_prompt)), sampling=sampling)


class Bench:
    """An engine with one request whose whole prompt is in the pool: 9 tokens in three blocks."""

    def __init__(self) -> None:
        self.oracle = Oracle(spec())
        self.blocks = BlockManager(8, SIZE, "model")
        self.block_ids = self.blocks.allocate(3) or []
        self.pool = Pool(8, SIZE)
        self.engine = Engine(self.pool, self.blocks, {R: self.oracle}, "decode-0.1")
        self.run(self.row(0, 9))

    def row(self, start: int, num_tokens: int) -> Row:
        end = start + num_tokens
        outputs = self.oracle.tokens[9:end]
        sample = SampleSpec(self.oracle.spec.sampling, self.oracle.tokens[:9], outputs) if end >= 9 else None
        return Row(R, Attempt(1), self.oracle.tokens[start:end], start, self.block_ids, sample)

    def run(self, *rows: Row) -> list[TokenOutput | None]:
        self.engine.begin(StepPlan(rows))
        return list(self.engine.finish(StepPlan(rows), 0.01).outputs)


def seen(rule: str, act: Callable[[], object]) -> str:
    with pytest.raises(Violation) as caught:
        act()
    assert caught.value.rule == rule
    assert RULES[rule] in str(caught.value)
    return caught.value.detail


# ---- steps ---------------------------------------------------------------------------------------


def test_the_engine_computes_what_the_oracle_says() -> None:
    bench = Bench()
    assert bench.run(bench.row(9, 1)) == [bench.oracle.outputs[1]]
    assert bench.run(bench.row(10, 1)) == [bench.oracle.outputs[2]]


@pytest.mark.parametrize("position", [0, 3, 4, 8])
def test_one_wrong_slot_is_seen(position: int) -> None:
    bench = Bench()
    bench.pool.blocks[bench.block_ids[position // SIZE]][position % SIZE] = 12345
    assert "foreign" in seen("I5", lambda: bench.run(bench.row(9, 1)))


def test_kv_that_was_never_written_is_seen() -> None:
    bench = Bench()
    bench.pool.blocks[bench.block_ids[1]] = [NOTHING] * SIZE
    assert "unwritten" in seen("I5", lambda: bench.run(bench.row(9, 1)))


def test_blocks_in_the_wrong_order_are_seen() -> None:
    bench = Bench()
    bench.block_ids.reverse()
    seen("I5", lambda: bench.run(bench.row(9, 1)))


def test_kv_that_is_overwritten_while_the_step_runs_is_seen() -> None:
    bench = Bench()
    plan = StepPlan((bench.row(9, 1),))
    bench.engine.begin(plan)
    bench.pool.tear(bench.block_ids[:1], [[1] * SIZE])
    assert "torn" in seen("I5", lambda: bench.engine.finish(plan, 0.01))


def test_a_token_of_another_history_is_seen() -> None:
    bench = Bench()
    wrong = msgspec.structs.replace(bench.row(9, 1), token_ids=[bench.oracle.tokens[9] + 1])
    seen("I8", lambda: bench.run(wrong))


def test_a_lost_output_in_the_sampling_history_is_seen() -> None:
    bench = Bench()
    bench.run(bench.row(9, 1))
    row = bench.row(10, 1)
    assert row.sample is not None
    seen(
        "I8",
        lambda: bench.run(
            msgspec.structs.replace(
                row, sample=msgspec.structs.replace(row.sample, output_ids=bench.oracle.tokens[9:10])
            )
        ),
    )


def test_a_token_that_is_sampled_twice_is_seen() -> None:
    bench = Bench()
    seen("I4", lambda: bench.run(bench.row(8, 1)))


def test_a_block_freed_during_the_step_is_seen() -> None:
    bench = Bench()
    plan = StepPlan((bench.row(9, 1),))
    bench.engine.begin(plan)
    bench.blocks.release(bench.block_ids)
    seen("I2", lambda: bench.engine.finish(plan, 0.01))


def test_a_write_into_a_shared_block_is_seen() -> None:
    bench = Bench()
    bench.blocks.fork(bench.block_ids[2:])
    seen("I1", lambda: bench.run(bench.row(9, 1)))


def test_two_rows_that_write_one_block_are_seen() -> None:
    bench = Bench()
    seen("I1", lambda: bench.run(bench.row(9, 1), bench.row(9, 1)))


def test_a_block_table_that_is_too_short_is_seen() -> None:
    bench = Bench()
    bench.block_ids.pop()
    seen("I6", lambda: bench.run(bench.row(8, 1)))


# ---- a cluster in the middle of its work ---------------------------------------------------------


def busy_cluster(*, in_place: bool) -> tuple[Simulation, PrefillProcess, DecodeProcess, Piece]:
    """A fault-free run, stopped when a piece is on its way to a lease that waits for it."""
    scenario = replace(
        draw(3, num_requests=200, faults=False),
        in_place=in_place,
        num_prefill=1,
        num_decode=1,
        prefill_blocks=200,
        decode_blocks=200,
    )
    simulation = Simulation(scenario)
    simulation.begin()
    for _ in range(4000):
        simulation.site.queue.run(simulation.site.queue.now + 0.001)
        for prefill in simulation.site.alive():
            if isinstance(prefill, PrefillProcess):
                for attempt in prefill.core._attempts:
                    for piece in attempt.handoff._sending.values():
                        decode = simulation.site.workers[attempt.handoff.peer.worker]
                        assert isinstance(decode, DecodeProcess)
                        return simulation, prefill, decode, piece
    raise AssertionError("no piece was ever on its way")


def test_a_late_write_is_seen() -> None:
    _, _, decode, piece = busy_cluster(in_place=True)
    lease = decode.core._leases.get((piece.request, piece.attempt))
    own = lease.sequence.block_ids[piece.first_block : piece.first_block + piece.num_blocks]
    inspection.check_write(decode, piece, own)
    other = replace(piece, request=RequestId("gone"))
    seen("I2", lambda: inspection.check_write(decode, other, own))
    foreign = [BlockId((block_id + 1) % decode.blocks.num_blocks) for block_id in own]
    seen("I1", lambda: inspection.check_write(decode, piece, foreign))
    decode.blocks.fork(own)
    seen("I1", lambda: inspection.check_write(decode, piece, own))


def test_a_block_freed_while_it_is_sent_is_seen() -> None:
    simulation, prefill, _, piece = busy_cluster(in_place=True)
    attempt = prefill.core._attempts.get((piece.request, piece.attempt))
    assert attempt is not None
    prefill.blocks.reset_cache()
    prefill.blocks.release(attempt.sequence.block_ids)
    seen("I7", lambda: simulation.site.queue.run(simulation.site.queue.now + 1.0))


def test_books_that_do_not_balance_are_seen() -> None:
    _, prefill, decode, _ = busy_cluster(in_place=False)
    for worker in (prefill, decode):
        inspection.check_books(worker)
        leaked = worker.blocks.allocate(1)
        assert leaked is not None
        seen("I6", lambda worker=worker: inspection.check_books(worker))
        worker.blocks.release(leaked)
        inspection.check_books(worker)


def test_a_lease_that_outlives_its_time_is_seen() -> None:
    _, _, decode, piece = busy_cluster(in_place=False)
    decode.undisturbed_since = -2 * inspection.LEASE_GRACE_S
    inspection.check_lease_times(decode)
    lease = decode.core._leases.get((piece.request, piece.attempt))
    lease.expires_s = decode.now() - 2 * inspection.LEASE_GRACE_S
    seen("I3", lambda: inspection.check_lease_times(decode))


def test_work_for_a_request_that_is_over_is_seen() -> None:
    simulation, prefill, decode, piece = busy_cluster(in_place=False)
    site = simulation.site
    site.held_up_until = decode.undisturbed_since = prefill.undisturbed_since = -10.0
    for worker in (prefill, decode):
        inspection.check_orphans(worker)
    site.ended_at[piece.request] = site.queue.now - 2.0
    seen("I3", lambda: inspection.check_orphans(decode))


def test_a_request_that_is_left_with_a_dead_worker_is_seen() -> None:
    simulation, _, decode, _ = busy_cluster(in_place=False)
    router = simulation.site.routers[0]
    inspection.check_conductor(router)
    router.conductor.workers.leave(decode.worker)
    seen("lost", lambda: inspection.check_conductor(router))


def test_what_is_left_at_the_end_is_seen() -> None:
    simulation, _, decode, _ = busy_cluster(in_place=False)
    assert inspection.left_on_worker(decode) is not None
    assert inspection.left_on_router(simulation.site.routers[0]) is not None
    seen("I6", lambda: inspection.check_empty(decode) if decode.blocks.allocate(1) else None)


def test_a_router_that_believes_cached_what_is_not_is_seen() -> None:
    simulation, prefill, _, _ = busy_cluster(in_place=False)
    router = simulation.site.routers[0]
    view = router.conductor.workers.view()
    view.prefix.store(view.rows[prefill.worker], [BlockHash(b"h" * 16)])
    seen("index", lambda: inspection.check_index(router, prefill))


def test_every_rule_that_is_checked_has_its_sentence() -> None:
    sources = Path(inspection.__file__).parent.glob("*.py")
    named = {rule for path in sources for rule in re.findall(r'Violation\(\s*"(\w+)"', path.read_text())}
    assert len(named) > 10
    assert named <= RULES.keys()


def test_a_worker_that_leaks_makes_the_run_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeCore, "quiet", lambda self: False)
    report = Simulation(draw(0, num_requests=5, faults=False)).run()
    assert report.violation is not None
    assert report.violation.startswith("quiet")


def test_a_decision_that_raises_makes_the_run_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: DecodeCore, event: object, now: float) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(DecodeCore, "handle", broken)
    report = Simulation(draw(0, num_requests=5, faults=False)).run()
    assert report.violation is not None
    assert report.violation.startswith("core")


# ---- clients -------------------------------------------------------------------------------------


def client_with_request() -> tuple[Simulation, Client]:
    """A client whose request has just been submitted."""
    simulation = Simulation(draw(3, num_requests=50, faults=False))
    simulation.begin()
    client = simulation.clients[0]
    while client.oracle is None or client.request not in simulation.site.routers[0].clients:
        simulation.site.queue.run(simulation.site.queue.now + 0.0001)
    client._stop_after = None
    return simulation, client


def test_a_client_takes_exact_tokens_only() -> None:
    _, client = client_with_request()
    oracle = client.oracle
    assert oracle is not None
    wrong = TokenOutput(oracle.outputs[0].token_id + 1)
    seen("I8", lambda: client.deliver(NewTokens((wrong,), None)))


@pytest.mark.parametrize(
    ("index", "finish"),
    [(0, None), (2, None), (1, FinishReason.LENGTH)],
    ids=["doubled", "one is lost", "ends early"],
)
def test_a_client_sees_a_wrong_next_token(index: int, finish: FinishReason | None) -> None:
    _, client = client_with_request()
    client.oracle = oracle = Oracle(spec(max_tokens=4))
    assert len(set(oracle.outputs)) == 4
    client.num_tokens = 0
    client.deliver(NewTokens((oracle.outputs[0],), None))
    seen("I8", lambda: client.deliver(NewTokens((oracle.outputs[index],), finish)))


def test_a_client_sees_what_comes_after_the_end() -> None:
    _, client = client_with_request()
    oracle = client.oracle
    assert oracle is not None
    client.deliver(NewTokens(tuple(oracle.outputs), oracle.finish))
    seen("I4", lambda: client.deliver(NewTokens((oracle.outputs[0],), None)))


def test_an_end_without_a_last_delivery_is_seen() -> None:
    _, client = client_with_request()
    seen("end", client.ended)


def test_without_faults_no_error_is_allowed() -> None:
    simulation, client = client_with_request()
    error = WorkerLost("lost")
    seen("end", lambda: client.deliver(Failed(error)))
    simulation.site.num_faults = 1
    client.num_retries = client.num_failed = 2
    assert judge(simulation.site, client, error) is Outcome.EXHAUSTED
    client.num_retries = client.num_failed = 0
    seen("end", lambda: judge(simulation.site, client, error))


def test_an_attempt_too_many_is_seen() -> None:
    simulation, client = client_with_request()
    simulation.site.num_faults = 1
    handed_over = Lifecycle(
        client.request, LifecycleEvent.RETRIED, 0.0, detail="decode-0: draining: it leaves"
    )
    failed = Lifecycle(client.request, LifecycleEvent.RETRIED, 0.0, detail="decode-0: step_failed: memory")
    for life in (handed_over, failed, handed_over, failed, handed_over):
        client.lifecycle(life)
    assert (client.num_retries, client.num_failed) == (5, 2)
    seen("end", lambda: client.lifecycle(failed))


def test_a_request_that_outlives_its_deadline_is_seen() -> None:
    _, client = client_with_request()
    client.oracle = Oracle(replace_deadline(spec(), 10.0))
    router = client.router
    assert router is not None
    router.undisturbed_since = -10.0
    client.submitted_at = router.now() - 10.4
    judge_deadline(client)
    client.submitted_at -= 0.2
    seen("end", lambda: judge_deadline(client))
    router.undisturbed_since = router.queue.now  # it could not know
    judge_deadline(client)


def test_a_deadline_and_a_prompt_too_large_are_allowed_only_when_true() -> None:
    simulation, client = client_with_request()
    client.oracle = Oracle(replace_deadline(spec(), 10.0))
    router = client.router
    assert router is not None
    client.submitted_at = router.now() - 9.0
    seen("end", lambda: judge(simulation.site, client, DeadlineExceeded("late")))
    client.submitted_at -= 1.0
    assert judge(simulation.site, client, DeadlineExceeded("late")) is Outcome.DEADLINE
    seen("end", lambda: judge(simulation.site, client, ContextLengthExceeded("large")))


def replace_deadline(of: RequestSpec, deadline_s: float) -> RequestSpec:
    return RequestSpec(
        request=of.request, token_ids=of.token_ids, sampling=of.sampling, deadline_s=deadline_s
    )


@pytest.mark.parametrize(
    ("detail", "rule"),
    [
        ("decode-0: bad_kv: commit while 1 blocks are missing", "I5"),
        ("decode-0: a token is missing before index 3 of the attempt", "I4"),
        ("decode-0: lease_expired: the lease was not renewed in time", "I3"),
        ("prefill-0: step_failed: out of memory", "end"),
    ],
)
def test_retries_without_a_right_to_happen_are_seen(detail: str, rule: str) -> None:
    simulation, client = client_with_request()
    simulation.site.queue.now += 100.0
    life = Lifecycle(client.request, LifecycleEvent.RETRIED, 0.0, detail=detail)
    seen(rule, lambda: judge_lifecycle(simulation.site, life))


def test_a_lease_may_expire_while_somebody_is_held_up() -> None:
    simulation, client = client_with_request()
    simulation.site.num_faults, simulation.site.held_up_until = 1, float("inf")
    life = Lifecycle(client.request, LifecycleEvent.RETRIED, 0.0, detail="decode-0: lease_expired: late")
    judge_lifecycle(simulation.site, life)
