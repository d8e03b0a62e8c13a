"""Prefill workers hear who is there: those that want to, once per heartbeat, and never from stale words.

A state machine lets workers of both roles come, come back and go, and listeners beat when they like: whoever
has just beaten knows exactly who is here, and was told no more than had changed.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from cluster.ids import Epoch, WorkerId
from cluster.wire.messages import DecodePartner, Heartbeat, Partners, Role, WorkerLoad, WorkerState
from prefill_worker.warming import Pools
from router.conductor import Conductor
from router.conductor_io import Action, FromWorker, Send, WorkerGone, WorkerJoined
from router.config import ConductorConfig
from router.partner_news import FEW_GONE, PartnerNews
from tests.router.conductor_peers import make_register

P0, P1, D0 = WorkerId("prefill-0"), WorkerId("prefill-1"), WorkerId("decode-0")


def joined(worker: str, role: Role, *, epoch: int = 1, warm_edges: int = 0) -> WorkerJoined:
    register = make_register(worker, role, epoch)
    return WorkerJoined(msgspec.structs.replace(register, warm_edges=warm_edges))


def beat(conductor: Conductor, worker: WorkerId, epoch: int = 1) -> list[Action]:
    message = Heartbeat(state=WorkerState.READY, load=WorkerLoad())
    return conductor.handle(FromWorker(worker, Epoch(epoch), message), 1.0)


def everybody(prefill: list[WorkerId], decode: list[DecodePartner]) -> Partners:
    return Partners(begins=True, prefill=prefill, decode=decode, gone=[])


def test_whoever_wants_to_is_told_with_its_next_heartbeat_and_once() -> None:
    conductor = Conductor(ConductorConfig())
    for event in (
        joined("prefill-0", Role.PREFILL, warm_edges=16),
        joined("prefill-1", Role.PREFILL),
        joined("decode-0", Role.DECODE),
    ):
        assert conductor.handle(event, 0.0) == []
    decode = [DecodePartner(D0, Epoch(1), "unix:/scripted")]
    assert beat(conductor, P0) == [Send(P0, everybody([P0, P1], decode))]
    assert beat(conductor, P0) == []
    assert beat(conductor, P1) == []  # it did not ask
    assert beat(conductor, D0) == []


def test_every_change_is_told_a_successor_and_a_loss_too() -> None:
    conductor = Conductor(ConductorConfig())
    conductor.handle(joined("prefill-0", Role.PREFILL, warm_edges=1), 0.0)
    assert beat(conductor, P0) == [Send(P0, everybody([P0], []))]
    conductor.handle(joined("decode-0", Role.DECODE), 0.0)
    conductor.handle(joined("decode-0", Role.DECODE, epoch=2), 0.0)  # in its place
    decode = [DecodePartner(D0, Epoch(2), "unix:/scripted")]
    assert beat(conductor, P0) == [Send(P0, Partners(begins=False, prefill=[], decode=decode, gone=[]))]
    conductor.handle(WorkerGone(D0, Epoch(1), "late"), 0.0)
    assert beat(conductor, P0) == []
    conductor.handle(WorkerGone(D0, Epoch(2), "its stream broke"), 0.0)
    assert beat(conductor, P0) == [Send(P0, Partners(begins=False, prefill=[], decode=[], gone=[D0]))]
    conductor.handle(joined("prefill-0", Role.PREFILL, epoch=2), 0.0)  # and asks for nothing any more
    assert beat(conductor, P0, epoch=2) == []


def entered(news: PartnerNews, worker: str, role: Role, *, warm_edges: int = 0) -> None:
    news.joined(joined(worker, role, warm_edges=warm_edges).register)


def size(told: Partners | None) -> int:
    return 0 if told is None else len(told.prefill) + len(told.decode) + len(told.gone)


def test_what_a_join_or_a_leave_costs_does_not_grow_with_the_fleet() -> None:
    news = PartnerNews()
    listeners = [WorkerId(f"prefill-{index}") for index in range(50)]
    for name in listeners:
        entered(news, name, Role.PREFILL, warm_edges=1)
    assert [size(news.take(name)) for name in listeners] == [50] * 50
    for index in range(50):
        entered(news, f"decode-{index}", Role.DECODE)
        assert [size(news.take(name)) for name in listeners] == [1] * 50
    news.left(WorkerId("decode-7"))
    assert [size(news.take(name)) for name in listeners] == [1] * 50
    entered(news, "prefill-3", Role.PREFILL, warm_edges=1)
    assert [size(news.take(name)) for name in listeners] == [1] * 3 + [99] + [1] * 46


def test_those_gone_are_forgotten_and_who_had_not_heard_is_told_everybody() -> None:
    news = PartnerNews()
    for name in (P0, P1):
        entered(news, name, Role.PREFILL, warm_edges=1)
    assert news.take(P0) == news.take(P1) == everybody([P0, P1], [])
    for index in range(10 * FEW_GONE):
        entered(news, f"decode-{index}", Role.DECODE)
        news.left(WorkerId(f"decode-{index}"))
        told = news.take(P0)
        assert told in (
            Partners(begins=False, prefill=[], decode=[], gone=[WorkerId(f"decode-{index}")]),
            everybody([P0, P1], []),  # when all were forgotten just now
        )
        assert len(news._latest) <= FEW_GONE + 3
    assert news.take(P1) == everybody([P0, P1], [])


class Telling:
    """A router's news and its listeners. `known`: what each has put together on its present stream."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.news = PartnerNews()
        self.epoch = 0
        self.here: dict[WorkerId, tuple[Role, Epoch]] = {}
        self.known: dict[WorkerId, Pools] = {}
        self.changed: dict[WorkerId, set[WorkerId]] = {}  # since a listener heard last

    def step(self) -> None:
        name = f"worker-{self.rng.randrange(6)}"
        what = self.rng.random()
        if what < 0.25:
            self.join(name, self.rng.choice((Role.PREFILL, Role.DECODE)), listens=self.rng.random() < 0.7)
        elif what < 0.4:
            self.leave(name)
        elif what < 0.42:
            for _ in range(self.rng.randrange(2 * FEW_GONE)):
                passing = f"passing-{self.epoch}"
                self.join(passing, Role.DECODE, listens=False)
                self.leave(passing)
        else:
            self.beat(WorkerId(name))

    def join(self, name: str, role: Role, *, listens: bool) -> None:
        self.leave(name)  # as the conductor has it
        worker, self.epoch = WorkerId(name), self.epoch + 1
        event = joined(name, role, epoch=self.epoch, warm_edges=int(listens))
        self.news.joined(event.register)
        self.here[worker] = role, Epoch(self.epoch)
        self.has_changed(worker)
        if role is Role.PREFILL and listens:
            self.known[worker], self.changed[worker] = Pools(), set()

    def leave(self, name: str) -> None:
        worker = WorkerId(name)
        if self.here.pop(worker, None) is not None:
            self.news.left(worker)
            self.known.pop(worker, None)
            self.changed.pop(worker, None)
            self.has_changed(worker)

    def has_changed(self, worker: WorkerId) -> None:
        for names in self.changed.values():
            names.add(worker)

    def beat(self, worker: WorkerId) -> None:
        told = self.news.take(worker)
        if worker not in self.known:
            assert told is None
            return
        pools, changed = self.known[worker], self.changed[worker]
        if told is not None:
            pools.hear(told)
            assert told.begins or size(told) == len(changed)
        changed.clear()
        assert pools.prefill == {one for one, (role, _) in self.here.items() if role is Role.PREFILL}
        decode = {one: epoch for one, (role, epoch) in self.here.items() if role is Role.DECODE}
        assert {one: partner.epoch for one, partner in pools.decode.items()} == decode
        assert self.news.take(worker) is None  # nothing twice


@pytest.mark.parametrize("seed", range(5))
def test_who_has_just_heard_knows_who_is_here(seed: int) -> None:
    telling = Telling(random.Random(seed))
    for _ in range(600):
        telling.step()
        assert len(telling.news._latest) <= len(telling.here) + max(FEW_GONE, len(telling.here))
