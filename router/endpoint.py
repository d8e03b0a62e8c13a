"""`/v1/chat/completions` and `/v1/completions`: one raw ASGI endpoint, from bytes in to bytes out.

1. The body is read within its limit, parsed strictly, checked against the model, and turned into a `Job`;
   what takes long (a long prompt, a schema to compile) on a thread, so that other streams go on.
2. Its key's limits are checked before the body is read, and again with what it will use (`router.quotas`).
   Every answer is submitted to the conductor (`router.submission`).
3. Streamed (`router.stream`) or collected. Both ends watch each other: a client that leaves ends the
   generations, a failure becomes an HTTP error or an error event.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from cluster.clock import Clock
from cluster.errors import DeadlineExceeded, NotReady, Overloaded
from cluster.metrics import RequestRecord
from router.api_keys import API_KEY, ApiKey
from router.asgi import (
    BODY_WRITER,
    JSON_TYPE,
    BodyTooLarge,
    ClientLeft,
    HeaderList,
    Receive,
    Scope,
    Send,
    UnsupportedMediaType,
    header,
    read_body,
    require_json,
    send_bytes,
    until_disconnect,
)
from router.best_of import pick_best
from router.chat import ChatFormat, ToolReading
from router.completions import CompletionFormat
from router.constraint import SPELLINGS
from router.gateway import REQUEST_ID, Gateway
from router.generation import Answering, Generation, charge_of, outcome_of, total_usage
from router.job import Job, JobBuilder
from router.openai_errors import PublicError, error_body, error_headers, http_error
from router.quotas.gate import Admission, demand_of
from router.reply import LARGE_NUM_SCORES, Choice, ChoicePlan, ReplyFormat, num_scores_of
from router.schema import ChatRequest, CompletionRequest, field_names, parse_json, parse_request
from router.slo_headers import slo_of
from router.stream import StreamReply
from router.submission import submit
from router.tools import ToolUse

_SLOW_FIELDS = SPELLINGS | {"tools", "chat_template"}  # what compiles something


class Route(Protocol):
    """What is particular to one of the two endpoints."""

    @property
    def id_prefix(self) -> str: ...

    def job(self, builder: JobBuilder, raw: dict[str, Any]) -> Job: ...

    def served(self) -> frozenset[str]: ...

    def wire(
        self, gateway: Gateway, reply_id: str, created: int, job: Job, plans: Sequence[ChoicePlan]
    ) -> ReplyFormat: ...


@dataclass(frozen=True, slots=True)
class ChatRoute:
    id_prefix: str = "chatcmpl"

    def job(self, builder: JobBuilder, raw: dict[str, Any]) -> Job:
        return builder.chat(*parse_request(ChatRequest, raw, builder.limits))

    def served(self) -> frozenset[str]:
        return field_names(ChatRequest)

    def wire(
        self, gateway: Gateway, reply_id: str, created: int, job: Job, plans: Sequence[ChoicePlan]
    ) -> ReplyFormat:
        tools = None
        if job.tools is not None:
            names = frozenset(tool.name for tool in job.tools.tools)
            is_required = job.tools.use is ToolUse.REQUIRED
            most = None if job.tools.parallel else 1
            tools = ToolReading(gateway.tool_format, names, calls_only=is_required, most_calls=most)
        return ChatFormat(reply_id, created, gateway.model.name, gateway.tokenizer, job.reply, plans, tools)


@dataclass(frozen=True, slots=True)
class CompletionRoute:
    id_prefix: str = "cmpl"

    def job(self, builder: JobBuilder, raw: dict[str, Any]) -> Job:
        return builder.completion(*parse_request(CompletionRequest, raw, builder.limits))

    def served(self) -> frozenset[str]:
        return field_names(CompletionRequest)

    def wire(
        self, gateway: Gateway, reply_id: str, created: int, job: Job, plans: Sequence[ChoicePlan]
    ) -> ReplyFormat:
        return CompletionFormat(reply_id, created, gateway.model.name, gateway.tokenizer, job.reply, plans)


@dataclass(frozen=True, slots=True)
class GenerationEndpoint:
    """An ASGI application for POST requests of one kind; see the module's docstring."""

    gateway: Gateway
    route: Route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = self.gateway.clock.now()
        request_id: str = scope[REQUEST_ID]
        try:
            await self._serve(scope, receive, send, arrived_s)
        except ClientLeft:
            return
        except UnsupportedMediaType as error:
            await _send_error(send, http_error(415, str(error)))
        except BodyTooLarge:
            limit = self.gateway.limits.max_body_bytes
            await _send_error(send, http_error(413, f"The request body may have at most {limit} bytes."))
        except Exception as error:  # the top of a request: whatever it was, the client gets an answer
            await _send_error(send, self.gateway.public_error(error, request_id))

    async def _serve(self, scope: Scope, receive: Receive, send: Send, arrived_s: float) -> None:
        gateway = self.gateway
        require_json(scope)
        key: ApiKey | None = scope.get(API_KEY)
        with self._recording_failures(arrived_s):
            gateway.quotas.look(key)
        reply_id = f"{self.route.id_prefix}-{uuid.uuid4().hex}"
        with gateway.bodies.hold() as held:
            with self._recording_failures(arrived_s, Overloaded):
                body = await read_body(scope, receive, gateway.limits.max_body_bytes, held.add)
            with self._recording_failures(arrived_s):
                if gateway.in_flight.draining:
                    raise NotReady("The server is shutting down.", retry_after_s=1.0)
                session = header(scope, b"x-session-id") or header(scope, b"x-session-token")
                job = await self._read_job(body, session)
            del body
        with self._recording_failures(arrived_s):
            admission = await gateway.quotas.take(key, demand_of(job))
            try:
                answers = submit(gateway, replace(job, slo=slo_of(scope)), reply_id, arrived_s, key)
            except Exception:
                admission.settle(None)
                raise
        try:
            await self._reply(scope, receive, send, reply_id, job, answers, admission, arrived_s)
        finally:
            admission.settle(charge_of(answers))

    async def _reply(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        reply_id: str,
        job: Job,
        answers: Sequence[Answering],
        admission: Admission,
        arrived_s: float,
    ) -> None:
        gateway = self.gateway
        generations = [answer for answer in answers if isinstance(answer, Generation)]
        plans = [generation.plan for generation in generations]  # none where the answers are searched for
        wire = self.route.wire(gateway, reply_id, int(time.time()), job, plans)
        ignored = gateway.ignored_fields.tell(job.ignored, self.route.served())

        def headers() -> HeaderList:
            spent_ms = max(0, round((gateway.clock.now() - arrived_s) * 1000))
            items: HeaderList = [(b"openai-processing-ms", str(spent_ms).encode()), *admission.headers()]
            return [*items, (b"x-baton-ignored", ignored.encode())] if ignored else items

        with gateway.in_flight.hold(answers):
            if job.stream:
                reply = StreamReply(
                    generations,
                    wire,
                    job.reply,
                    request_id=scope[REQUEST_ID],
                    patience=gateway.limits.patience,
                    send=send,
                    body=scope.get(BODY_WRITER),
                    headers=headers,
                    aside=gateway.aside,
                )
                await reply.run(receive)
            else:
                body = await self._collect(answers, job, wire, receive)
                await send_bytes(send, 200, [JSON_TYPE, *headers()], body)

    async def _read_job(self, body: bytes, session: str | None) -> Job:
        aside, is_large = self.gateway.aside, len(body) > self.gateway.limits.offload_bytes
        limits = self.gateway.limits.request
        if is_large:
            raw = await aside.run_sized(len(body), parse_json, body, limits.max_json_depth)
        else:
            raw = parse_json(body, limits.max_json_depth)
        if not _SLOW_FIELDS.isdisjoint(raw):
            job = await aside.run_long(self._build, raw)
        elif is_large:
            job = await aside.run_sized(len(body), self._build, raw)
        else:
            job = self._build(raw)
        return (
            job if job.affinity or not session else replace(job, affinity=session[: limits.max_session_chars])
        )

    def _build(self, raw: dict[str, Any]) -> Job:
        self.gateway.check_model(raw.get("model"))
        return self.route.job(self.gateway.job_builder(), raw)

    @contextmanager
    def _recording_failures(self, arrived_s: float, kind: type[Exception] = Exception) -> Iterator[None]:
        """A request that ends in here was none for the cluster, but is one for the metrics."""
        try:
            yield
        except kind as error:
            e2e_s = self.gateway.clock.now() - arrived_s
            self.gateway.metrics.observe_request(RequestRecord(outcome_of(error), 0, 0, 0, 0, e2e_s))
            raise

    async def _collect(
        self, answers: Sequence[Answering], job: Job, wire: ReplyFormat, receive: Receive
    ) -> bytes:
        silence_s = self.gateway.limits.patience.silence_s
        companion = asyncio.create_task(_end_with_client(answers, receive, self.gateway.clock, silence_s))
        try:
            collected = await _collect_all(answers)
        finally:
            companion.cancel()
            await asyncio.gather(companion, return_exceptions=True)
        choices = [choice for several in collected for choice in several]
        summaries = [
            answer.summary() for answer, several in zip(answers, collected, strict=True) for _ in several
        ]
        if job.num_candidates > job.num_choices:
            choices, summaries = pick_best(choices, summaries, job.num_candidates, job.num_choices)
        num_scores = sum(map(num_scores_of, choices))
        body = partial(wire.body, choices, total_usage(answers), summaries)
        return await self.gateway.aside.run(body) if num_scores > LARGE_NUM_SCORES else body()


async def _collect_all(answers: Sequence[Answering]) -> list[list[Choice]]:
    """All choices; the first failure ends the others."""
    if len(answers) == 1:
        return [await answers[0].collect()]
    tasks = [asyncio.create_task(answer.collect()) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    except Exception as error:
        for answer in answers:
            answer.end(error)
        raise
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end_with_client(
    answers: Sequence[Answering], receive: Receive, clock: Clock, silence_s: float
) -> None:
    """End the answers when the client leaves, or when none has made progress for `silence_s`."""
    while True:
        progress_s = max(answer.last_progress_s for answer in answers)
        reason: Exception
        try:
            async with asyncio.timeout(progress_s + silence_s - clock.now()):
                await until_disconnect(receive)
            reason = ClientLeft()
        except TimeoutError:
            if max(answer.last_progress_s for answer in answers) > progress_s:
                continue
            reason = DeadlineExceeded("The cluster made no progress with the request.")
        for answer in answers:
            answer.end(reason)
        return


async def _send_error(send: Send, error: PublicError) -> None:
    await send_bytes(send, error.status, error_headers(error), error_body(error))
