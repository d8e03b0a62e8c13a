"""Decode workers without a model, at a set pace: `python -m bench.router_speed.engines`, settings on stdin.

1. Each dials the router over a real control stream, grants every RESERVE and "prefills" it within its next
   step: `FirstToken`, `Committed`.
2. A step posts one message with the next token of every stream it holds, as decode workers do: in columns
   (`NextTokens`) if no stream ends or begins. Steps come at a set interval; the workers' intervals differ by
   a few percent, so their steps meet in every way there is.
3. The moment right before each post is kept for every token on the clock that the load client uses. Streams
   are told apart by the number in their prompt (`prompt_text`).
4. When stdin ends, the moments are written to the log, and the process with them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench.load.client.alarm import make_alarm
from bench.load.client.process import new_loop
from bench.support.worker_link import WorkerLink
from cluster.ids import Attempt, Epoch, LeaseId, RequestId, WorkerId
from cluster.sampling import FinishReason, TokenOutput
from cluster.tokenizer import Tokenizer
from cluster.wire.kv_events import RouterSays
from cluster.wire.messages import (
    Abort,
    Committed,
    Finish,
    FirstToken,
    Grant,
    KVGeometry,
    NextTokens,
    Register,
    Reserve,
    Role,
    TokenRow,
    TokenRun,
    Tokens,
    WorkerLoad,
    pack_run,
)

NS = 1_000_000_000
BLOCK_TOKENS = 32
NUM_BLOCKS = 1 << 20
SPREAD = 0.03  # of the intervals, around their mean
TEXT = (
    "A router hands every prompt to a worker that computes it and to one that goes on from there. What comes "
    "back, token by token, is put into words and sent on to whoever asked, while hundreds of others wait for "
    "theirs. "
)
_NUMBER = re.compile(r"stream number (\d+)\.")


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    address: str  # where the router listens for workers
    token: str
    model_dir: str
    max_model_len: int
    num_workers: int
    max_num_seqs: int  # of each worker
    step_s: float
    core: int | None
    log: str


class EngineLog(msgspec.Struct, frozen=True):
    """`moments_ns[number][k]`: when token k of that stream was posted, on the `perf_counter_ns` clock."""

    moments_ns: dict[int, list[int]]
    cpu_s: float


def prompt_text(number: int) -> str:
    return f"This is stream number {number}. Say how a request travels."


class PacedDecode:
    """One decode worker. `moments_of` gives the list that a prompt's moments go to."""

    def __init__(
        self,
        settings: EngineSettings,
        number: int,
        script: list[TokenOutput],
        moments_of: Callable[[list[int]], list[int]],
    ) -> None:
        self._script = script
        self._moments_of = moments_of
        self._streams: dict[tuple[RequestId, Attempt], _Stream] = {}
        self._num_steps = 0
        self._run_keys: list[tuple[RequestId, Attempt]] = []
        self._run, self._run_began = b"", 0
        self._num_leases = 0
        mid = (settings.num_workers - 1) / 2
        self._interval_ns = round(settings.step_s * (1 + SPREAD * (number - mid) / max(mid, 1)) * NS)
        self._due_ns = time.perf_counter_ns() + self._interval_ns * (number + 1) // settings.num_workers
        self._alarm = make_alarm(asyncio.get_running_loop(), self._step)
        register = make_register(settings, number)
        self.link = WorkerLink(settings.address, settings.token.encode(), register, self._receive, self._load)

    async def start(self) -> None:
        await self.link.start()
        self._alarm.set(self._due_ns)

    def close(self) -> None:
        self._alarm.close()

    def _receive(self, message: RouterSays) -> None:
        if isinstance(message, Reserve):
            self._num_leases += 1
            key = message.request, message.attempt
            moments = self._moments_of(message.token_ids)
            self._streams[key] = _Stream(*key, message.sampling.max_tokens, moments)
            grant = Grant(
                request=message.request,
                attempt=message.attempt,
                lease=LeaseId(self._num_leases),
                ttl_s=message.lease_ttl_s,
                cached_tokens=0,
            )
            self.link.post(grant)
        elif isinstance(message, Finish | Abort):
            self._streams.pop((message.request, message.attempt), None)

    def _step(self) -> None:
        now_ns = time.perf_counter_ns()
        self._due_ns = max(self._due_ns + self._interval_ns, now_ns)
        self._alarm.set(self._due_ns)
        self._num_steps += 1
        num_streams = len(self._streams)
        rows: list[TokenRow] = []
        ended: list[_Stream] = []
        for stream in self._streams.values():
            index, output = stream.num_sent, self._script[stream.num_sent % len(self._script)]
            stream.num_sent += 1
            stream.moments_ns.append(now_ns)
            reason = None
            if stream.num_sent >= stream.max_tokens:
                reason = FinishReason.LENGTH
                ended.append(stream)
            if index == 0:
                self._begin(stream, output, reason)
            else:
                rows.append(TokenRow(stream.request, stream.attempt, index, [output], reason))
        for stream in ended:
            del self._streams[stream.request, stream.attempt]
        if rows:
            goes_on = len(rows) == num_streams and not ended
            self.link.post(self._next_tokens(rows) if goes_on else Tokens(rows=rows))

    def _next_tokens(self, rows: list[TokenRow]) -> NextTokens:
        """Steps of the same streams are a run."""
        keys = [(row.request, row.attempt) for row in rows]
        if keys != self._run_keys:
            self._run_keys, self._run_began = keys, self._num_steps
            requests, attempts = map(list, zip(*keys, strict=True))
            self._run = pack_run(TokenRun(requests, attempts, [row.index for row in rows]))
        token_ids = [row.outputs[0].token_id for row in rows]
        return NextTokens(run=self._run, num_on=self._num_steps - self._run_began, token_ids=token_ids)

    def _begin(self, stream: _Stream, output: TokenOutput, reason: FinishReason | None) -> None:
        request, attempt = stream.request, stream.attempt
        first = FirstToken(
            request=request,
            attempt=attempt,
            output=output,
            finish_reason=reason,
            cached_tokens=0,
            queue_s=0.0,
            prefill_s=0.0,
        )
        self.link.post(first)
        if reason is None:
            self.link.post(Committed(request=request, attempt=attempt, kv_bytes=0, kv_transfer_s=0.0))

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            running=len(self._streams),
            steps=self._num_steps,
            blocks_free=NUM_BLOCKS,
            decode_rows=len(self._streams),
        )


class _Stream:
    __slots__ = ("attempt", "max_tokens", "moments_ns", "num_sent", "request")

    def __init__(self, request: RequestId, attempt: Attempt, max_tokens: int, moments_ns: list[int]) -> None:
        self.request = request
        self.attempt = attempt
        self.max_tokens = max_tokens
        self.moments_ns = moments_ns
        self.num_sent = 0


def make_register(settings: EngineSettings, number: int) -> Register:
    return Register(
        worker=WorkerId(f"decode-{number}"),
        role=Role.DECODE,
        epoch=Epoch(1),
        pid=os.getpid(),
        model="scripted",
        fingerprint="scripted/1",
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        geometry=KVGeometry(
            first_layer=0,
            num_layers=1,
            first_head=0,
            num_heads=1,
            head_dim=8,
            block_size=BLOCK_TOKENS,
            num_blocks=NUM_BLOCKS,
            dtype="float32",
        ),
        kv_address="unix:/scripted",
    )


async def serve(settings: EngineSettings) -> None:
    """Until stdin ends."""
    tokenizer = Tokenizer.load(Path(settings.model_dir))
    script = [TokenOutput(token_id) for token_id in tokenizer.encode(TEXT, add_special_tokens=False)]
    log: dict[int, list[int]] = {}

    def moments_of(token_ids: list[int]) -> list[int]:
        match = _NUMBER.search(tokenizer.decode(token_ids[:64]))
        return [] if match is None else log.setdefault(int(match[1]), [])

    engines = [PacedDecode(settings, number, script, moments_of) for number in range(settings.num_workers)]
    for engine in engines:
        await engine.start()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: _UntilEnd(over), sys.stdin)
    gc.collect()
    gc.freeze()
    gc.disable()  # a pause between a token's moment and its post would be taken for the router's
    print("ready", flush=True)
    await over.wait()
    for engine in engines:
        engine.close()
        await engine.link.kill()
    Path(settings.log).write_bytes(msgspec.msgpack.encode(EngineLog(log, time.process_time())))


class _UntilEnd(asyncio.Protocol):
    def __init__(self, over: asyncio.Event) -> None:
        self._over = over

    def connection_lost(self, exc: Exception | None) -> None:
        self._over.set()


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.readline(), type=EngineSettings)
    if settings.core is not None:
        os.sched_setaffinity(0, {settings.core})
    if os.sched_getscheduler(0) == os.SCHED_RR:
        os.sched_setscheduler(
            0, os.SCHED_RR, os.sched_param(1)
        )  # after the client: it notes when tokens come
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve(settings))


if __name__ == "__main__":
    main()
