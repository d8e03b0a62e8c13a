"""Prefill workers hear who is there: those that want to, once per heartbeat, and never from stale words."""

from __future__ import annotations

import msgspec

from cluster.ids import Epoch, WorkerId
from cluster.wire.messages import DecodePartner, Heartbeat, Partners, Role, WorkerLoad, WorkerState
from router.conductor import Conductor
from router.conductor_io import Action, FromWorker, Send, WorkerGone, WorkerJoined
from router.config import ConductorConfig
from tests.router.conductor_peers import make_register

P0, P1, D0 = WorkerId("prefill-0"), WorkerId("prefill-1"), WorkerId("decode-0")


def joined(worker: str, role: Role, *, epoch: int = 1, warm_edges: int = 0) -> WorkerJoined:
    register = make_register(worker, role, epoch)
    return WorkerJoined(msgspec.structs.replace(register, warm_edges=warm_edges))


def beat(conductor: Conductor, worker: WorkerId, epoch: int = 1) -> list[Action]:
    message = Heartbeat(state=WorkerState.READY, load=WorkerLoad())
    return conductor.handle(FromWorker(worker, Epoch(epoch), message), 1.0)


def test_whoever_wants_to_is_told_with_its_next_heartbeat_and_once() -> None:
    conductor = Conductor(ConductorConfig())
    for event in (
        joined("prefill-0", Role.PREFILL, warm_edges=16),
        joined("prefill-1", Role.PREFILL),
        joined("decode-0", Role.DECODE),
    ):
        assert conductor.handle(event, 0.0) == []
    decode = [DecodePartner(D0, Epoch(1), "unix:/scripted")]
    assert beat(conductor, P0) == [Send(P0, Partners(prefill=[P0, P1], decode=decode))]
    assert beat(conductor, P0) == []
    assert beat(conductor, P1) == []  # it did not ask
    assert beat(conductor, D0) == []


def test_every_change_is_told_a_successor_and_a_loss_too() -> None:
    conductor = Conductor(ConductorConfig())
    conductor.handle(joined("prefill-0", Role.PREFILL, warm_edges=1), 0.0)
    assert beat(conductor, P0) == [Send(P0, Partners(prefill=[P0], decode=[]))]
    conductor.handle(joined("decode-0", Role.DECODE), 0.0)
    conductor.handle(joined("decode-0", Role.DECODE, epoch=2), 0.0)  # in its place
    decode = [DecodePartner(D0, Epoch(2), "unix:/scripted")]
    assert beat(conductor, P0) == [Send(P0, Partners(prefill=[P0], decode=decode))]
    conductor.handle(WorkerGone(D0, Epoch(1), "late"), 0.0)
    assert beat(conductor, P0) == []
    conductor.handle(WorkerGone(D0, Epoch(2), "its stream broke"), 0.0)
    assert beat(conductor, P0) == [Send(P0, Partners(prefill=[P0], decode=[]))]
    conductor.handle(joined("prefill-0", Role.PREFILL, epoch=2), 0.0)  # and asks for nothing any more
    assert beat(conductor, P0, epoch=2) == []
