"""The conductor's driver over real streams: registration, readiness, requests, dead and hung workers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from cluster.clock import MonotonicClock
from cluster.errors import BatonError, ContextLengthExceeded, InternalError, NotReady, WorkerLost
from cluster.ids import Attempt, RequestId, RouterId, WorkerId
from cluster.request import RequestSpec, RequestState
from cluster.sampling import FinishReason, TokenOutput
from cluster.wire.kv_events import DiallerSays, RouterSays
from cluster.wire.messages import (
    Abort,
    Finish,
    FirstToken,
    Heartbeat,
    Lifeline,
    Register,
    Reserve,
    Role,
    WorkerLoad,
    WorkerState,
)
from cluster.wire.stream import Stream, connect, listen
from router.conductor import Conductor
from router.config import ConductorConfig
from router.delivery import Failed, NewTokens, StaleReason
from router.driver import ConductorDriver
from router.live_stream import LiveStream
from router.readiness import ReadinessJudge
from router.worker_links import LAST_WORDS_S
from tests.router.conductor_peers import BLOCK_SIZE, make_register, make_spec, scripted_output
from tests.router.service_peers import TOKEN, Host, LiveWorker

HEARTBEAT_S = 0.1
RECOVERY_WAIT_S = 0.3
LIMIT_S = 20.0  # for what has to come at all, however busy the machine
DECODE = make_register("d0", Role.DECODE)
PREFILL = make_register("p0", Role.PREFILL)


class Router:
    """A driver behind a listener, and the host its workers live on."""

    def __init__(self, driver: ConductorDriver, conductor: Conductor, host: Host) -> None:
        self.driver = driver
        self.conductor = conductor
        self.host = host

    async def ready(self) -> None:
        await asyncio.wait_for(self.driver.became_ready.wait(), LIMIT_S)

    async def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait for something that other tasks bring about."""
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def quiet(self) -> None:
        await self.until(lambda: self.conductor.quiet())
        await self.until(lambda: all(worker.peer.num_held == 0 for worker in self.host.workers.values()))


MakeRouter = Callable[..., "Router"]


@pytest_asyncio.fixture
async def router(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Router]:
    needs_prefill: bool = getattr(request, "param", True)
    conductor = Conductor(ConductorConfig(recovery_wait_s=RECOVERY_WAIT_S))
    driver = ConductorDriver(
        RouterId("router-0"),
        conductor,
        ReadinessJudge(needs_prefill=needs_prefill),
        MonotonicClock(),
        block_size=BLOCK_SIZE,
        heartbeat_interval_s=HEARTBEAT_S,
    )
    listener = await listen(f"unix:{tmp_path}/control", TOKEN, DiallerSays, driver.links.on_stream)
    host = Host(listener.address)
    yield Router(driver, conductor, host)
    driver.close()
    await host.close()
    await listener.close()


async def read(stream: LiveStream) -> tuple[list[int], FinishReason | None, BatonError | None]:
    outputs: list[int] = []
    finish, error = None, None
    async with asyncio.timeout(LIMIT_S):
        async for delivery in stream:
            match delivery:
                case NewTokens(new, reason):
                    outputs += [output.token_id for output in new]
                    finish = reason
                case Failed(failure):
                    error = failure
    return outputs, finish, error


async def served(router: Router, spec: RequestSpec) -> None:
    outputs, finish, error = await read(router.driver.submit(spec))
    assert error is None
    assert (outputs, finish) == scripted_output(spec)


# ---- readiness


async def test_b135_ready_once_after_a_warm_up_through_the_real_path(router: Router) -> None:
    seen = [router.driver.ready().phase]
    with pytest.raises(NotReady, match="waiting_for_workers"):
        router.driver.submit(make_spec("early"))
    decode = await router.host.start(DECODE, state=WorkerState.STARTING)
    seen.append(router.driver.ready().phase)
    prefill = await router.host.start(PREFILL, state=WorkerState.STARTING)
    await router.until(lambda: router.driver.ready().phase == "loading_model")
    decode.set_state(WorkerState.READY)
    prefill.steps = False
    prefill.set_state(WorkerState.READY)
    await router.until(lambda: router.driver.ready().phase == "warming_up")
    await router.until(lambda: prefill.peer.num_held == 1)  # it goes through the prefill worker
    with pytest.raises(NotReady, match="warming_up"):
        router.driver.submit(make_spec("still-early"))
    assert not router.driver.became_ready.is_set()
    prefill.steps = True
    prefill.wake.set()
    await router.ready()
    assert router.driver.ready().ready
    assert seen == ["waiting_for_workers", "waiting_for_workers"]
    await served(router, make_spec("r"))
    await router.quiet()


async def test_failed_warm_up_is_tried_again(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.driver.WARM_UP_RETRY_S", 0.05)
    decode = await router.host.start(DECODE, steps=False)
    await router.host.start(PREFILL)
    await router.until(lambda: router.conductor.num_live == 1)
    await decode.kill()  # under the warm-up
    await router.until(lambda: router.conductor.num_live == 0)
    assert not router.driver.ready().ready
    await router.host.start(make_register("d0", Role.DECODE, epoch=2))
    await router.ready()
    await served(router, make_spec("r"))


@pytest.mark.parametrize("router", [False], indirect=True)
async def test_colocated_needs_no_prefill_worker(router: Router) -> None:
    await router.host.start(DECODE)
    await router.ready()
    stream = router.driver.submit(make_spec("r"))
    await read(stream)
    assert stream.summary().prefill_worker == stream.summary().decode_worker == "d0"


async def test_degraded_is_still_ready_but_not_without_decode(router: Router) -> None:
    decode, prefill = await router.host.start(DECODE), await router.host.start(PREFILL)
    await router.ready()
    await prefill.kill()
    await router.until(lambda: len(router.driver.links) == 1)
    assert router.driver.ready().ready
    await served(router, make_spec("local"))
    await decode.kill()
    await router.until(lambda: len(router.driver.links) == 0)
    assert not router.driver.ready().ready
    await router.host.start(make_register("d0", Role.DECODE, epoch=2))
    await router.until(lambda: router.driver.ready().ready)
    await served(router, make_spec("again"))


async def test_draining_takes_nothing_new_and_finishes_what_runs(router: Router) -> None:
    decode = await router.host.start(DECODE)
    await router.host.start(PREFILL)
    await router.ready()
    decode.steps = False
    spec = make_spec("r")
    stream = router.driver.submit(spec)
    router.driver.start_draining()
    assert router.driver.ready().phase == "draining"
    with pytest.raises(NotReady, match="draining"):
        router.driver.submit(make_spec("late"))
    part = msgspec.structs.replace(make_spec("part"), goes_on=True)  # of a search that runs
    further = router.driver.submit(part)
    decode.steps = True
    decode.wake.set()
    for of, answer in ((spec, stream), (part, further)):
        outputs, _, error = await read(answer)
        assert error is None
        assert outputs == scripted_output(of)[0]


# ---- requests


async def test_many_requests_over_two_pairs(router: Router) -> None:
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        await router.host.start(make_register(name, role))
    await router.ready()
    specs = [make_spec(f"r{i}", num_prompt=3 + i % 20, max_tokens=1 + i % 15, eos=True) for i in range(100)]
    await asyncio.gather(*(served(router, spec) for spec in specs))
    await router.quiet()
    assert all(
        isinstance(worker.peer.steps, int) and worker.peer.steps for worker in router.host.workers.values()
    )


async def test_refusals_are_raised_where_nothing_was_queued(router: Router) -> None:
    await router.host.start(make_register("d0", Role.DECODE, num_blocks=20))
    await router.host.start(PREFILL)
    await router.ready()
    with pytest.raises(ContextLengthExceeded, match="no more than 81"):
        router.driver.submit(make_spec("big", num_prompt=80, max_tokens=10))
    await router.quiet()


async def test_finish_and_abort_reach_the_holders(router: Router) -> None:
    decode, prefill = await router.host.start(DECODE), await router.host.start(PREFILL)
    await router.ready()
    prefill.steps = False
    stopped, left = (router.driver.submit(make_spec(name, max_tokens=50)) for name in ("stopped", "left"))
    await router.until(lambda: prefill.peer.num_held == 2)
    started = time.monotonic()
    stopped.finish()
    left.abort("client disconnected")
    assert await read(stopped) == ([], None, None)  # iteration ends
    assert await read(left) == ([], None, None)
    stopped.finish()
    left.abort("again")
    await router.until(lambda: decode.peer.num_held == 0 and prefill.peer.num_held == 0)
    assert time.monotonic() - started < 1.0
    for worker in (decode, prefill):
        assert sum(isinstance(message, Finish) for message in worker.received) == 1
        assert sum(isinstance(message, Abort) for message in worker.received) == 1
    assert stopped.summary().attempts == 1
    await router.quiet()


# ---- workers that go


async def test_dead_decode_worker_is_taken_over_within_2_s(router: Router) -> None:
    await router.host.start(PREFILL)
    decodes = [await router.host.start(make_register(f"d{i}", Role.DECODE)) for i in range(2)]
    await router.ready()
    specs = [make_spec(f"r{i}", max_tokens=400) for i in range(6)]
    streams = [router.driver.submit(spec) for spec in specs]
    await router.until(
        lambda: all(router.conductor.state(spec.request) is RequestState.DECODING for spec in specs)
    )
    for worker in decodes:
        worker.steps = False
    started = time.monotonic()
    await decodes[0].kill()
    decodes[1].steps = True
    decodes[1].wake.set()
    for spec, stream in zip(specs, streams, strict=True):
        outputs, _, error = await read(stream)
        assert error is None
        assert outputs == scripted_output(spec)[0]
        assert stream.summary().decode_worker == "d1"
    assert sorted(stream.summary().attempts for stream in streams) == [1, 1, 1, 2, 2, 2]
    assert time.monotonic() - started < 2.0
    await router.quiet()


async def test_b032_last_decode_worker_dies_and_the_error_comes_at_once(router: Router) -> None:
    await router.host.start(PREFILL)
    decode = await router.host.start(DECODE)
    await router.ready()
    stream = router.driver.submit(make_spec("r", max_tokens=100_000 // 40))
    await router.until(lambda: router.conductor.state(stream._request) is RequestState.DECODING)
    decode.steps = False
    started = time.monotonic()
    await decode.kill()
    _, finish, error = await read(stream)
    assert isinstance(error, WorkerLost)
    assert finish is None
    assert time.monotonic() - started < 1.0
    assert router.conductor.quiet()


async def test_b082_hung_worker_is_found_by_its_silence(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    """No other deadline comes before `LIMIT_S`: that of a prefill is a minute."""
    prefill = await router.host.start(PREFILL)
    await router.host.start(DECODE)
    await router.ready()
    started = time.monotonic()
    prefill.hang()
    await served(router, make_spec("r"))  # finished by the decode worker alone
    assert 0.1 < time.monotonic() - started < 10 * HEARTBEAT_S
    assert "p0 epoch 1 is gone: no sign of life for 0." in caplog.text
    assert len(router.driver.links) == 1


async def test_what_a_hung_worker_says_after_all_is_dropped_and_counted(router: Router) -> None:
    prefill = await router.host.start(PREFILL)
    await router.host.start(DECODE)
    await router.ready()
    prefill.hang()
    await router.until(lambda: len(router.driver.links) == 1)
    assert router.driver.cluster().stale_messages[StaleReason.EPOCH] == 0
    late = FirstToken(
        request=RequestId("r"),
        attempt=Attempt(1),
        output=TokenOutput(5),
        finish_reason=None,
        cached_tokens=0,
        queue_s=0.0,
        prefill_s=0.0,
    )
    for _ in range(3):
        prefill.post(late)
    prefill.beat()
    assert prefill._stream is not None
    async with asyncio.timeout(LIMIT_S):  # its first heartbeat ends the stream: it frees all and dials anew
        async for _ in prefill._stream:
            pass
    assert router.driver.cluster().stale_messages[StaleReason.EPOCH] == 4
    again = await router.host.start(PREFILL)
    assert again.refused is None
    await served(router, make_spec("r"))
    await router.quiet()


async def test_idle_workers_that_beat_stay(router: Router) -> None:
    await router.host.start(PREFILL)
    await router.host.start(DECODE)
    await router.ready()
    await asyncio.sleep(8 * HEARTBEAT_S)
    assert len(router.driver.links) == 2


async def test_a_router_that_slept_does_not_blame_its_workers(router: Router) -> None:
    await router.host.start(PREFILL)
    await router.host.start(DECODE)
    await router.ready()
    time.sleep(10 * HEARTBEAT_S)  # the whole process stands still
    await asyncio.sleep(5 * HEARTBEAT_S)
    assert len(router.driver.links) == 2
    await served(router, make_spec("r"))


async def test_b090_restarted_worker_takes_the_place_of_its_old_stream(router: Router) -> None:
    await router.host.start(PREFILL)
    old = await router.host.start(DECODE)
    await router.ready()
    old.hang()
    new = await router.host.start(make_register("d0", Role.DECODE, epoch=2))
    assert new.refused is None
    await router.until(lambda: router.conductor.workers.view().has_ready(Role.DECODE))
    await served(router, make_spec("r"))
    assert [status.epoch for status in router.driver.cluster().workers] == [2, 1]
    await router.quiet()


# ---- registration


async def test_stale_epoch_is_refused(router: Router) -> None:
    began = time.monotonic()
    await router.host.start(make_register("d0", Role.DECODE, epoch=3))
    stale = LiveWorker(router.host, make_register("d0", Role.DECODE, epoch=2))
    await stale.start()
    await asyncio.wait_for(stale.gone.wait(), LIMIT_S)
    assert stale.refused is not None
    assert "epoch 2" in stale.refused
    assert router.driver.links.silence_s(WorkerId("d0")) < time.monotonic() - began


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "other/1"}, "fingerprint"),
        (
            {"geometry": msgspec.structs.replace(DECODE.geometry, dtype="int8"), "fingerprint": "other/1"},
            "keeps KV in int8, p0 in float32",
        ),
        ({"kv_address": None}, "address"),
        ({"max_num_seqs": 0}, "room"),
    ],
)
async def test_unfit_workers_are_refused_with_the_reason(
    router: Router, change: dict[str, object], reason: str
) -> None:
    await router.host.start(PREFILL)
    values = {name: getattr(DECODE, name) for name in DECODE.__struct_fields__}
    worker = LiveWorker(router.host, Register(**{**values, **change}))
    await worker.start()
    await asyncio.wait_for(worker.gone.wait(), LIMIT_S)
    assert worker.refused is not None
    assert reason in worker.refused
    assert len(router.driver.links) == 1


async def test_streams_that_do_not_register_are_closed(router: Router) -> None:
    stream = await connect(router.host.address, TOKEN, RouterSays)
    stream.post(Heartbeat(state=WorkerState.READY, load=WorkerLoad()))
    assert await asyncio.wait_for(anext(stream, None), LIMIT_S) is None
    worker = await router.host.start(DECODE)
    worker.post(DECODE)  # a second time
    await asyncio.wait_for(worker.gone.wait(), LIMIT_S)
    await router.until(lambda: len(router.driver.links) == 0)


async def test_what_a_worker_mismeasures_is_told_once(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await router.host.start(DECODE)
    for _ in range(3):
        worker.post(Heartbeat(state=WorkerState.READY, load=WorkerLoad(decode_step_s=math.nan, steps=7)))
    await router.until(lambda: router.driver.cluster().workers[0].load.steps == 7)
    told = [record.getMessage() for record in caplog.records if "cannot be" in record.getMessage()]
    assert len(told) == 1
    assert "(decode_step_s)" in told[0]
    assert router.driver.cluster().workers[0].load.decode_step_s == 0.0


async def lifeline_of(router: Router, link: int) -> Stream[RouterSays]:
    stream = await connect(router.host.address, TOKEN, RouterSays)
    stream.post(Lifeline(link=link))
    return stream


async def test_the_end_of_a_lifeline_is_the_end_of_its_worker(router: Router) -> None:
    await router.host.start(DECODE)
    prefill = await router.host.start(PREFILL)
    assert prefill.link > 0
    lifeline = await lifeline_of(router, prefill.link)
    await asyncio.sleep(2 * HEARTBEAT_S)
    assert len(router.driver.links) == 2
    lifeline.abort()
    await asyncio.wait_for(prefill.gone.wait(), LIMIT_S)  # its own stream is cut
    assert len(router.driver.links) == 1


async def test_a_lifeline_of_a_link_that_is_gone_ends_nobody(router: Router) -> None:
    first = await router.host.start(DECODE)
    lifeline = await lifeline_of(router, first.link)
    await first.kill()
    await router.until(lambda: len(router.driver.links) == 0)
    again = await router.host.start(DECODE)
    assert again.link != first.link
    late = await lifeline_of(router, first.link)
    assert await asyncio.wait_for(anext(late, None), LIMIT_S) is None
    lifeline.abort()
    await asyncio.sleep(3 * LAST_WORDS_S)
    assert len(router.driver.links) == 1
    assert not again.gone.is_set()


async def test_a_lifeline_does_not_outlive_its_link(router: Router) -> None:
    """A host that is lost ends neither of its streams."""
    decode = await router.host.start(DECODE)
    lifeline = await lifeline_of(router, decode.link)
    await asyncio.sleep(HEARTBEAT_S)  # it has been read
    await decode.kill()
    assert await asyncio.wait_for(anext(lifeline, None), LIMIT_S) is None


async def test_a_lifeline_carries_nothing_else(router: Router) -> None:
    decode = await router.host.start(DECODE)
    lifeline = await lifeline_of(router, decode.link)
    lifeline.post(Heartbeat(state=WorkerState.READY, load=WorkerLoad()))
    assert await asyncio.wait_for(anext(lifeline, None), LIMIT_S) is None
    await asyncio.sleep(3 * LAST_WORDS_S)
    assert not decode.gone.is_set()


# ---- pictures


async def test_cluster_shows_what_workers_say(router: Router) -> None:
    began = time.monotonic()
    decode = await router.host.start(DECODE)
    await router.host.start(PREFILL)
    await router.ready()
    assert router.driver.max_model_len() == 4000
    decode.post(Heartbeat(state=WorkerState.DRAINING, load=WorkerLoad(running=3, steps=9)))
    await router.until(lambda: router.driver.cluster().workers[0].load.running == 3)
    snapshot = router.driver.cluster()
    assert [(one.worker, one.state) for one in snapshot.workers] == [("d0", "draining"), ("p0", "ready")]
    assert snapshot.queued == 0
    assert all(0 <= one.heartbeat_age_s < time.monotonic() - began for one in snapshot.workers)


# ---- our own bugs


async def test_a_broken_conductor_fails_everything_and_says_so(
    router: Router, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = await router.host.start(PREFILL)
    decode = await router.host.start(DECODE)
    await router.ready()
    prefill.steps = False
    stream = router.driver.submit(make_spec("r"))
    await router.until(lambda: prefill.peer.num_held == 1)

    def broken(*_: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(router.conductor, "handle", broken)
    decode.beat()
    _, _, error = await read(stream)
    assert isinstance(error, InternalError)
    assert router.driver.broken.is_set()
    assert not router.driver.ready().ready
    await asyncio.wait_for(decode.gone.wait(), LIMIT_S)
    await asyncio.wait_for(prefill.gone.wait(), LIMIT_S)
    assert "a bug" in caplog.text


async def test_reserve_too_long_for_the_wire_is_an_error_not_a_hang(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.errors import ProtocolError

    await router.host.start(PREFILL)
    await router.host.start(DECODE)
    await router.ready()
    post = router.driver.links.post

    def limited(worker: WorkerId, message: object) -> None:
        if isinstance(message, Reserve):
            raise ProtocolError("Reserve of 99999999 bytes is over the frame limit")
        post(worker, message)  # type: ignore[arg-type]

    monkeypatch.setattr(router.driver.links, "post", limited)
    with pytest.raises(InternalError, match="message_too_long"):
        router.driver.submit(make_spec("r"))
    assert router.conductor.quiet()
