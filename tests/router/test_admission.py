"""Requests that cannot be served in time are told at once, with the time after which they can."""

from __future__ import annotations

import msgspec
import pytest

from cluster.errors import Overloaded
from cluster.ids import BlockHash, Epoch, RequestId, WorkerId
from cluster.metrics_placement import REASONS
from cluster.request import RequestSlo, RequestSpec
from cluster.wire.kv_events import KvEvents, KvResync
from cluster.wire.messages import (
    Heartbeat,
    Prefill,
    PriorityClass,
    Reserve,
    SloTargets,
    WorkerLoad,
    WorkerState,
)
from router.conductor_io import FromWorker
from router.config import ConductorConfig
from router.outcome import BACKLOG, QUEUE_TOO_SLOW
from router.policy import RejectReason
from tests.router.conductor_peers import World, make_spec
from tests.router.view_peers import CPU


def say(world: World, name: str, **load: object) -> None:
    """A heartbeat with these gauges."""
    gauges = WorkerLoad(step_model=CPU, **load)  # type: ignore[arg-type]
    world.feed(FromWorker(WorkerId(name), Epoch(1), Heartbeat(state=WorkerState.READY, load=gauges)))


def with_slo(name: str, **slo: object) -> RequestSpec:
    spec = make_spec(name)
    return RequestSpec(
        request=spec.request,
        token_ids=spec.token_ids,
        sampling=spec.sampling,
        slo=RequestSlo(**slo),  # type: ignore[arg-type]
    )


def overloaded(client: object) -> Overloaded:
    error = getattr(client, "error", None)
    assert isinstance(error, Overloaded)
    return error


# ---- backlog


def test_a_hopeless_backlog_refuses_at_once_with_the_time_it_takes() -> None:
    world = World(ConductorConfig(max_backlog_s=30.0))
    world.decode("d0")
    say(world, "d0", on_time_prefill_s=1.9, late_prefill_s=60.0)
    client = world.submit(make_spec("r"))
    error = overloaded(client)
    assert BACKLOG in error.message
    assert error.retry_after_s == pytest.approx(61.9 / 0.99 - 30.0, abs=0.2)
    assert world.sent == []
    assert world.conductor.placement_stats.rejections == {"backlog": 1}
    world.assert_quiet()
    say(world, "d0", on_time_prefill_s=1.0, late_prefill_s=60.0)  # a prompt in time goes first there
    assert world.submit(make_spec("next")).error is None


def test_batch_work_and_long_promises_wait_longer() -> None:
    world = World(ConductorConfig(max_backlog_s=30.0))
    world.decode("d0")
    say(world, "d0", on_time_prefill_s=1.9, late_prefill_s=60.0)
    batch = world.submit(with_slo("batch", priority_class=PriorityClass.BATCH))
    patient = world.submit(with_slo("patient", ttft_s=90.0))
    hasty = world.submit(with_slo("hasty", ttft_s=0.1))
    assert (batch.error, patient.error) == (None, None)
    assert BACKLOG in overloaded(hasty).message


def test_one_that_had_a_place_is_not_turned_away() -> None:
    world = World()
    world.decode("d0")
    client = world.submit(make_spec("r"))
    world.work(WorkerId("d0"))
    world.decode("d1")
    say(world, "d1", on_time_prefill_s=1.9, late_prefill_s=600.0)
    world.kill("d0")
    assert client.error is None
    world.run()
    world.assert_served(client)


# ---- room


def full(world: World, num_waiting: int) -> None:
    """One slot, somebody on it, others in the queue."""
    world.decode("d0", max_num_seqs=1)
    for i in range(num_waiting):
        world.submit(make_spec(f"r{i}", max_tokens=1000))


def eight_leave(world: World) -> None:
    """A place becomes free every second."""
    for i in range(8):
        world.work(WorkerId("d0"))
        world.advance(1.0)
        world.leave(f"r{i}")


def test_a_queue_that_will_not_go_in_time_refuses_at_once() -> None:
    world = World(ConductorConfig(queue_timeout_s=10.0))
    full(world, 18)
    eight_leave(world)
    assert world.conductor.num_queued == 9
    assert world.submit(make_spec("fits")).error is None  # ten seconds
    error = overloaded(world.submit(make_spec("late")))
    assert QUEUE_TOO_SLOW in error.message
    assert error.retry_after_s == pytest.approx(1.0)
    assert world.conductor.placement_stats.rejections == {"queue_too_slow": 1}


def test_nobody_is_told_to_stay_away_longer_than_any_of_those_who_wait_will_be_there() -> None:
    """Ninety wait, eight went in eight seconds; but none of the ninety is there in ten more."""
    world = World(ConductorConfig(queue_timeout_s=10.0))
    full(world, 99)
    eight_leave(world)
    error = overloaded(world.submit(make_spec("late")))
    assert QUEUE_TOO_SLOW in error.message
    assert error.retry_after_s == 10.0
    world.advance(2.5)
    assert world.conductor.num_queued == 0


def test_who_goes_on_with_a_reply_is_not_turned_away_for_the_sake_of_others() -> None:
    """Neither for a backlog nor for the queue: a search asks for its parts while it runs."""
    world = World(ConductorConfig(max_backlog_s=30.0))
    world.decode("d0")
    say(world, "d0", on_time_prefill_s=1.9, late_prefill_s=60.0)
    overloaded(world.submit(make_spec("new")))
    part = world.submit(msgspec.structs.replace(make_spec("part"), goes_on=True))
    world.run()
    world.assert_served(part)

    world = World(ConductorConfig(max_queued=2, queue_timeout_s=10.0))
    full(world, 3)
    part = world.submit(msgspec.structs.replace(make_spec("part"), goes_on=True))
    overloaded(world.submit(make_spec("new")))
    assert not part.has_ended
    world.advance(11.0)
    overloaded(part)


def test_rejections_are_counted_by_reason() -> None:
    world = World(ConductorConfig(max_queued=1, recovery_wait_s=0))
    world.submit(make_spec("nobody"))
    world.decode("d0", max_num_seqs=1, num_blocks=10)
    world.submit(make_spec("large", num_prompt=50))
    for name in ("a", "b", "c"):
        world.submit(make_spec(name, max_tokens=20))
    world.work(WorkerId("d0"))
    world.advance(31.0)
    assert world.conductor.placement_stats.rejections == {
        "no_worker": 1,
        "too_large": 1,
        "queue_full": 1,
        "busy": 1,
    }


def test_all_reasons_have_their_series() -> None:
    assert {reason.value for reason in RejectReason} == set(REASONS)


# ---- what workers are told


def slo_told(world: World, kind: type[Reserve] | type[Prefill]) -> SloTargets:
    message = next(send.message for send in reversed(world.sent) if isinstance(send.message, kind))
    assert isinstance(message, Reserve | Prefill)
    assert message.slo is not None
    return message.slo


def test_workers_are_told_what_is_promised_from_now_on() -> None:
    world = World()
    world.prefill("p0")
    world.decode("d0")
    asked = with_slo("r", ttft_s=1.5, gap_s=0.25, priority_class=PriorityClass.BATCH)
    world.submit(asked)
    assert slo_told(world, Reserve) == SloTargets(
        ttft_deadline_in_s=1.5, tpot_s=0.1, gap_s=0.25, priority_class=PriorityClass.BATCH
    )
    world.advance(0.5)
    world.work(WorkerId("d0"))
    assert slo_told(world, Prefill).ttft_deadline_in_s == pytest.approx(1.0)
    world.submit(make_spec("plain"))
    assert slo_told(world, Reserve) == SloTargets(ttft_deadline_in_s=2.0, tpot_s=0.1)


def test_a_later_attempt_goes_on_with_the_clients_clock() -> None:
    world = World()
    world.decode("d0")
    client = world.submit(with_slo("r", ttft_s=1.0, tpot_s=0.5))
    world.advance(0.25)
    for _ in range(3):
        world.work(WorkerId("d0"))
    assert len(client.outputs) == 3
    world.advance(0.1)
    world.decode("d1")
    world.kill("d0")
    # The first token came at 0.25 s, so the fourth is due 3 x 0.5 s later.
    assert slo_told(world, Reserve).ttft_deadline_in_s == pytest.approx(0.25 + 1.5 - 0.35)


# ---- counts and predictions


def test_placements_and_predictions_are_counted() -> None:
    world = World()
    world.prefill("p0")
    world.decode("d0")
    first = world.submit(make_spec("r"))
    world.run()
    stats = world.conductor.placement_stats
    assert stats.placements == {"remote": 1}
    assert stats.num_predictions == 1
    assert first.summary is not None
    assert stats.measured_s == pytest.approx(first.summary.ttft_s)
    assert stats.error_s == pytest.approx(abs(stats.measured_s - stats.predicted_s))
    world.kill("p0")
    world.submit(make_spec("local"))
    assert stats.placements == {"remote": 1, "local": 1}


# ---- cache reports through the conductor


def test_a_lost_cache_report_is_asked_for_again() -> None:
    world = World()
    world.decode("d0")

    def report(sequence: int, *, begins: bool = False) -> list[object]:
        events = KvEvents(sequence=sequence, begins=begins, stored=[BlockHash(b"x")], removed=[])
        before = len(world.sent)
        world.feed(FromWorker(WorkerId("d0"), Epoch(1), events))
        return [send.message for send in world.sent[before:]]

    assert report(0, begins=True) == []
    assert report(1) == []
    assert report(3) == [KvResync()]
    assert report(4) == []
    assert report(5, begins=True) == []
    assert report(6) == []


def test_the_next_turn_goes_where_its_kv_is() -> None:
    world = World()
    for name in ("d0", "d1"):
        world.decode(name)
    spec = make_spec("r", num_prompt=40)
    world.submit(spec)
    hashes = list(world.conductor._requests[spec.request].hashes)
    world.run()
    for name, stored in (("d0", []), ("d1", hashes)):
        events = KvEvents(sequence=0, begins=True, stored=stored, removed=[])
        world.feed(FromWorker(WorkerId(name), Epoch(1), events))
        for _ in range(2):
            world.heartbeat(name)
    following = RequestSpec(
        request=RequestId("next"), token_ids=(*spec.token_ids, 1, 2, 3), sampling=spec.sampling
    )
    world.submit(following)
    assert world.sent[-1].worker == "d1"
