"""`/v1/chat/completions` and `/v1/completions`: one raw ASGI endpoint, from bytes in to bytes out.

1. The body is read within its limit, parsed strictly, checked against the model, and turned into a `Job`;
   large ones on a thread, so that tokenizing a long prompt does not stop other streams.
2. Every prompt is submitted to the conductor. If one is refused, none runs on.
3. Streamed (`router.stream`) or collected. Both ends watch each other: a client that leaves ends the
   generation, a failure becomes an HTTP error or an error event.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.clock import Clock
from cluster.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, NotReady
from cluster.ids import RequestId
from cluster.metrics import Metrics, RequestRecord
from cluster.request import RequestSlo, RequestSpec
from cluster.tokenizer import Tokenizer
from router.asgi import (
    JSON_TYPE,
    BodyTooLarge,
    ClientLeft,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    send_bytes,
    until_disconnect,
)
from router.chat import ChatFormat
from router.completions import CompletionFormat
from router.delivery import ClusterStatus, RequestIntake
from router.generation import Generation, InFlight, outcome_of, total_usage
from router.job import Job, JobBuilder
from router.model_info import ModelInfo
from router.openai_errors import PublicError, error_body, error_headers, http_error, public_error
from router.output import ChoiceOutput
from router.reply import Choice, ReplyFormat
from router.schema import ChatRequest, CompletionRequest, parse_json, parse_request
from router.slo_headers import slo_of
from router.stream import Patience, StreamReply

REQUEST_ID = "baton.request_id"  # key of the scope: the client's label, or one of ours


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """What one request may cost the gateway."""

    max_body_bytes: int = 8 * 2**20
    offload_bytes: int = 32 * 2**10  # bodies above this are parsed and tokenized on a thread
    request_deadline_s: float | None = None  # None: as long as it takes
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What all endpoints share."""

    intake: RequestIntake
    status: ClusterStatus
    tokenizer: Tokenizer
    model: ModelInfo
    metrics: Metrics
    clock: Clock
    limits: GatewayLimits
    in_flight: InFlight

    def job_builder(self) -> JobBuilder:
        here = self.status.max_model_len()
        limit = self.model.max_model_len
        return JobBuilder(self.tokenizer, self.model, limit if here is None else min(limit, here))

    def check_model(self, name: Any) -> None:
        """Raises `ModelNotFound`, or `InvalidRequest` for a name that is not a string."""
        if name is None or name == self.model.name:
            return
        if not isinstance(name, str):
            raise InvalidRequest("`model` must be a string.", param="model")
        raise ModelNotFound(f"The model `{name[:100]}` is not served here; `{self.model.name}` is.")


def chat_job(builder: JobBuilder, raw: dict[str, Any]) -> Job:
    return builder.chat(parse_request(ChatRequest, raw))


def completion_job(builder: JobBuilder, raw: dict[str, Any]) -> Job:
    return builder.completion(parse_request(CompletionRequest, raw))


@dataclass(frozen=True, slots=True)
class GenerationEndpoint:
    """An ASGI application for POST requests of one kind; see the module's docstring."""

    gateway: Gateway
    build_job: Callable[[JobBuilder, dict[str, Any]], Job]
    wire: type[ChatFormat] | type[CompletionFormat]
    id_prefix: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = self.gateway.clock.now()
        request_id: str = scope[REQUEST_ID]
        try:
            await self._serve(scope, receive, send, arrived_s)
        except ClientLeft:
            return
        except UnsupportedMediaType:
            await _send_error(send, http_error(415, "Send the request as `Content-Type: application/json`."))
        except BodyTooLarge:
            limit = self.gateway.limits.max_body_bytes
            await _send_error(send, http_error(413, f"The request body may have at most {limit} bytes."))
        except Exception as error:  # the top of a request: whatever it was, the client gets an answer
            await _send_error(send, public_error(error, request_id))

    async def _serve(self, scope: Scope, receive: Receive, send: Send, arrived_s: float) -> None:
        gateway = self.gateway
        if not _is_json(header(scope, b"content-type")):
            raise UnsupportedMediaType
        body = await read_body(scope, receive, gateway.limits.max_body_bytes)
        try:
            if gateway.in_flight.draining:
                raise NotReady("The server is shutting down.", retry_after_s=1.0)
            if len(body) > gateway.limits.offload_bytes:
                job = await asyncio.to_thread(self._parse, body)
            else:
                job = self._parse(body)
            reply_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
            generations = self._submit(job, reply_id, arrived_s, slo_of(scope))
        except Exception as error:
            e2e_s = gateway.clock.now() - arrived_s
            gateway.metrics.observe_request(RequestRecord(outcome_of(error), 0, 0, 0, 0, e2e_s))
            raise
        wire = self.wire(
            reply_id, int(time.time()), gateway.model.name, gateway.tokenizer, job.reply, job.prompts[0]
        )
        with gateway.in_flight.hold(generations):
            if job.stream:
                reply = StreamReply(
                    generations[0],
                    wire,
                    job.reply,
                    request_id=scope[REQUEST_ID],
                    patience=gateway.limits.patience,
                    send=send,
                )
                await reply.run(receive)
            else:
                await self._collect(generations, wire, receive, send)

    def _parse(self, body: bytes) -> Job:
        raw = parse_json(body)
        self.gateway.check_model(raw.get("model"))
        return self.build_job(self.gateway.job_builder(), raw)

    def _submit(self, job: Job, reply_id: str, arrived_s: float, slo: RequestSlo) -> list[Generation]:
        gateway = self.gateway
        generations: list[Generation] = []
        try:
            for index, (prompt, sampling) in enumerate(zip(job.prompts, job.sampling, strict=True)):
                name = reply_id if len(job.prompts) == 1 else f"{reply_id}-{index}"
                spec = RequestSpec(
                    request=RequestId(name),
                    token_ids=prompt,
                    sampling=sampling,
                    cache_salt=job.cache_salt,
                    deadline_s=gateway.limits.request_deadline_s,
                    slo=slo,
                )
                stream = gateway.intake.submit(spec)
                output = ChoiceOutput(gateway.tokenizer, job.text, keep_entries=job.reply.keep_entries)
                generations.append(
                    Generation(
                        stream,
                        output,
                        prompt,
                        index=index,
                        arrived_s=arrived_s,
                        clock=gateway.clock,
                        metrics=gateway.metrics,
                    )
                )
        except Exception as error:
            for generation in generations:
                generation.end(error)
                generation.close()
            raise
        return generations

    async def _collect(
        self, generations: Sequence[Generation], wire: ReplyFormat, receive: Receive, send: Send
    ) -> None:
        silence_s = self.gateway.limits.patience.silence_s
        companion = asyncio.create_task(_end_with_client(generations, receive, self.gateway.clock, silence_s))
        try:
            choices = await _collect_all(generations)
        finally:
            companion.cancel()
            await asyncio.gather(companion, return_exceptions=True)
        body = wire.body(choices, total_usage(generations), [item.summary() for item in generations])
        await send_bytes(send, 200, [JSON_TYPE], body)


class UnsupportedMediaType(Exception):
    """The body is not declared as JSON. Browsers cannot send JSON across origins without asking first."""


def _is_json(content_type: str | None) -> bool:
    if content_type is None:
        return False
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


async def _collect_all(generations: Sequence[Generation]) -> list[Choice]:
    """All choices; the first failure ends the others."""
    if len(generations) == 1:
        return [await generations[0].collect()]
    tasks = [asyncio.create_task(generation.collect()) for generation in generations]
    try:
        return await asyncio.gather(*tasks)
    except Exception as error:
        for generation in generations:
            generation.end(error)
        raise
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end_with_client(
    generations: Sequence[Generation], receive: Receive, clock: Clock, silence_s: float
) -> None:
    """End the generations when the client leaves, or when none has made progress for `silence_s`."""
    while True:
        progress_s = max(generation.last_progress_s for generation in generations)
        reason: Exception
        try:
            async with asyncio.timeout(progress_s + silence_s - clock.now()):
                await until_disconnect(receive)
            reason = ClientLeft()
        except TimeoutError:
            if max(generation.last_progress_s for generation in generations) > progress_s:
                continue
            reason = DeadlineExceeded("The cluster made no progress with the request.")
        for generation in generations:
            generation.end(reason)
        return


async def _send_error(send: Send, error: PublicError) -> None:
    await send_bytes(send, error.status, error_headers(error), error_body(error))
