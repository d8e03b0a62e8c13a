"""A beam search under way: the streams that `router.beam_search` asks for, as requests to the cluster.

1. The first stream is submitted at once, so a refusal is the request's own; it computes the prompt.
2. Each stream is read by a task of its own and put into one inbox; `collect` takes from there, and carries
   out what the search says: a fork is submitted, a dropped stream is finished.
3. When the search is over its hypotheses become choices, best first.

Forks are requests like any other to the conductor: placed where their prefix is cached, moved and tried again
as others are. They are taken where new ones are turned away, for the search has begun. A fork that fails
fails the search, as an answer would its reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from cluster.clock import Clock
from cluster.errors import DeadlineExceeded, InternalError
from cluster.ids import RequestId
from cluster.metrics import Metrics, Outcome, RequestRecord
from cluster.request import RequestSpec
from cluster.sampling import FinishReason, PromptScore
from router.asgi import ClientLeft
from router.beam_search import Action, BeamRules, BeamSearch, Drop, Fork, Hypothesis
from router.delivery import Delivery, Failed, RequestIntake, RequestStream, RequestSummary
from router.generation import BY_CLIENTS, outcome_of
from router.reply import Choice, Usage

# From a hypothesis' place, it, and the scores of the prompt.
Show = Callable[[int, Hypothesis, tuple[PromptScore, ...]], Choice]


class BeamRun:
    """Implements `router.generation.Answering`: the best answers to one prompt."""

    def __init__(
        self,
        intake: RequestIntake,
        spec: RequestSpec,
        rules: BeamRules,
        show: Show,
        *,
        arrived_s: float,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """`spec`: of the first stream; the others have its name with their number.

        Raises:
            BatonError: it was not accepted.
        """
        self._intake = intake
        self._spec = spec
        self._show = show
        self._arrived_s = self._last_s = arrived_s
        self._clock = clock
        self._metrics = metrics
        self._search = BeamSearch(rules)
        self._inbox: asyncio.Queue[tuple[int, Delivery | None] | None] = asyncio.Queue()  # None: ended
        self._streams: dict[int, tuple[RequestStream, asyncio.Task[None]]] = {}
        self._prompt_scores: tuple[PromptScore, ...] = ()
        self._outcome: Outcome | None = None
        self._ended_by: Exception | None = None
        self._chosen: Sequence[Hypothesis] = ()
        self._is_answered = self._closed = False
        self._carry_out(self._search.start())
        self._first = self._streams[0][0]

    @property
    def is_clients(self) -> bool:
        return self._outcome in BY_CLIENTS

    @property
    def num_computed(self) -> int:
        """Those that were compared; those that streams were ahead are the cluster's own risk. Answers share
        what they begin with, so they can have more tokens than that."""
        return max(self._search.num_computed, sum(len(item.outputs) for item in self._chosen))

    @property
    def last_progress_s(self) -> float:
        return self._last_s

    async def collect(self) -> list[Choice]:
        try:
            while not self._search.is_over:
                self._take(await self._inbox.get())
            self._chosen = self._search.outcome()
            if not self._chosen:
                raise InternalError("the model gave no token a probability")
        except Exception as error:
            self._outcome = outcome_of(error)
            self._let_go(str(error))
            raise
        is_stop = self._chosen[0].reason is FinishReason.STOP
        self._outcome = Outcome.STOP if is_stop else Outcome.LENGTH
        scores = self._prompt_scores
        return [self._show(place, hypothesis, scores) for place, hypothesis in enumerate(self._chosen)]

    def end(self, reason: Exception) -> None:
        if self._outcome is None and self._ended_by is None:
            self._ended_by = reason
            self._let_go("client left" if isinstance(reason, ClientLeft) else str(reason))
            self._inbox.put_nowait(None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._let_go("the reply was given up")
        if self._outcome is None:
            self._outcome = outcome_of(self._ended_by) if self._ended_by else Outcome.ERROR
        self._metrics.observe_request(self._record(self._outcome))

    def summary(self) -> RequestSummary:
        """Of the first stream."""
        return self._first.summary()

    def usage(self) -> Usage:
        """Tokens of the answers; until they are known, those that were compared."""
        num_tokens = sum(len(item.outputs) for item in self._chosen) or self._search.num_computed
        return Usage(len(self._spec.token_ids), num_tokens, self.summary().cached_tokens)

    # ---- parts

    def _take(self, item: tuple[int, Delivery | None] | None) -> None:
        if self._ended_by is not None or item is None:
            raise self._ended_by or InternalError("a beam search was woken for nothing")
        number, delivery = item
        if number not in self._streams:
            return  # dropped; this was under way
        if delivery is None:
            raise InternalError("the token stream of a beam ended without a finish reason")
        if isinstance(delivery, Failed):
            raise delivery.error
        self._last_s = self._clock.now()
        if not self._is_answered:
            self._is_answered = True
            self._prompt_scores = delivery.outputs[0].prompt_scores
        self._carry_out(self._search.take(number, delivery.outputs))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Fork():
                    stream = self._intake.submit(self._spec_of(action))
                    reading = asyncio.get_running_loop().create_task(self._read(action.stream, stream))
                    self._streams[action.stream] = stream, reading
                case Drop(number):
                    stream, reading = self._streams.pop(number)
                    reading.cancel()
                    stream.finish()

    def _spec_of(self, fork: Fork) -> RequestSpec:
        spec, sampling, num_prefix = self._spec, self._spec.sampling, len(fork.prefix)
        deadline_s = spec.deadline_s
        if deadline_s is not None:
            deadline_s -= self._clock.now() - self._arrived_s
            if deadline_s <= 0:
                raise DeadlineExceeded("The request's deadline passed.")
        is_first = fork.stream == 0
        return msgspec.structs.replace(
            spec,
            request=RequestId(f"{spec.request}-{fork.stream}"),
            token_ids=(*spec.token_ids, *fork.prefix),
            sampling=msgspec.structs.replace(
                sampling,
                max_tokens=fork.max_tokens,
                min_tokens=max(0, sampling.min_tokens - num_prefix),
                prompt_logprobs=sampling.prompt_logprobs if is_first else None,
            ),
            deadline_s=deadline_s,
            is_part=True,
            goes_on=not is_first,
        )

    async def _read(self, number: int, stream: RequestStream) -> None:
        async for delivery in stream:
            self._inbox.put_nowait((number, delivery))
            if isinstance(delivery, Failed) or delivery.finish_reason is not None:
                return
        self._inbox.put_nowait((number, None))

    def _let_go(self, reason: str) -> None:
        for stream, reading in self._streams.values():
            reading.cancel()
            stream.abort(reason)
        self._streams.clear()

    def _record(self, outcome: Outcome) -> RequestRecord:
        summary, usage = self.summary(), self.usage()
        is_local = summary.prefill_worker == summary.decode_worker
        answered = self._is_answered
        return RequestRecord(
            outcome=outcome,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_generated_tokens=usage.num_generated_tokens,
            num_attempts=summary.attempts,
            e2e_s=self._clock.now() - self._arrived_s,
            ttft_s=summary.ttft_s if answered else None,
            tpot_s=None,  # no token is the next one of an answer before all are known
            queue_s=summary.queue_s if answered else None,
            prefill_s=summary.prefill_s if answered else None,
            kv_transfer_s=summary.kv_transfer_s if answered and not is_local else None,
            decode_s=summary.decode_s if answered else None,
            local_prefill=is_local,
        )
