"""Virtual time and streams: order, delay, holding back, and what is lost when a stream breaks."""

from __future__ import annotations

import random
from typing import Any

from bench.simulator.events import EventQueue
from bench.simulator.network import Endpoint, Network
from bench.simulator.process import Process
from cluster.ids import Attempt, Epoch, RequestId
from cluster.wire.kv_messages import KvClosed
from cluster.wire.messages import Finish, Heartbeat, WorkerLoad, WorkerState


class Plain(Process):
    """A process without deadlines."""

    def next_deadline(self) -> float | None:
        return None

    def tick(self) -> None:
        raise AssertionError("nothing is due")


class Timed(Plain):
    """Ticks once, at `due` of its own clock."""

    due: float | None = None
    ticked_at: float | None = None

    def next_deadline(self) -> float | None:
        return self.due

    def tick(self) -> None:
        self.due, self.ticked_at = None, self.queue.now


class Reader:
    """Takes what arrives at one end."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.num_ends = 0

    def on_message(self, message: Any) -> None:
        self.messages.append(message)

    def on_closed(self) -> None:
        self.num_ends += 1


class World:
    """Two processes and a stream between them."""

    def __init__(self, seed: int = 1) -> None:
        self.queue = EventQueue()
        self.network = Network(self.queue, random.Random(seed), 0.01, lambda end, what, message: None)
        self.worker, self.router = self.process("worker"), self.process("router")
        self.near, self.far = self.network.control_stream(self.worker, self.router)
        self.near.handler, self.far.handler = self.reads_near, self.reads_far = Reader(), Reader()

    def process(self, name: str) -> Plain:
        return Plain(self.queue, random.Random(2), name, Epoch(1))

    def send_to_worker(self, count: int, first: int = 0) -> list[Finish]:
        sent = [
            Finish(request=RequestId(f"r{number}"), attempt=Attempt(1))
            for number in range(first, first + count)
        ]
        for message in sent:
            self.far.post(message)
        return sent


def test_events_come_in_order_of_time_then_of_scheduling() -> None:
    queue, seen = EventQueue(), list[str]()
    for name, at in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        queue.at(at, seen.append, name)
    queue.run(5.0)
    assert seen == ["a", "b", "c"]
    assert queue.now == 5.0


def test_the_alarm_comes_before_the_event_it_was_set_for() -> None:
    queue, seen = EventQueue(), list[str]()
    for name in "abc":
        queue.after(1.0, seen.append, name)
    queue.alarm(1, lambda: seen.append("!"))
    queue.run(5.0)
    assert seen == ["a", "!", "b", "c"]


def test_a_stream_keeps_its_order_and_a_clean_end_loses_nothing() -> None:
    world = World()
    sent = world.send_to_worker(50)
    world.far.close()
    world.queue.run(10.0)
    assert world.reads_near.messages == sent
    assert world.reads_near.num_ends == 1
    assert world.reads_far.num_ends == 0


def test_two_streams_overtake_each_other() -> None:
    world = World()
    order: list[str] = []

    class Tagged(Reader):
        def __init__(self, tag: str) -> None:
            super().__init__()
            self.tag = tag

        def on_message(self, message: Any) -> None:
            order.append(self.tag)

    ends: list[Endpoint] = []
    for tag in "ab":
        near, far = world.network.control_stream(world.worker, world.router)
        near.handler, far.handler = Tagged(tag), Reader()
        ends.append(far)
    for _ in range(20):
        for far in ends:
            far.post(Finish(request=RequestId("r"), attempt=Attempt(1)))
    world.queue.run(10.0)
    assert sorted(order) == ["a"] * 20 + ["b"] * 20
    assert order != ["a", "b"] * 20


def test_a_cut_stream_delivers_a_prefix_and_ends_on_both_sides() -> None:
    lengths = set()
    for seed in range(20):
        world = World(seed)
        sent = world.send_to_worker(10)
        world.near.cut()
        world.send_to_worker(3, first=10)
        world.queue.run(10.0)
        got = world.reads_near.messages
        assert got == sent[: len(got)]
        assert (world.reads_near.num_ends, world.reads_far.num_ends) == (1, 1)
        lengths.add(len(got))
    assert len(lengths) > 3


def test_a_stalled_stream_holds_everything_and_goes_on_in_order() -> None:
    world = World()
    world.near.stall()
    sent = world.send_to_worker(10)
    world.queue.run(1.0)
    assert world.reads_near.messages == []
    world.near.heal()
    sent += world.send_to_worker(5, first=10)
    world.queue.run(2.0)
    assert world.reads_near.messages == sent


def test_a_stopped_process_reads_and_sends_later_and_nothing_is_lost() -> None:
    world = World()
    beats = [Heartbeat(state=WorkerState.READY, load=WorkerLoad(steps=number)) for number in range(10)]
    for beat in beats:
        world.near.post(beat)
    world.worker.stop()
    sent = world.send_to_worker(10)
    world.queue.run(1.0)
    assert world.reads_near.messages == []
    assert len(world.reads_far.messages) < 10  # the rest had not left the process
    assert world.reads_far.messages == beats[: len(world.reads_far.messages)]
    world.worker.resume()
    world.queue.run(2.0)
    assert world.reads_near.messages == sent
    assert world.reads_far.messages == beats


def test_a_dead_process_does_nothing_any_more() -> None:
    world = World()
    called: list[int] = []
    world.worker.later(0.5, called.append, 1)
    world.send_to_worker(1)
    world.worker.die()
    world.queue.run(1.0)
    assert called == []
    assert world.reads_near.messages == []
    assert world.reads_far.num_ends == 1


def test_duplicates_are_copies_of_what_was_sent() -> None:
    world = World()
    world.near.duplicate(4)
    sent = world.send_to_worker(10)
    world.queue.run(1.0)
    got = world.reads_near.messages
    assert len(got) > len(sent)
    firsts = [message for index, message in enumerate(got) if message not in got[:index]]
    assert firsts == sent


def test_kv_messages_pass_through_the_live_codec() -> None:
    world = World()
    near, far = world.network.kv_stream(world.worker, world.router)
    near.handler, far.handler = Reader(), (reads := Reader())
    message = KvClosed(request=RequestId("r"), attempt=Attempt(3))
    near.post(message)
    world.queue.run(1.0)
    (got,) = reads.messages
    assert got == message
    assert got is not message


def test_a_timer_is_never_early_and_a_clock_jump_makes_it_due_at_once() -> None:
    queue = EventQueue()
    process = Timed(queue, random.Random(3), "timed", Epoch(1))
    process.due = process.now() + 10.0
    process.arm()
    queue.run(9.9)
    assert process.ticked_at is None
    queue.run(11.0)
    assert process.ticked_at is not None
    assert 10.0 <= process.ticked_at < 10.1
    process.due, process.ticked_at = process.now() + 100.0, None
    process.jump(200.0)
    queue.run(11.1)
    assert process.ticked_at is not None
