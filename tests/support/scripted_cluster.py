"""A cluster that says what a test told it to: `RequestIntake` and `ClusterStatus` from a table of tokens.

Its streams keep the real contract: generation ends by the rules of `cluster.sampling.finish_reason`, `abort`
and `finish` end the iteration at once and are remembered, a failure is the last delivery.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from cluster.ids import Epoch, WorkerId
from cluster.request import RequestSpec
from cluster.sampling import PromptScore, TokenOutput, finish_reason
from cluster.wire.messages import Role, WorkerLoad
from router.conductor_io import ClientFinished, ClientLeft, Event
from router.delivery import (
    ClusterSnapshot,
    Delivery,
    Failed,
    NewTokens,
    Readiness,
    RequestSummary,
    WorkerStatus,
)
from router.live_stream import LiveStream

Model = Callable[[tuple[int, ...]], Sequence[tuple[int, float]]]  # all tokens so far |-> the next, best first


@dataclass(frozen=True)
class Script:
    """What one request gets. `token_ids` are followed by EOS, or repeat to `max_tokens` if it is ignored."""

    token_ids: Sequence[int] = tuple(b"Hello, world")
    per_delivery: int = 1  # tokens of one delivery
    first_delay_s: float = 0.0
    delay_s: float = 0.0  # before every later delivery
    go_on: threading.Semaphore | None = None  # a delivery waits until it may be acquired
    hang_after: int | None = None  # tokens; then nothing more comes
    fail_after: int | None = None  # tokens; then `error`
    error: Exception | None = None
    logprob: Callable[[int, int], float] = lambda index, token_id: -0.25 * (1 + token_id % 4)
    model: Model | None = None  # instead of `token_ids`: it goes on greedily


class ScriptedStream(LiveStream):
    """The router's own, with a script in the place of the conductor."""

    def __init__(self, spec: RequestSpec, script: Script) -> None:
        super().__init__(spec.request, self._on_event, lambda request: SUMMARY)
        self.spec = spec
        self.script = script
        self.aborted: str | None = None
        self.finished = False
        self.num_delivered = 0
        self.ended = threading.Event()  # for tests on other threads
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self._play())

    async def _play(self) -> None:
        async for delivery in self._deliveries():
            self.put(delivery)
            self.hand_over()
        self.end(SUMMARY)
        self.hand_over()

    async def _deliveries(self) -> AsyncIterator[Delivery]:
        script, sampling = self.script, self.spec.sampling
        delay_s = script.first_delay_s
        output_ids: list[int] = []
        while not await self._over_within(delay_s):
            delay_s = script.delay_s
            outputs: list[TokenOutput] = []
            reason = None
            while reason is None and len(outputs) < script.per_delivery:
                if len(output_ids) == script.hang_after:
                    break
                if len(output_ids) == script.fail_after:
                    break
                if script.model is None:
                    output = self._output(len(output_ids), self._token(len(output_ids)))
                else:
                    output = self._modelled(script.model, output_ids)
                outputs.append(output)
                output_ids.append(output.token_id)
                reason = finish_reason(sampling, output_ids)
            if outputs:
                self.num_delivered += len(outputs)
                if reason is not None:
                    self.ended.set()
                yield NewTokens(tuple(outputs), reason)
            if reason is not None:
                return
            if len(output_ids) == script.fail_after:
                assert script.error is not None
                self.ended.set()
                yield Failed(script.error)  # type: ignore[arg-type]
                return
            if len(output_ids) == script.hang_after:
                await self._over.wait()

    async def _over_within(self, seconds: float) -> bool:
        while self.script.go_on is not None and not self._over.is_set():
            if self.script.go_on.acquire(blocking=False):
                break
            await asyncio.sleep(0.001)
        if seconds > 0 and not self._over.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._over.wait()
            except TimeoutError:
                pass
        else:
            await asyncio.sleep(0)
        return self._over.is_set()

    def _modelled(self, model: Model, output_ids: Sequence[int]) -> TokenOutput:
        sampling = self.spec.sampling
        best = model((*self.spec.token_ids, *output_ids))
        too_early = len(output_ids) < sampling.min_tokens
        masked = {*sampling.eos_token_ids, *sampling.stop_token_ids} if too_early else set()
        token_id, logprob = next(item for item in best if item[0] not in masked)
        scores = self._prompt_scores() if not output_ids else ()
        return TokenOutput(token_id, logprob, tuple(best[: sampling.num_logprobs or 0]), scores)

    def _token(self, index: int) -> int:
        ids, eos = self.script.token_ids, self.spec.sampling.eos_token_ids
        if index < len(ids):
            return ids[index]
        return eos[0] if eos else ids[index % len(ids)]

    def _output(self, index: int, token_id: int) -> TokenOutput:
        scores = self._prompt_scores() if index == 0 else ()
        wanted = self.spec.sampling.num_logprobs
        if wanted is None:
            return TokenOutput(token_id, prompt_scores=scores)
        logprob, best = self._score(index, token_id, wanted)
        return TokenOutput(token_id, logprob, best, scores)

    def _prompt_scores(self) -> tuple[PromptScore, ...]:
        wanted = self.spec.sampling.prompt_logprobs
        if wanted is None:
            return ()
        return tuple(
            PromptScore(*self._score(index, token_id, wanted), rank=1)
            for index, token_id in enumerate(self.spec.token_ids)
            if index > 0
        )

    def _score(self, index: int, token_id: int, wanted: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        logprob = self.script.logprob(index, token_id)
        return logprob, tuple((token_id + step, logprob - step / 8) for step in range(wanted))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, ClientFinished):
            self.finished = True
        elif isinstance(event, ClientLeft) and not self.ended.is_set():
            self.aborted = event.reason
        self._over.set()
        self.ended.set()


SUMMARY = RequestSummary(
    cached_tokens=2,
    attempts=1,
    prefill_worker=WorkerId("prefill-0"),
    decode_worker=WorkerId("decode-0"),
    queue_s=0.001,
    prefill_s=0.02,
    kv_transfer_s=0.003,
    decode_s=0.1,
    ttft_s=0.021,
)


@dataclass
class ScriptedCluster:
    """Implements `RequestIntake` and `ClusterStatus`; tests set the fields between requests."""

    script: Script | Callable[[RequestSpec], Script] = Script()
    refuse: Exception | None = None  # raised by `submit`
    readiness: Readiness = Readiness(True, "ready")  # noqa: RUF009 -- frozen
    limit: int | None = None
    num_queued: int = 0
    workers: tuple[WorkerStatus, ...] = ()
    streams: list[ScriptedStream] = field(default_factory=list)

    def submit(self, spec: RequestSpec) -> ScriptedStream:
        if self.refuse is not None:
            raise self.refuse
        stream = ScriptedStream(spec, self.script if isinstance(self.script, Script) else self.script(spec))
        self.streams.append(stream)
        return stream

    def ready(self) -> Readiness:
        return self.readiness

    def cluster(self) -> ClusterSnapshot:
        return ClusterSnapshot(self.readiness.phase, self.num_queued, self.workers, {})

    def max_model_len(self) -> int | None:
        return self.limit


def worker(
    name: str, role: Role, *, epoch: int = 1, state: str = "ready", load: WorkerLoad | None = None
) -> WorkerStatus:
    return WorkerStatus(WorkerId(name), role, Epoch(epoch), 4242, state, load or WorkerLoad(), 0.1)
