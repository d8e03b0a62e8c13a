"""Workers that die, hang and restart under requests: each row of the table of failures the router decides."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from cluster.errors import DeadlineExceeded, NotReady, WorkerLost
from cluster.ids import Attempt, Epoch, LeaseId, RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestState
from cluster.step_model import StepModel
from cluster.wire.messages import (
    Abort,
    AttemptFailed,
    Committed,
    Grant,
    Heartbeat,
    Prefill,
    Reserve,
    Role,
    WorkerLoad,
    WorkerState,
)
from router.believable import FIGURES, unbelievable
from router.conductor_io import FromWorker, Send, WorkerGone, WorkerJoined
from router.config import ConductorConfig
from router.delivery import StaleReason
from tests.router.conductor_peers import (
    Client,
    ScriptedDecode,
    ScriptedPrefill,
    World,
    make_register,
    make_spec,
)

S = RequestState
E = LifecycleEvent
NO_WAIT = ConductorConfig(recovery_wait_s=0)


def to_stage(world: World, prefill: ScriptedPrefill, decode: str, stage: str) -> None:
    """Bring the one request of this pair to: reserved, prefilling, streaming (token 0 is out), decoding."""
    stages = ["reserved", "prefilling", "streaming", "decoding"]
    depth = stages.index(stage)
    if depth >= 1:
        world.work(WorkerId(decode))
    if depth >= 2:
        prefill.receive(world.inbox[prefill.register.worker].popleft(), world.now)
        prefill.step(world.now)
        world.read(prefill.register.worker)
    if depth >= 3:
        world.transfer(prefill)
        world.work(WorkerId(decode))
        world.work(WorkerId(decode))


def served_elsewhere(world: World, client: Client, max_s: float = 10.0) -> None:
    world.run(max_s)
    world.assert_served(client)
    world.assert_quiet()
    assert client.events.count(E.FIRST_TOKEN) == 1
    assert client.events.count(E.LAST_TOKEN) == 1


@pytest.mark.parametrize("stage", ["reserved", "prefilling", "streaming"])
@pytest.mark.parametrize("spare", [True, False])
def test_b082_prefill_worker_dies_before_commit(stage: str, spare: bool) -> None:
    world = World()
    prefill, decode = world.prefill("p0"), world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=12))
    to_stage(world, prefill, "d0", stage)
    if spare:
        world.prefill("p1")
    world.kill("p0")
    assert world.conductor.state(RequestId("r")) is S.QUEUED  # placed again at once
    assert any(isinstance(send.message, Abort) and send.worker == "d0" for send in world.sent)
    served_elsewhere(world, client)
    assert client.summary is not None
    assert client.summary.attempts == 2
    assert client.summary.prefill_worker == ("p1" if spare else "d0")
    assert decode.num_expired == 0


def test_prefill_worker_dies_after_commit_and_nobody_notices() -> None:
    world = World()
    prefill = world.prefill("p0")
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=12))
    to_stage(world, prefill, "d0", "decoding")
    world.kill("p0")
    served_elsewhere(world, client)
    assert client.summary is not None
    assert client.summary.attempts == 1


@pytest.mark.parametrize("stage", ["reserved", "prefilling", "streaming", "decoding"])
def test_b032_decode_worker_dies_and_another_goes_on_at_the_next_index(stage: str) -> None:
    world = World()
    prefill = world.prefill("p0")
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=12))
    to_stage(world, prefill, "d0", stage)
    world.decode("d1")
    delivered = len(client.outputs)
    world.kill("d0")
    delivered = max(delivered, len(client.outputs))  # what it had sent before still counts
    reserve = world.sent[-1].message
    assert isinstance(reserve, Reserve)
    assert reserve.token_ids == [*client.spec.token_ids, *client.outputs[:delivered]]
    assert reserve.num_prompt_tokens == len(client.spec.token_ids)
    assert reserve.sampling.max_tokens == 12
    served_elsewhere(world, client)


@pytest.mark.parametrize("stage", ["reserved", "prefilling", "streaming", "decoding"])
def test_b032_nobody_left_is_an_error_at_once(stage: str) -> None:
    world = World(NO_WAIT)
    prefill = world.prefill("p0")
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=12))
    to_stage(world, prefill, "d0", stage)
    before = world.now
    world.kill("d0")
    assert isinstance(client.error, WorkerLost)
    assert client.finish is None
    assert client.ended_at == before
    assert world.conductor.quiet()
    world.assert_quiet()


def test_waiting_requests_hear_that_the_last_worker_died() -> None:
    world = World(NO_WAIT)
    world.decode("d0", max_num_seqs=1)
    clients = [world.submit(make_spec(f"r{i}", max_tokens=100)) for i in range(3)]
    world.work(WorkerId("d0"))
    world.kill("d0")
    assert all(client.error is not None for client in clients)
    assert world.conductor.quiet()


def test_those_that_only_wait_hear_of_it_too() -> None:
    """Nothing of ours runs on it: it is full of another router's requests."""
    world = World(NO_WAIT)
    decode = world.decode("d0", max_num_seqs=2)
    full = Heartbeat(state=WorkerState.READY, load=WorkerLoad(running=2, steps=1))
    world.feed(FromWorker(decode.register.worker, Epoch(1), full))
    client = world.submit(make_spec("r"))
    assert world.conductor.num_queued == 1
    world.kill("d0")
    assert client.error is not None
    assert world.conductor.quiet()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
@pytest.mark.parametrize("name", [*FIGURES, *StepModel.__struct_fields__])
def test_a_worker_that_mismeasures_harms_nobody(name: str, value: float) -> None:
    """What it reports cannot be: every request goes on, and what it said before stands."""
    world = World()
    world.prefill("p0")
    for decode in ("d0", "d1"):
        world.decode(decode)
    first = world.submit(make_spec("first", max_tokens=6))
    if name in FIGURES:
        wrong = WorkerLoad(steps=1, **{name: value})  # type: ignore[arg-type]
    else:
        model = StepModel(1e-3, 9e-3, 2e-4, 1e-7, 1e-8)
        wrong = WorkerLoad(steps=1, step_model=msgspec.structs.replace(model, **{name: value}))
    assert unbelievable(wrong)
    for worker in ("p0", "d0", "d1"):
        beat = Heartbeat(state=WorkerState.READY, load=wrong)
        world.feed(FromWorker(WorkerId(worker), Epoch(1), beat))
        load = world.conductor.workers.state(WorkerId(worker))[2]
        assert load.steps == 1
        assert unbelievable(load) == []
    later = [world.submit(make_spec(f"later-{index}", max_tokens=3)) for index in range(3)]
    world.run()
    for client in (first, *later):
        world.assert_served(client)
    world.assert_quiet()


def test_other_requests_do_not_notice() -> None:
    world = World()
    world.prefill("p0")
    world.prefill("p1")
    world.decode("d0")
    world.decode("d1")
    clients = [world.submit(make_spec(f"r{i}", max_tokens=30)) for i in range(8)]
    for _ in range(4):
        for worker in list(world.workers):
            world.work(worker)
    world.kill("d0")
    world.run()
    attempts = []
    for client in clients:
        world.assert_served(client)
        assert client.summary is not None
        attempts.append(client.summary.attempts)
    assert sorted(attempts) == [1, 1, 1, 1, 2, 2, 2, 2]
    world.assert_quiet()


def test_b090_restart_behind_the_same_name() -> None:
    world = World(NO_WAIT)
    world.prefill("p0")
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=12))
    world.work(WorkerId("d0"))
    old = world.workers[WorkerId("d0")]
    # The new process is here before the end of the old stream was seen.
    world.decode("d0", epoch=2)
    assert isinstance(client.error, WorkerLost)
    late = WorkerGone(WorkerId("d0"), Epoch(1), "connection closed")
    assert world.feed(late) == []
    assert (
        world.feed(FromWorker(WorkerId("d0"), Epoch(1), Heartbeat(state=WorkerState.READY, load=old.load())))
        == []
    )
    assert world.num_stale == 2
    after = [world.submit(make_spec(f"after{i}")) for i in range(5)]
    prefills = [send.message for send in world.sent if isinstance(send.message, Prefill)]
    world.run()
    for other in after:
        world.assert_served(other)
    prefills = [send.message for send in world.sent if isinstance(send.message, Prefill)]
    assert {message.decode_epoch for message in prefills[1:]} == {2}
    world.assert_quiet()


def test_replacement_without_an_end_of_the_old_stream_moves_requests() -> None:
    world = World()
    world.decode("d0")
    world.decode("d1")
    clients = [world.submit(make_spec(f"r{i}", max_tokens=20)) for i in range(4)]
    for worker in list(world.workers):
        world.work(worker)
    world.decode("d0", epoch=2)
    world.run()
    for client in clients:
        world.assert_served(client)
    world.assert_quiet()


def test_b082_hung_engine_is_left_and_comes_back() -> None:
    """Its process answers heartbeats, but no step runs."""
    world = World()
    prefill, decode = world.prefill("p0"), world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=6))
    world.work(WorkerId("d0"))
    prefill.receive(world.inbox[WorkerId("p0")].popleft(), 0.0)
    while E.RETRIED not in client.events:
        assert world.now < 20
        world.advance(0.5)
        world.heartbeat("p0")
        world.heartbeat("d0")
    assert world.now == pytest.approx(15.0)
    assert not world.conductor.workers.view().is_ready(WorkerId("p0"))
    while not client.has_ended:
        world.work(WorkerId("d0"))
    world.assert_served(client)
    assert any(isinstance(send.message, Abort) and send.worker == "p0" for send in world.sent)
    world.work(WorkerId("p0"))  # it was only slow: the abort reaches it, and it steps again
    world.heartbeat("p0")
    assert world.conductor.workers.view().is_ready(WorkerId("p0"))
    world.assert_quiet()
    assert decode.num_expired == 0


def test_a_busy_engine_that_steps_is_not_stuck() -> None:
    world = World()
    prefill = world.prefill("p0")
    world.decode("d0")
    load = WorkerLoad(queued_prefill_tokens=10_000, waiting=5)
    for step in range(100):
        world.advance(0.5)
        busy = WorkerLoad(queued_prefill_tokens=load.queued_prefill_tokens, waiting=5, steps=step // 20)
        world.feed(
            FromWorker(prefill.register.worker, Epoch(1), Heartbeat(state=WorkerState.READY, load=busy))
        )
        assert world.conductor.workers.view().is_ready(WorkerId("p0"))


def test_prefill_that_never_comes_ends() -> None:
    """P lives, steps, and has lost the request: the last resort is a deadline."""
    world = World()
    prefill = world.prefill("p0")
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=6))
    world.work(WorkerId("d0"))
    world.inbox[WorkerId("p0")].clear()
    prefill.steps += 1
    world.advance(59.5)
    assert E.RETRIED not in client.events
    world.advance(1.0)
    assert E.RETRIED in client.events
    world.run()
    world.assert_served(client)
    world.assert_quiet()


def test_commit_that_never_comes_ends() -> None:
    world = World()
    prefill = world.prefill("p0")
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=6))
    to_stage(world, prefill, "d0", "streaming")
    prefill.to_decode.clear()
    world.advance(9.5)
    assert E.RETRIED not in client.events
    world.advance(1.0)
    assert E.RETRIED in client.events
    world.run()
    world.assert_served(client)
    world.assert_quiet()


def test_silent_decode_ends() -> None:
    world = World()
    prefill = world.prefill("p0")
    world.decode("d0")
    world.decode("d1")
    client = world.submit(make_spec("r", max_tokens=20))
    assert client.summary is None
    to_stage(world, prefill, "d0", "decoding")
    world.advance(61)
    assert E.RETRIED in client.events
    world.run()
    world.assert_served(client)
    assert client.summary is not None
    assert client.summary.decode_worker == "d1"
    world.assert_quiet()


def test_same_epoch_again_is_a_reconnect() -> None:
    world = World(NO_WAIT)
    world.decode("d0")
    client = world.submit(make_spec("r"))
    world.work(WorkerId("d0"))
    world.feed(WorkerJoined(make_register("d0", Role.DECODE)))
    assert isinstance(client.error, WorkerLost)  # whatever it held was this stream's
    assert world.conductor.quiet()


def test_b099_counters_are_zero_and_load_spreads_after_disorder() -> None:
    rng = random.Random(99)
    world = World()
    for name in ("p0", "p1"):
        world.prefill(name)
    for name in ("d0", "d1"):
        world.decode(name, max_num_seqs=16)
    for i in range(500):
        name = f"r{i}"
        world.submit(
            make_spec(name, num_prompt=rng.randrange(2, 40), max_tokens=rng.randrange(1, 12), eos=True)
        )
        for _ in range(rng.randrange(0, 4)):
            world.work(rng.choice(list(world.workers)))
        alive = [client.spec.request for client in world.clients.values() if not client.has_ended]
        if alive and rng.random() < 0.3:
            world.leave(rng.choice(alive))
        if i == 250:
            register = world.kill("d1")
            world.decode("d1", epoch=register.epoch + 1, max_num_seqs=16)
        if rng.random() < 0.2:
            world.heartbeat(rng.choice(list(world.workers)))
            world.advance(0.01)
        in_flight = world.conductor.workers.in_flight()
        assert all(len(requests) <= world.conductor.num_live for requests in in_flight.values())
        assert (world.conductor.workers.view().fleet.work_s >= 0).all()
    world.run()
    world.assert_quiet()
    for worker in list(world.workers):
        world.heartbeat(worker)
    fleet = world.conductor.workers.view().fleet
    assert world.conductor.workers.in_flight() == {}
    for column in (fleet.work_s, fleet.rows, fleet.coming_rows, fleet.kv_used):
        assert not column.any()
    world.sent.clear()
    for i in range(100):
        world.submit(make_spec(f"next{i}", num_prompt=8, max_tokens=4))
        if i % 10 == 9:
            world.run()
    prefills = [send.worker for send in world.sent if isinstance(send.message, Prefill)]
    decodes = [send.worker for send in world.sent if isinstance(send.message, Reserve)]
    assert len(prefills) == len(decodes) == 100
    for placed, name in ((prefills, "p0"), (decodes, "d0")):
        assert 40 <= placed.count(WorkerId(name)) <= 60


def test_nothing_grows_with_the_number_of_requests() -> None:
    world = World()
    world.prefill("p0")
    decode = world.decode("d0")
    assert isinstance(decode, ScriptedDecode)
    for i in range(300):
        world.submit(make_spec(f"r{i}", max_tokens=3))
        world.run()
    assert world.conductor.quiet()
    assert world.conductor.num_live == 0
    assert world.conductor.next_deadline() is None


# ---- nobody is there for a while


@pytest.mark.parametrize("stage", ["reserved", "prefilling", "streaming", "decoding"])
def test_the_only_decode_worker_dies_and_its_successor_goes_on(stage: str) -> None:
    world = World()
    prefill = world.prefill("p0")
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=12))
    to_stage(world, prefill, "d0", stage)
    world.kill("d0")
    world.advance(15.0)
    assert not client.has_ended
    assert world.conductor.state(RequestId("r")) is S.QUEUED
    world.decode("d0", epoch=2)
    served_elsewhere(world, client)
    assert client.events.count(E.RESUMED) == 1


def test_a_request_that_comes_while_nobody_is_there_waits_too() -> None:
    world = World()
    world.kill(world.decode("d0").register.worker)
    client = world.submit(make_spec("r"))
    world.advance(19.0)
    assert not client.has_ended
    world.decode("d0", epoch=2)
    served_elsewhere(world, client)


def test_the_wait_for_a_successor_has_its_end() -> None:
    world = World()
    world.decode("d0")
    interrupted = world.submit(make_spec("interrupted", max_tokens=12))
    world.work(WorkerId("d0"))
    world.kill("d0")
    fresh = world.submit(make_spec("fresh"))
    hurried = world.submit(make_spec("hurried", deadline_s=3.0))
    world.advance(3.0)
    assert isinstance(hurried.error, DeadlineExceeded)
    world.advance(17.1)
    assert isinstance(interrupted.error, WorkerLost)
    assert isinstance(fresh.error, NotReady)
    assert world.conductor.quiet()


def test_those_that_had_a_place_do_not_lose_it_to_a_full_queue() -> None:
    world = World(ConductorConfig(max_queued=3))
    world.decode("d0", max_num_seqs=8)
    clients = [world.submit(make_spec(f"r{i}", max_tokens=12)) for i in range(8)]
    world.work(WorkerId("d0"))
    world.kill("d0")
    assert [client.error for client in clients] == [None] * 8
    world.decode("d0", epoch=2, max_num_seqs=8)
    world.run()
    for client in clients:
        world.assert_served(client)
    world.assert_quiet()


# ---- who is to blame, and what counts


def fail(world: World, worker: str, request: str, code: str, attempt: int = 1) -> None:
    failure = AttemptFailed(
        request=RequestId(request), attempt=Attempt(attempt), code=code, message="scripted", retryable=True
    )
    world.feed(FromWorker(WorkerId(worker), Epoch(1), failure))


@pytest.mark.parametrize("code", ["edge_lost", "peer_silent", "lease_lost", "kv_aborted"])
def test_a_prefill_worker_whose_transfer_broke_ships_again_to_another_decode_worker(code: str) -> None:
    """It has the KV: what is avoided is the other end of the edge."""
    world = World()
    for name in ("p0", "p1"):
        world.prefill(name)
    for name in ("d0", "d1"):
        world.decode(name)
    client = world.submit(make_spec("r", num_prompt=20, max_tokens=12))
    to_stage(world, world.workers[WorkerId("p0")], "d0", "streaming")  # type: ignore[arg-type]
    fail(world, "p0", "r", code)
    served_elsewhere(world, client)
    assert client.summary is not None
    assert (client.summary.prefill_worker, client.summary.decode_worker) == ("p0", "d1")


def test_without_another_decode_worker_a_broken_edge_is_gone_round() -> None:
    world = World()
    prefill = world.prefill("p0")
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=12))
    to_stage(world, prefill, "d0", "streaming")
    fail(world, "p0", "r", "edge_lost")
    served_elsewhere(world, client)
    assert client.summary is not None
    assert client.summary.prefill_worker == "d0"


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_at_most_so_many_attempts_fail(max_attempts: int) -> None:
    world = World(ConductorConfig(max_attempts=max_attempts))
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=30))
    for epoch in range(2, max_attempts + 2):
        assert client.error is None
        world.work(WorkerId("d0"))
        world.kill("d0")
        world.decode("d0", epoch=epoch)
    assert isinstance(client.error, WorkerLost)
    assert client.summary is not None
    assert client.summary.attempts == max_attempts
    world.assert_quiet()


def test_what_a_draining_worker_hands_over_is_no_failure() -> None:
    """A rolling restart under a long request: as many moves as it takes."""
    world = World(ConductorConfig(max_attempts=1))
    client = world.submit(make_spec("r", max_tokens=30))
    assert world.conductor.num_queued == 1
    world.decode("d0")
    for epoch in range(1, 6):
        world.work(WorkerId("d0"))
        world.heartbeat("d0", WorkerState.DRAINING)
        attempt = next(iter(world.workers[WorkerId("d0")].leases))[1]  # type: ignore[union-attr]
        failure = AttemptFailed(
            request=RequestId("r"), attempt=attempt, code="draining", message="scripted", retryable=True
        )
        world.feed(FromWorker(WorkerId("d0"), Epoch(epoch), failure))
        world.kill("d0")
        world.decode("d0", epoch=epoch + 1)
    served_elsewhere(world, client)
    assert client.summary is not None
    assert client.summary.attempts == 6


def test_dropped_messages_are_counted_by_what_made_them_stale() -> None:
    world = World()
    prefill = world.prefill("p0")
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=4))
    to_stage(world, prefill, "d0", "streaming")
    late = Committed(request=RequestId("r"), attempt=Attempt(1), kv_bytes=0, kv_transfer_s=0.0)
    before = world.conductor.stale_messages()
    assert set(before.values()) == {0}
    world.feed(FromWorker(WorkerId("d0"), Epoch(9), late))
    of_an_older = Committed(request=RequestId("r"), attempt=Attempt(7), kv_bytes=0, kv_transfer_s=0.0)
    world.feed(FromWorker(WorkerId("d0"), Epoch(1), of_an_older))
    world.transfer(prefill)
    world.run()
    world.assert_served(client)
    for _ in range(2):
        world.feed(FromWorker(WorkerId("d0"), Epoch(1), late))
    assert world.conductor.stale_messages() == {
        StaleReason.EPOCH: 1,
        StaleReason.ATTEMPT: 1,
        StaleReason.REQUEST: 2,
    }


def test_a_lease_that_nobody_waits_for_is_given_back_at_once() -> None:
    """D refuses a RESERVE, has room when the same one comes again, and grants an attempt that is over."""
    world = World()
    prefill = world.prefill("p0")
    world.decode("d0")
    client = world.submit(make_spec("r", max_tokens=4))
    to_stage(world, prefill, "d0", "streaming")
    grant = Grant(request=RequestId("r"), attempt=Attempt(1), lease=LeaseId(7), ttl_s=2.0, cached_tokens=0)
    assert world.feed(FromWorker(WorkerId("d0"), Epoch(1), grant)) == []  # doubled, of the attempt that runs
    of_another = msgspec.structs.replace(grant, attempt=Attempt(9))
    (back,) = world.feed(FromWorker(WorkerId("d0"), Epoch(1), of_another))
    assert isinstance(back, Send)
    assert isinstance(back.message, Abort)
    assert (back.worker, back.message.request, back.message.attempt) == ("d0", "r", 9)
    world.transfer(prefill)
    world.run()
    world.assert_served(client)
    (back,) = world.feed(FromWorker(WorkerId("d0"), Epoch(1), grant))  # the request is over
    assert isinstance(back, Send)
    assert isinstance(back.message, Abort)
    world.assert_quiet()
