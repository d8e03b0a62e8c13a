"""The life of one request through the conductor, move by move."""

from __future__ import annotations

import msgspec
import pytest

from cluster.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotReady,
    Overloaded,
    WorkerLost,
)
from cluster.ids import Attempt, Epoch, RequestId, WorkerId
from cluster.request import (
    TRANSITIONS,
    IllegalTransition,
    LifecycleEvent,
    RequestSpec,
    RequestState,
    transition,
)
from cluster.sampling import FinishReason, TokenOutput
from cluster.wire.messages import (
    Abort,
    AttemptFailed,
    Finish,
    Prefill,
    RenewLeases,
    Reserve,
    Role,
    TokenRow,
    Tokens,
    WorkerState,
)
from router.conductor_io import FromWorker, Send
from router.config import ConductorConfig
from tests.router.conductor_peers import (
    EOS,
    Client,
    ScriptedDecode,
    ScriptedPrefill,
    World,
    make_register,
    make_spec,
    scripted_output,
)

S = RequestState
E = LifecycleEvent


def pair(config: ConductorConfig | None = None) -> tuple[World, ScriptedPrefill, ScriptedDecode]:
    world = World(config)
    return world, world.prefill("p0"), world.decode("d0")


def state(world: World, client: Client) -> RequestState | None:
    return world.conductor.state(client.spec.request)


def sent_to(world: World, worker: str, kind: type) -> list[object]:
    return [send.message for send in world.sent if send.worker == worker and isinstance(send.message, kind)]


def spec_ending_at(num_tokens: int) -> RequestSpec:
    """A request whose output ends with EOS after exactly this many tokens."""
    for number in range(10_000):
        spec = make_spec(f"eos-{number}", max_tokens=50, eos=True)
        outputs, _ = scripted_output(spec)
        if len(outputs) == num_tokens and outputs[-1] == EOS:
            return spec
    raise AssertionError("no such request")


def start_decoding(world: World, client: Client) -> None:
    for worker in ("d0", "p0"):
        if worker in world.workers:
            world.work(WorkerId(worker))
    world.read(WorkerId("d0"))
    assert state(world, client) is S.DECODING


# ---- the table of states


@pytest.mark.parametrize("current", list(S))
@pytest.mark.parametrize("target", list(S))
def test_transition_table(current: RequestState, target: RequestState) -> None:
    if target in TRANSITIONS[current]:
        assert transition(current, target) is target
    else:
        with pytest.raises(IllegalTransition, match=f"{current.name} -> {target.name}"):
            transition(current, target)


def test_every_state_can_be_left_but_the_last() -> None:
    for current in set(S) - {S.DONE, S.ABORTED}:
        assert S.ABORTED in TRANSITIONS[current]
    assert not TRANSITIONS[S.DONE]
    assert not TRANSITIONS[S.ABORTED]
    assert TRANSITIONS[S.RETRY] == {S.QUEUED, S.ABORTED}


# ---- undisturbed


def test_disaggregated_life() -> None:
    world, prefill, decode = pair()
    client = world.submit(make_spec("r", max_tokens=5))
    assert state(world, client) is S.QUEUED
    world.now = 1.0
    world.work(WorkerId("d0"))  # RESERVE → Grant
    assert state(world, client) is S.PREFILLING
    world.now = 2.0
    prefill.receive(world.inbox[WorkerId("p0")].popleft(), world.now)
    prefill.step(world.now)
    world.read(WorkerId("p0"))  # FirstToken, before any KV moved
    assert state(world, client) is S.STREAMING_KV
    assert len(client.outputs) == 1
    world.now = 2.5
    world.transfer(prefill)
    world.read(WorkerId("d0"))
    assert state(world, client) is S.DECODING
    world.now = 4.5
    world.run()
    world.assert_served(client)
    world.assert_quiet()
    assert client.events == [
        E.ARRIVED,
        E.PLACED,
        E.GRANTED,
        E.PREFILL_SENT,
        E.FIRST_TOKEN,
        E.DECODE_STARTED,
        E.LAST_TOKEN,
        E.FINISHED,
    ]
    summary = client.summary
    assert summary is not None
    assert (summary.prefill_worker, summary.decode_worker, summary.attempts) == ("p0", "d0", 1)
    assert summary.ttft_s == 2.0
    assert summary.queue_s == 1.25  # sent after 1 s, and 0.25 s in the worker's queue
    assert summary.prefill_s == 0.5
    assert summary.kv_transfer_s == 0.5
    assert summary.decode_s > 1.9
    started = next(life for life in world.lifecycle if life.event is E.DECODE_STARTED)
    assert (started.kv_bytes, started.kv_transfer_s) == (64, 0.125)
    assert decode.num_expired == 0


def test_b089_ids_and_lease_are_passed_verbatim() -> None:
    world, _, decode = pair()
    client = world.submit(make_spec("r"))
    world.work(WorkerId("d0"))
    (reserve,) = sent_to(world, "d0", Reserve)
    (prefill,) = sent_to(world, "p0", Prefill)
    assert isinstance(reserve, Reserve)
    assert isinstance(prefill, Prefill)
    (lease,) = decode.leases.values()
    assert (prefill.request, prefill.attempt) == (reserve.request, reserve.attempt)
    assert prefill.lease == lease.lease
    assert prefill.token_ids == reserve.token_ids == list(client.spec.token_ids)
    assert (prefill.decode_worker, prefill.decode_epoch) == ("d0", 1)
    assert prefill.kv_address == "unix:/scripted"
    assert not reserve.local


def test_local_prefill_without_prefill_workers() -> None:
    world = World()
    world.decode("d0")
    client = world.submit(make_spec("r"))
    world.run()
    world.assert_served(client)
    world.assert_quiet()
    summary = client.summary
    assert summary is not None
    assert (summary.prefill_worker, summary.decode_worker, summary.kv_transfer_s) == ("d0", "d0", 0.0)
    assert client.events == [
        E.ARRIVED,
        E.PLACED,
        E.GRANTED,
        E.PREFILL_SENT,
        E.FIRST_TOKEN,
        E.DECODE_STARTED,
        E.LAST_TOKEN,
        E.FINISHED,
    ]


# ---- the first token ends it


@pytest.mark.parametrize("local", [False, True])
def test_b070_b072_first_token_ends_the_request(local: bool) -> None:
    world = World()
    if not local:
        world.prefill("p0")
    decode = world.decode("d0")
    client = world.submit(spec_ending_at(1))
    world.run()
    world.assert_served(client)
    assert client.finish is FinishReason.STOP
    world.assert_quiet()
    assert decode.num_expired == 0  # the lease was given up, not left to expire
    assert len(sent_to(world, "d0", Finish)) == (0 if local else 1)


def test_max_tokens_1_through_the_pair() -> None:
    world, _, decode = pair()
    client = world.submit(make_spec("r", max_tokens=1))
    world.run()
    world.assert_served(client)
    assert client.finish is FinishReason.LENGTH
    world.assert_quiet()
    assert decode.num_expired == 0


def test_b072_stop_string_on_the_first_token() -> None:
    world, prefill, decode = pair()
    client = world.submit(make_spec("r"))
    world.work(WorkerId("d0"))
    prefill.receive(world.inbox[WorkerId("p0")].popleft(), 0.0)
    prefill.step(0.0)
    world.read(WorkerId("p0"))
    assert len(client.outputs) == 1
    world.finish("r")  # both legs hold state now
    assert sent_to(world, "p0", Finish)
    assert sent_to(world, "d0", Finish)
    assert client.events[-1] is E.FINISHED
    world.assert_quiet()
    assert decode.num_expired == 0


# ---- order between the two streams


@pytest.mark.parametrize("spec", [make_spec("r", max_tokens=4), spec_ending_at(4)])
def test_decode_tokens_may_overtake_the_first(spec: RequestSpec) -> None:
    world, prefill, decode = pair()
    client = world.submit(spec)
    world.work(WorkerId("d0"))
    prefill.receive(world.inbox[WorkerId("p0")].popleft(), 0.0)
    prefill.step(0.0)
    world.transfer(prefill)
    for _ in range(3):
        decode.step(0.0)
    world.read(WorkerId("d0"))  # Committed and every later token, while token 0 is under way
    assert client.outputs == []
    assert state(world, client) is S.DECODING
    world.read(WorkerId("p0"))
    world.assert_served(client)
    world.assert_quiet()


def test_first_token_that_never_comes_after_commit_is_retried() -> None:
    world, prefill, _ = pair()
    client = world.submit(make_spec("r"))
    world.work(WorkerId("d0"))
    prefill.receive(world.inbox[WorkerId("p0")].popleft(), 0.0)
    prefill.step(0.0)
    prefill.out.clear()  # lost
    world.transfer(prefill)
    world.work(WorkerId("d0"))
    world.advance(2.5)
    assert E.RETRIED in client.events
    world.run()
    world.assert_served(client)
    world.assert_quiet()


def test_a_gap_fails_the_attempt_and_the_next_goes_on() -> None:
    world, _, decode = pair()
    client = world.submit(make_spec("r", max_tokens=8))
    start_decoding(world, client)
    seen = len(client.outputs)
    decode.step(0.0)
    decode.out.clear()  # a token is lost
    decode.step(0.0)
    world.read(WorkerId("d0"))
    assert client.events[-1] is not E.FAILED
    assert E.RETRIED in client.events
    assert len(client.outputs) == seen
    world.run()
    world.assert_served(client)
    world.assert_quiet()


def test_duplicates_are_dropped_and_counted() -> None:
    world, prefill, decode = pair()
    client = world.submit(make_spec("r", max_tokens=8))
    world.work(WorkerId("d0"))
    prefill.receive(world.inbox[WorkerId("p0")].popleft(), 0.0)
    prefill.step(0.0)
    prefill.out.append(prefill.out[0])  # the first token twice
    world.read(WorkerId("p0"))
    assert world.num_stale == 1
    world.transfer(prefill)
    decode.step(0.0)
    decode.out.extend(list(decode.out))  # Committed and Tokens twice
    world.read(WorkerId("d0"))
    assert world.num_stale == 3
    overlap = Tokens(
        rows=[
            TokenRow(
                client.spec.request,
                Attempt(1),
                1,
                [TokenOutput(token) for token in scripted_output(client.spec)[0][1:4]],
            )
        ]
    )
    world.feed(FromWorker(WorkerId("d0"), Epoch(1), overlap))  # one token known, two new
    assert len(client.outputs) == 4


def test_never_more_tokens_than_asked_for() -> None:
    world, _, _ = pair()
    client = world.submit(make_spec("r", max_tokens=3))
    start_decoding(world, client)
    tokens = [TokenOutput(token) for token in scripted_output(make_spec("r", max_tokens=9))[0]]
    row = TokenRow(client.spec.request, Attempt(1), len(client.outputs), tokens[len(client.outputs) :])
    world.feed(FromWorker(WorkerId("d0"), Epoch(1), Tokens(rows=[row])))
    world.assert_served(client)
    world.assert_quiet()


def test_b087_messages_for_unknown_and_finished_ids_are_ignored() -> None:
    world, _, decode = pair()
    client = world.submit(make_spec("r"))
    start_decoding(world, client)
    decode.step(0.0)
    late = list(decode.out)
    world.leave("r")
    before = world.num_stale
    for message in [*late, *late]:
        assert world.feed(FromWorker(WorkerId("d0"), Epoch(1), message)) == []
    never_seen = Tokens(rows=[TokenRow(RequestId("who"), Attempt(1), 0, [TokenOutput(1)])])
    assert world.feed(FromWorker(WorkerId("d0"), Epoch(1), never_seen)) == []
    assert world.num_stale == before + 2 * len(late) + 1
    decode.out.clear()
    world.assert_quiet()


# ---- leases


def test_leases_are_renewed_while_anything_waits_or_decodes() -> None:
    world, _, decode = pair()
    clients = [world.submit(make_spec(f"r{i}", max_tokens=200)) for i in range(3)]
    world.work(WorkerId("d0"))
    for _ in range(30):
        world.advance(1.5)
        world.work(WorkerId("d0"))  # P does not come to them: they only wait
        world.heartbeat("d0")
    assert decode.num_held == 3
    renewals = sent_to(world, "d0", RenewLeases)
    assert renewals
    assert all(isinstance(message, RenewLeases) and len(message.leases) == 3 for message in renewals)
    for client in clients:
        world.leave(client.spec.request)
    world.assert_quiet()
    count = len(sent_to(world, "d0", RenewLeases))
    world.advance(30)
    assert len(sent_to(world, "d0", RenewLeases)) == count
    assert world.conductor.next_deadline() is None


# ---- no room


def test_too_large_names_both_numbers() -> None:
    world = World()
    world.decode("d0", num_blocks=10)  # 40 tokens
    client = world.submit(make_spec("r", num_prompt=30, max_tokens=20))
    assert isinstance(client.error, ContextLengthExceeded)
    assert "50 tokens" in str(client.error)
    assert "41" in str(client.error)
    assert world.sent == []
    fits = world.submit(make_spec("fits", num_prompt=30, max_tokens=11))
    world.run()
    world.assert_served(fits)
    world.assert_quiet()


def test_b060_too_large_does_not_block_small_ones() -> None:
    world, _, _ = World(), None, None
    world.prefill("p0")
    world.decode("d0", num_blocks=10)
    big = world.submit(make_spec("big", num_prompt=45, max_tokens=2))
    also_big = world.submit(make_spec("also", num_prompt=10, max_tokens=40))
    small = [world.submit(make_spec(f"s{i}", max_tokens=4)) for i in range(5)]
    assert isinstance(big.error, ContextLengthExceeded)
    assert isinstance(also_big.error, ContextLengthExceeded)
    world.run()
    for client in small:
        world.assert_served(client)
    world.assert_quiet()


def test_too_large_by_the_workers_own_word() -> None:
    world = World()
    decode = world.decode("d0", num_blocks=10)
    spec = make_spec("r", num_prompt=20, max_tokens=20)
    decode.register = make_register("d0", Role.DECODE, num_blocks=5)  # its pool is smaller than it said
    client = world.submit(spec)
    world.run()
    assert isinstance(client.error, ContextLengthExceeded)
    world.assert_quiet()


def test_no_room_queues_and_goes_on_when_there_is() -> None:
    world = World()
    decode = world.decode("d0", max_num_seqs=2)
    clients = [world.submit(make_spec(f"r{i}")) for i in range(6)]
    assert world.conductor.num_queued == 4
    world.run()
    for client in clients:
        world.assert_served(client)
    assert decode.max_held == 2
    world.assert_quiet()


def test_b094_refused_reserve_waits_for_room() -> None:
    """The view thinks there is room, the worker knows better: its word counts."""
    world = World()
    decode = world.decode("d0", num_blocks=12, max_num_seqs=50)
    clients = [world.submit(make_spec(f"r{i}", num_prompt=4, max_tokens=17)) for i in range(12)]
    world.run()
    for client in clients:
        world.assert_served(client)
        assert client.summary is not None
        assert client.summary.attempts == 1  # being refused costs nothing
    assert decode.max_held <= 2
    world.assert_quiet()


def test_a_refused_reserve_goes_to_the_next_worker() -> None:
    world = World()
    full = world.decode("d0")
    world.decode("d1")
    full.register = make_register("d0", Role.DECODE, max_num_seqs=0)
    client = world.submit(make_spec("r"))
    world.run()
    world.assert_served(client)
    assert client.summary is not None
    assert client.summary.decode_worker == "d1"
    world.assert_quiet()


def test_queue_is_bounded_and_says_when_to_come_back() -> None:
    world = World(ConductorConfig(max_queued=3))
    world.decode("d0", max_num_seqs=1)
    clients = [world.submit(make_spec(f"r{i}")) for i in range(6)]
    refused = [client for client in clients if client.error is not None]
    assert len(refused) == 2
    for client in refused:
        assert isinstance(client.error, Overloaded)
        assert client.error.retry_after_s is not None
        assert client.error.retry_after_s >= 1
    world.run()
    assert sum(client.error is None for client in clients) == 4
    world.assert_quiet()


def test_retry_after_follows_the_rate_of_departures() -> None:
    world = World(ConductorConfig(max_queued=10))
    world.decode("d0", max_num_seqs=1)
    for i in range(11):
        world.submit(make_spec(f"r{i}", max_tokens=1000))
    for i in range(3):  # a place becomes free every 4 s
        world.work(WorkerId("d0"))
        world.advance(4.0)
        world.leave(f"r{i}")
        world.submit(make_spec(f"more{i}"))
    late = world.submit(make_spec("late"))
    assert isinstance(late.error, Overloaded)
    assert late.error.retry_after_s is not None
    assert 25 <= late.error.retry_after_s <= 60  # eleven ahead of it, about 3 to 4 s each


def test_queued_beyond_its_time_is_overloaded() -> None:
    world = World(ConductorConfig(queue_timeout_s=3.0, decode_silence_s=1000, prefill_timeout_s=1000))
    world.decode("d0", max_num_seqs=1)
    world.submit(make_spec("r0", max_tokens=1000))
    waiting = world.submit(make_spec("r1"))
    world.work(WorkerId("d0"))
    world.advance(2.9)
    assert waiting.error is None
    world.advance(0.2)
    assert isinstance(waiting.error, Overloaded)
    assert waiting.error.retry_after_s is not None
    world.leave("r0")
    world.assert_quiet()


def test_own_deadline_ends_a_request_wherever_it_is() -> None:
    world = World()
    world.prefill("p0")
    world.decode("d0", max_num_seqs=1)
    running = world.submit(make_spec("r0", max_tokens=1000, deadline_s=5.0))
    queued = world.submit(make_spec("r1", deadline_s=2.0))
    start_decoding(world, running)
    world.advance(6.0)
    assert isinstance(running.error, DeadlineExceeded)
    assert isinstance(queued.error, DeadlineExceeded)
    assert (queued.ended_at, running.ended_at) == (2.0, 5.0)
    world.assert_quiet()


def test_b059_clients_that_leave_the_queue_cost_nothing() -> None:
    world = World()
    world.prefill("p0")
    world.decode("d0", max_num_seqs=1)
    world.submit(make_spec("running", max_tokens=1000))
    world.work(WorkerId("d0"))
    sent = len(world.sent)
    for i in range(100):
        world.submit(make_spec(f"r{i}"))
    for i in range(100):
        world.leave(f"r{i}")
    assert len(world.sent) == sent  # nothing was sent for them anywhere
    assert world.conductor.num_queued == 0
    normal = world.submit(make_spec("normal"))
    world.leave("running")
    assert isinstance(world.sent[-1].message, Reserve)  # it starts at once
    world.run()
    world.assert_served(normal)
    world.assert_quiet()


def test_b062_small_requests_pass_a_large_one_for_a_while() -> None:
    world = World(ConductorConfig(max_overtake_s=5.0))
    world.decode("d0", num_blocks=20, max_num_seqs=50)
    long_lived = world.submit(make_spec("long", num_prompt=30, max_tokens=20))  # 13 of 20 blocks
    world.work(WorkerId("d0"))
    large = world.submit(make_spec("large", num_prompt=60, max_tokens=4))
    small = world.submit(make_spec("small", num_prompt=3, max_tokens=2))
    assert state(world, large) is S.QUEUED
    assert world.conductor.num_queued == 1  # the small one went past
    world.advance(5.5)
    world.work(WorkerId("d0"))
    late = world.submit(make_spec("late", num_prompt=3, max_tokens=2))
    assert world.conductor.num_queued == 2  # room now collects for the large one
    world.run()
    for client in (long_lived, large, small, late):
        world.assert_served(client)
    assert large.ended_at is not None
    world.assert_quiet()


# ---- nobody there


def test_no_decode_worker_is_not_ready_at_once() -> None:
    world = World(ConductorConfig(recovery_wait_s=0))
    world.prefill("p0")
    client = world.submit(make_spec("r"))
    assert isinstance(client.error, NotReady)
    world.assert_quiet()


def test_a_worker_that_is_back_and_full_is_waited_for_as_for_room() -> None:
    """Those that lost their place, and one that came while nobody was there."""
    world = World()
    world.decode("d0", max_num_seqs=2)
    clients = [world.submit(make_spec(f"r{i}", max_tokens=20)) for i in range(2)]
    world.work(WorkerId("d0"))
    world.kill("d0")
    clients.append(world.submit(make_spec("late", max_tokens=20)))
    world.advance(15.0)
    world.decode("d0", epoch=2, max_num_seqs=1)
    world.work(WorkerId("d0"))
    world.advance(25.0)  # longer ago than anybody is waited for who is gone
    assert not any(client.has_ended for client in clients)
    world.run()
    for client in clients:
        world.assert_served(client)
    world.assert_quiet()


def test_room_that_does_not_come_has_its_own_end() -> None:
    world = World()
    world.decode("d0", max_num_seqs=2)
    clients = [world.submit(make_spec(f"r{i}", max_tokens=20)) for i in range(2)]
    world.work(WorkerId("d0"))
    world.kill("d0")
    world.decode("d0", epoch=2, max_num_seqs=1)
    world.work(WorkerId("d0"))
    world.advance(29.0)
    assert not any(client.has_ended for client in clients)
    world.advance(2.0)
    assert [type(client.error) for client in clients] == [type(None), WorkerLost]
    assert [client.has_ended for client in clients] == [False, True]


def test_who_waits_for_room_waits_for_workers_anew_when_all_are_gone() -> None:
    world = World()
    world.decode("d0", max_num_seqs=1)
    clients = [world.submit(make_spec(f"r{i}", max_tokens=20)) for i in range(2)]
    world.work(WorkerId("d0"))
    world.advance(25.0)
    world.kill("d0")
    world.advance(15.0)  # longer than anybody waits for room
    assert not any(client.has_ended for client in clients)
    world.decode("d0", epoch=2, max_num_seqs=1)
    world.run()
    for client in clients:
        world.assert_served(client)


def test_a_starting_or_draining_worker_gets_nothing_new() -> None:
    world = World(ConductorConfig(recovery_wait_s=0))
    world.decode("d0")
    world.decode("d1")
    world.heartbeat("d0", WorkerState.DRAINING)
    clients = [world.submit(make_spec(f"r{i}")) for i in range(3)]
    assert {send.worker for send in world.sent} == {"d1"}
    world.heartbeat("d1", WorkerState.STARTING)
    assert isinstance(world.submit(make_spec("last")).error, NotReady)
    world.heartbeat("d1")
    world.run()
    for client in clients:
        world.assert_served(client)


# ---- clients that leave


@pytest.mark.parametrize("moment", range(5))
@pytest.mark.parametrize("how", ["leave", "finish"])
def test_b084_b085_every_holder_is_told_at_once(moment: int, how: str) -> None:
    world, prefill, decode = pair()
    world.submit(make_spec("r", max_tokens=50))
    if moment >= 1:
        world.work(WorkerId("d0"))  # granted
    if moment >= 2:
        prefill.receive(world.inbox[WorkerId("p0")].popleft(), 0.0)  # P has it
    if moment >= 3:
        prefill.step(0.0)
        world.read(WorkerId("p0"))  # token 0 is out, KV under way
    if moment >= 4:
        world.transfer(prefill)
        world.work(WorkerId("d0"))  # decoding
    if how == "leave":
        world.leave("r")
    else:
        world.finish("r")
    kind = Abort if how == "leave" else Finish
    assert len(sent_to(world, "d0", kind)) == 1
    assert len(sent_to(world, "p0", kind)) == (1 if 1 <= moment <= 3 else 0)
    assert world.conductor.quiet()
    world.assert_quiet()  # a late commit finds no lease and is no crash
    assert decode.num_expired == 0


def test_leaving_twice_or_after_the_end_does_nothing() -> None:
    world, _, _ = pair()
    world.submit(make_spec("r"))
    world.run()
    world.leave("r")
    world.finish("r")
    world.leave("r")
    world.assert_quiet()


# ---- failed attempts


def fail(world: World, worker: str, *, retryable: bool, code: str = "broken") -> None:
    failed = AttemptFailed(
        request=RequestId("r"),
        attempt=Attempt(1),
        code=code,
        message="the words of the worker",
        retryable=retryable,
    )
    world.feed(FromWorker(WorkerId(worker), Epoch(1), failed))


def test_failed_prefill_is_retried_locally_and_the_other_leg_is_told() -> None:
    world, _, _ = pair()
    client = world.submit(make_spec("r"))
    world.work(WorkerId("d0"))
    fail(world, "p0", retryable=True)
    assert sent_to(world, "d0", Abort)
    assert not sent_to(world, "p0", Abort)  # it said itself that it holds nothing
    world.run()
    world.assert_served(client)
    assert client.summary is not None
    assert (client.summary.attempts, client.summary.prefill_worker) == (2, "d0")
    world.assert_quiet()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("too_large", ContextLengthExceeded),
        ("bad_request", InvalidRequest),
        ("broken", InternalError),
    ],
)
def test_b092_a_final_failure_is_not_retried(code: str, error: type[BaseException]) -> None:
    world, prefill, _ = pair()
    client = world.submit(make_spec("r"))
    world.work(WorkerId("d0"))
    fail(world, "p0", retryable=False, code=code)
    assert type(client.error) is error
    assert client.summary is not None
    assert client.summary.attempts == 1
    assert ("words of the worker" in str(client.error)) is (error is not InternalError)
    prefill.waiting.clear()
    world.assert_quiet()


def test_attempts_are_bounded() -> None:
    world, _, decode = pair()
    client = world.submit(make_spec("r"))
    for number in range(1, 4):
        world.work(WorkerId("d0"))
        failed = AttemptFailed(
            request=RequestId("r"), attempt=Attempt(number), code="broken", message="", retryable=True
        )
        decode.leases.clear()
        world.feed(FromWorker(WorkerId("d0"), Epoch(1), failed))
    assert isinstance(client.error, InternalError)
    assert client.events.count(E.RETRIED) == 2
    assert client.summary is not None
    assert client.summary.attempts == 3
    world.assert_quiet()


def test_unanswered_reserve_goes_elsewhere() -> None:
    world = World()
    silent = world.decode("d0")
    world.decode("d1")
    silent.answers = False
    client = world.submit(make_spec("r"))
    assert world.sent == [Send(WorkerId("d0"), world.sent[0].message)]
    world.work(WorkerId("d0"))
    world.advance(2.1)
    world.run()
    world.assert_served(client)
    assert client.summary is not None
    assert client.summary.decode_worker == "d1"
    assert client.ended_at is not None
    assert client.ended_at < 4
    assert sent_to(world, "d0", Abort)  # a late grant finds nobody, and its lease is taken back
    world.assert_quiet()


def test_b134_cancel_races_leave_no_slot_stuck() -> None:
    world = World()
    decode = world.decode("d0", max_num_seqs=1)
    for i in range(2000):
        world.submit(make_spec(f"r{i}"))
        for _ in range(i % 4):
            world.work(WorkerId("d0"))
        if not world.clients[RequestId(f"r{i}")].has_ended:
            world.leave(f"r{i}")
    assert decode.num_held <= 1
    last = world.submit(make_spec("last"))
    world.run()
    world.assert_served(last)
    world.assert_quiet()


def test_lost_error_type_is_only_for_lost_workers() -> None:
    world = World(ConductorConfig(recovery_wait_s=0))
    world.decode("d0")
    client = world.submit(make_spec("r"))
    world.work(WorkerId("d0"))
    world.kill("d0")
    assert isinstance(client.error, WorkerLost)


def test_only_whole_answers_tell_how_long_answers_are() -> None:
    """Streams of a beam search end when no beam is on them."""
    world = World()
    world.decode("d0")
    lengths = world.conductor._placing._lengths
    before = lengths.mean
    for is_part in (True, False):
        spec = msgspec.structs.replace(make_spec(f"part-{is_part}", max_tokens=3), is_part=is_part)
        client = world.submit(spec)
        world.run()
        world.assert_served(client)
        assert (lengths.mean == before) is is_part
