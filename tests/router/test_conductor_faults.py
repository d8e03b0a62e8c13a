"""Workers that die, hang and restart under requests: each row of the table of failures the router decides."""

from __future__ import annotations

import random

import pytest

from cluster.errors import WorkerLost
from cluster.ids import Epoch, RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestState
from cluster.wire.messages import Abort, Heartbeat, Prefill, Reserve, Role, WorkerLoad, WorkerState
from router.conductor_io import FromWorker, WorkerGone, WorkerJoined
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
    world = World()
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
    world = World()
    world.decode("d0", max_num_seqs=1)
    clients = [world.submit(make_spec(f"r{i}", max_tokens=100)) for i in range(3)]
    world.work(WorkerId("d0"))
    world.kill("d0")
    assert all(client.error is not None for client in clients)
    assert world.conductor.quiet()


def test_those_that_only_wait_hear_of_it_too() -> None:
    """Nothing of ours runs on it: it is full of another router's requests."""
    world = World()
    decode = world.decode("d0", max_num_seqs=2)
    full = Heartbeat(state=WorkerState.READY, load=WorkerLoad(running=2, steps=1))
    world.feed(FromWorker(decode.register.worker, Epoch(1), full))
    client = world.submit(make_spec("r"))
    assert world.conductor.num_queued == 1
    world.kill("d0")
    assert client.error is not None
    assert world.conductor.quiet()


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
    world = World()
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
    assert world.conductor.num_stale_messages == 2
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
    view = world.conductor.workers.view()
    assert not view.prefill[0].is_ready
    while not client.has_ended:
        world.work(WorkerId("d0"))
    world.assert_served(client)
    assert any(isinstance(send.message, Abort) and send.worker == "p0" for send in world.sent)
    world.work(WorkerId("p0"))  # it was only slow: the abort reaches it, and it steps again
    world.heartbeat("p0")
    assert world.conductor.workers.view().prefill[0].is_ready
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
        assert world.conductor.workers.view().prefill[0].is_ready


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
    world = World()
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
        for worker in world.conductor.workers.view().prefill + world.conductor.workers.view().decode:
            assert 0 <= worker.num_in_flight <= world.conductor.num_live
            assert worker.backlog_tokens >= 0
    world.run()
    world.assert_quiet()
    for worker in list(world.workers):
        world.heartbeat(worker)
    for view in world.conductor.workers.view().prefill + world.conductor.workers.view().decode:
        assert (view.num_in_flight, view.backlog_tokens) == (0, 0)
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
