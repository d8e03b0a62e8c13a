"""Any interleaving of messages, clients and faults: all requests end, all tokens are right and come once."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.ids import Attempt, Epoch, RequestId, WorkerId
from cluster.request import LifecycleEvent
from cluster.sampling import TokenOutput
from cluster.wire.kv_events import WorkerSays
from cluster.wire.messages import Role, TokenRow, Tokens, WorkerState
from router.conductor_io import FromWorker, Tick
from router.config import ConductorConfig
from tests.router.conductor_peers import (
    ScriptedDecode,
    ScriptedPrefill,
    World,
    make_register,
    make_spec,
    scripted_output,
)

ENDINGS = {LifecycleEvent.FINISHED, LifecycleEvent.ABORTED, LifecycleEvent.FAILED}


class Chaos:
    """Moves one thing of a world at a time, picked at random."""

    def __init__(self, seed: int, num_prefill: int, num_decode: int) -> None:
        self.rng = random.Random(seed)
        config = ConductorConfig(
            max_queued=20,
            queue_timeout_s=5.0,
            prefill_timeout_s=8.0,
            commit_timeout_s=4.0,
            decode_silence_s=6.0,
            stall_timeout_s=5.0,
            max_overtake_s=1.0,
        )
        self.world = World(config)
        self.dead: list[tuple[str, Role, int]] = []
        self.old: list[tuple[WorkerId, Epoch, WorkerSays]] = []  # what may come again
        self.num_submitted = 0
        for i in range(num_prefill):
            self.start(f"p{i}", Role.PREFILL, 1)
        for i in range(num_decode):
            self.start(f"d{i}", Role.DECODE, 1)

    def start(self, name: str, role: Role, epoch: int) -> None:
        num_blocks = self.rng.choice([12, 30, 1000])
        register = make_register(name, role, epoch, num_blocks, max_num_seqs=self.rng.choice([1, 3, 8]))
        self.world.join(register)

    def move(self) -> None:
        moves = (
            [self.submit] * 4
            + [self.read_one] * 40
            + [self.receive_one] * 25
            + [self.step] * 25
            + [self.transfer] * 15
            + [self.heartbeat] * 8
            + [self.wait] * 6
            + [
                self.client_leaves,
                self.client_finishes,
                self.repeat_old,
                self.kill,
                self.restart,
                self.garble,
            ]
        )
        self.rng.choice(moves)()

    def submit(self) -> None:
        self.num_submitted += 1
        rng = self.rng
        spec = make_spec(
            f"r{self.num_submitted}",
            num_prompt=rng.randrange(1, 30),
            max_tokens=rng.randrange(1, 14),
            eos=rng.random() < 0.5,
            deadline_s=rng.choice([None, None, None, 3.0]),
        )
        self.world.submit(spec)

    def worker(self) -> WorkerId | None:
        return self.rng.choice(list(self.world.workers)) if self.world.workers else None

    def read_one(self) -> None:
        worker = self.worker()
        if worker is not None and self.world.workers[worker].out:
            peer = self.world.workers[worker]
            message = peer.out.popleft()
            self.old = [*self.old[-30:], (worker, peer.register.epoch, message)]
            self.world.feed(FromWorker(worker, peer.register.epoch, message))

    def receive_one(self) -> None:
        worker = self.worker()
        if worker is not None and self.world.inbox[worker]:
            self.world.workers[worker].receive(self.world.inbox[worker].popleft(), self.world.now)

    def step(self) -> None:
        worker = self.worker()
        if worker is not None:
            self.world.workers[worker].step(self.world.now)

    def transfer(self) -> None:
        prefills = [peer for peer in self.world.workers.values() if isinstance(peer, ScriptedPrefill)]
        ready = [peer for peer in prefills if peer.to_decode]
        if ready:
            self.world.transfer(self.rng.choice(ready))

    def heartbeat(self) -> None:
        worker = self.worker()
        if worker is not None:
            state = WorkerState.DRAINING if self.rng.random() < 0.05 else WorkerState.READY
            self.world.heartbeat(worker, state)

    def wait(self) -> None:
        self.world.now += self.rng.choice([0.0, 0.01, 0.1, 0.7])
        due = self.world.conductor.next_deadline()
        if due is not None and due <= self.world.now:
            self.world.feed(Tick())

    def live(self) -> list[RequestId]:
        return [request for request, client in self.world.clients.items() if not client.has_ended]

    def client_leaves(self) -> None:
        if live := self.live():
            self.world.leave(self.rng.choice(live))

    def client_finishes(self) -> None:
        if live := [request for request in self.live() if self.world.clients[request].outputs]:
            self.world.finish(self.rng.choice(live))

    def repeat_old(self) -> None:
        if self.old:
            worker, epoch, message = self.rng.choice(self.old)
            self.world.feed(FromWorker(worker, epoch, message))

    def kill(self) -> None:
        if self.rng.random() < 0.3 and (worker := self.worker()) is not None:
            if self.rng.random() < 0.5:
                self.world.workers[worker].out.clear()  # what it had sent is lost
            register = self.world.kill(worker)
            self.dead.append((worker, register.role, register.epoch))

    def restart(self) -> None:
        if self.dead:
            name, role, epoch = self.dead.pop(self.rng.randrange(len(self.dead)))
            self.start(name, role, epoch + 1)
        elif self.rng.random() < 0.2 and (worker := self.worker()) is not None:
            register = self.world.workers[worker].register  # replaced before its end was seen
            self.start(worker, register.role, register.epoch + 1)

    def garble(self) -> None:
        """A worker sends rows for requests it does not have, or skips a token."""
        live, worker = self.live(), self.worker()
        if live and worker is not None:
            request = self.rng.choice(live)
            epoch = self.world.workers[worker].register.epoch
            row = TokenRow(request, Attempt(self.rng.randrange(1, 4)), 50, [TokenOutput(1)])
            self.world.feed(FromWorker(worker, epoch, Tokens(rows=[row])))

    def calm_down(self) -> None:
        """No more faults: everything under way must come to an end."""
        while self.dead:
            name, role, epoch = self.dead.pop()
            self.start(name, role, epoch + 1)
        for worker in list(self.world.workers):
            self.world.heartbeat(worker)
        self.world.run(max_s=120.0, step_s=0.25)


def check(chaos: Chaos) -> None:
    world = chaos.world
    world.assert_quiet()
    assert world.conductor.next_deadline() is None
    for client in world.clients.values():
        expected, reason = scripted_output(client.spec)
        assert len(ENDINGS.intersection(client.events)) == 1
        assert client.events[0] is LifecycleEvent.ARRIVED
        assert client.outputs == expected[: len(client.outputs)]
        if client.finish is not None:
            assert client.outputs == expected
            assert client.finish is reason
        else:
            assert client.error is not None or client.gone
        assert client.summary is not None
        assert 1 <= client.summary.attempts <= 3
    for peer in world.workers.values():
        assert peer.num_held == 0
        if isinstance(peer, ScriptedDecode):
            assert peer.max_held <= peer.register.max_num_seqs


@given(seed=st.integers(0, 2**32), num_prefill=st.integers(0, 2), num_decode=st.integers(1, 3))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_interleaving(seed: int, num_prefill: int, num_decode: int) -> None:
    chaos = Chaos(seed, num_prefill, num_decode)
    for _ in range(400):
        chaos.move()
    chaos.calm_down()
    check(chaos)


@pytest.mark.parametrize("seed", range(4))
def test_long_disorder(seed: int) -> None:
    chaos = Chaos(seed, 2, 3)
    for _ in range(5000):
        chaos.move()
    chaos.calm_down()
    check(chaos)
    finished = [client for client in chaos.world.clients.values() if client.finish is not None]
    retried = [client for client in finished if LifecycleEvent.RETRIED in client.events]
    assert len(finished) > 30  # the disorder is not so great that nothing is served
    assert len(retried) > 5
