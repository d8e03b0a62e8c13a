"""The HTTP gateway: every route of Baton, one FastAPI application per router.

Routes: `/v1/models`, `/v1/chat/completions`, `/v1/completions`, `/tokenize`, `/detokenize`; `/health` (the
process and its event loop live), `/ready` (a request can be served), `/ping`, `/version`, `/metrics`,
`/cluster`, `/openapi.json`. Generation requests bypass FastAPI's request and response objects
(`router.endpoint`).

Every response has an `x-request-id`: the client's own, if it sent one, else ours. Every error has the OpenAI
shape, also those that FastAPI raises itself. The one owner of fastapi.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from cluster.allowed_origins import parse_origins
from cluster.clock import Clock, MonotonicClock
from cluster.errors import InvalidRequest, RequestError, ServingError
from cluster.metrics import CONTENT_TYPE, Metrics
from cluster.tokenizer import Tokenizer
from router.api_keys import KeyCheck, KeyRing
from router.asgi import (
    BodyTooLarge,
    ClientLeft,
    UnsupportedMediaType,
    read_body,
    require_json,
)
from router.bodies import Bodies
from router.cluster_report import observe_cluster, roles_json, worker_json
from router.delivery import ClusterStatus, RequestIntake
from router.endpoint import ChatRoute, CompletionRoute, GenerationEndpoint
from router.envelope import Envelope, LastAnswer
from router.gateway import REQUEST_ID, Gateway
from router.generation import InFlight
from router.hosts import HostCheck, SideHosts
from router.limits import GatewayLimits
from router.model_info import ModelInfo
from router.openai_errors import PublicError, error_body, error_headers, http_error
from router.openapi import describe
from router.origins import AllowedOrigins
from router.page import PageSource, page_routes
from router.page_feed import PageFeed
from router.public_side import SHIFT_PATH, PrivateRoutes
from router.quotas.gate import QuotaGate
from router.quotas.sharing import Sharing
from router.role_request import MAX_SHIFT_BYTES, ROLES_FIXED, read_shift, require_loopback
from router.role_watch import RoleWatch
from router.tokenize import TextAnswer, detokenize, tokenize, within_limits
from router.tool_formats import FORMATS, format_of
from router.vocabulary import GrammarsAhead

_GET = ["GET", "HEAD"]  # who watches a server often asks for the head alone
_HTTP_MESSAGES = {404: "There is no such path here.", 405: "This path does not take this method."}


def create_app(
    intake: RequestIntake,
    status: ClusterStatus,
    tokenizer: Tokenizer,
    model: ModelInfo,
    metrics: Metrics,
    *,
    version: str,
    limits: GatewayLimits | None = None,
    clock: Clock | None = None,
    launcher_pid: int | None = None,
    feed: PageFeed | None = None,
    sharing: Sharing | None = None,
    hosts: SideHosts | None = None,
    roles: RoleWatch | None = None,
) -> FastAPI:
    """The application; `app.state.in_flight` (`InFlight`) is what a stopping server drains.

    Raises:
        ConfigError: the file with API keys cannot be used, or an allowed origin is none.
    """
    limits, clock = limits or GatewayLimits(), clock or MonotonicClock()
    name = limits.tool_format
    gateway = Gateway(
        intake=intake,
        status=status,
        tokenizer=tokenizer,
        model=model,
        metrics=metrics,
        clock=clock,
        limits=limits,
        in_flight=InFlight(),
        quotas=QuotaGate(clock, metrics, sharing),
        grammars=GrammarsAhead(tokenizer),
        tool_format=format_of(tokenizer.chat_template) if name == "auto" else FORMATS[name],
        bodies=Bodies(limits.max_bodies_bytes),
    )
    app = FastAPI(
        title="Baton",
        version=version,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.in_flight = gateway.in_flight
    app.state.quotas = gateway.quotas
    app.state.bodies = gateway.bodies
    page = PageSource(feed or PageFeed(), status, gateway.in_flight, model.name, version, gateway.clock.now)
    app.router.routes.extend(page_routes(page, limits.max_viewers))
    for path, endpoint in (
        ("/v1/chat/completions", GenerationEndpoint(gateway, ChatRoute())),
        ("/v1/completions", GenerationEndpoint(gateway, CompletionRoute())),
    ):
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    _add_model_routes(app, gateway)
    _add_text_routes(app, gateway)
    _add_status_routes(app, gateway, version, launcher_pid, roles)
    _add_error_handlers(app, gateway)
    app.add_middleware(PrivateRoutes)
    if limits.api_keys_file is not None:
        keys = KeyRing(Path(limits.api_keys_file).expanduser(), clock, limits.key_limits)
        app.add_middleware(KeyCheck, keys=keys)
    app.add_middleware(LastAnswer)
    if limits.allowed_origins:
        app.add_middleware(AllowedOrigins, origins=parse_origins(limits.allowed_origins))
    app.add_middleware(HostCheck, hosts=hosts or SideHosts())
    app.add_middleware(Envelope, metrics=metrics)
    return app


# ---- routes --------------------------------------------------------------------------------------


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def _told(gateway: Gateway, answer: TextAnswer) -> Response:
    """An answer, the fields that had no effect on it, and where its key's limits stand."""
    response = Response(answer.body, media_type="application/json")
    for name, value in answer.limits:
        response.headers[name.decode()] = value.decode()
    if ignored := gateway.ignored_fields.tell(answer.ignored, answer.served):
        response.headers["x-baton-ignored"] = ignored
    return response


def _add_model_routes(app: FastAPI, gateway: Gateway) -> None:
    def card() -> dict[str, Any]:
        model, defaults = gateway.model, gateway.model.defaults
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "baton",
            "root": model.root,
            "parent": None,
            "max_model_len": gateway.job_builder().max_model_len,
            "default_sampling": {
                "temperature": defaults.temperature,
                "top_p": defaults.top_p,
                "top_k": defaults.top_k,
                "min_p": defaults.min_p,
                "repetition_penalty": defaults.repetition_penalty,
            },
        }

    @app.api_route("/v1/models", methods=_GET)
    async def list_models() -> Response:
        return _json({"object": "list", "data": [card()]})

    @app.api_route("/v1/models/{name:path}", methods=_GET)
    async def show_model(name: str) -> Response:
        gateway.check_model(name)
        return _json(card())


def _add_text_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/tokenize")
    async def tokenize_route(request: Request) -> Response:
        return _told(gateway, await within_limits(gateway, request.scope, request.receive, tokenize))

    @app.post("/detokenize")
    async def detokenize_route(request: Request) -> Response:
        return _told(gateway, await within_limits(gateway, request.scope, request.receive, detokenize))


def _add_status_routes(
    app: FastAPI, gateway: Gateway, version: str, launcher_pid: int | None, roles: RoleWatch | None
) -> None:
    @app.api_route("/health", methods=_GET)
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.api_route("/ping", methods=_GET)
    async def ping() -> Response:
        return _json({})

    description = orjson.dumps(describe(version, gateway.limits.request))

    @app.api_route("/openapi.json", methods=_GET)
    async def show_description() -> Response:
        return Response(description, media_type="application/json")

    @app.api_route("/version", methods=_GET)
    async def show_version() -> Response:
        return _json({"version": version})

    @app.api_route("/ready", methods=_GET)
    async def ready() -> Response:
        readiness = gateway.status.ready()
        if gateway.in_flight.draining:
            return _json({"status": "not_ready", "phase": "draining"}, 503)
        if not readiness.ready:
            return _json({"status": "not_ready", "phase": readiness.phase}, 503)
        return _json({"status": "ready", "phase": readiness.phase})

    @app.api_route("/cluster", methods=_GET)
    async def show_cluster() -> Response:
        snapshot = gateway.status.cluster()
        return _json(
            {
                "state": "draining" if gateway.in_flight.draining else snapshot.state,
                "queued": snapshot.queued,
                "in_flight": len(gateway.in_flight),
                "router_pid": os.getpid(),
                "launcher_pid": launcher_pid,
                "stale_messages": {reason.value: num for reason, num in snapshot.stale_messages.items()},
                "role_shifts": roles_json(roles, snapshot),
                "workers": [worker_json(worker) for worker in snapshot.workers],
            }
        )

    @app.post(SHIFT_PATH)
    async def shift_role(request: Request) -> Response:
        require_json(request.scope)
        require_loopback(request.client)
        wish = read_shift(await read_body(request.scope, request.receive, MAX_SHIFT_BYTES))
        if roles is None:
            raise InvalidRequest(ROLES_FIXED)
        workers = gateway.status.cluster().workers
        roles.ask(wish.worker, wish.role, workers)
        return _json(roles.picture(workers), 202)

    scraping = asyncio.Lock()

    @app.api_route("/metrics", methods=_GET)
    async def show_metrics() -> Response:
        async with scraping:  # what is rendered on a thread stays as it is meanwhile
            observe_cluster(gateway.metrics, gateway.status, gateway.in_flight, gateway.status.cluster())
            page = await gateway.aside.run(gateway.metrics.render)
        return Response(page, headers={"content-type": CONTENT_TYPE})


# ---- errors --------------------------------------------------------------------------------------


def _add_error_handlers(app: FastAPI, gateway: Gateway) -> None:
    def answer(error: PublicError, request: Request) -> Response:
        response = Response(error_body(error), status_code=error.status)
        for name, value in error_headers(error):
            response.headers[name.decode()] = value.decode()
        return response

    async def on_deliberate(request: Request, error: Exception) -> Response:
        return answer(gateway.public_error(error, request.scope[REQUEST_ID]), request)

    async def on_http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        response = answer(http_error(status, _HTTP_MESSAGES.get(status, "The request failed.")), request)
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    async def on_large(request: Request, error: Exception) -> Response:
        return answer(http_error(413, "The request body is too large."), request)

    async def on_media_type(request: Request, error: Exception) -> Response:
        return answer(http_error(415, str(error)), request)

    async def on_client_left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    app.add_exception_handler(RequestError, on_deliberate)
    app.add_exception_handler(ServingError, on_deliberate)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(BodyTooLarge, on_large)
    app.add_exception_handler(UnsupportedMediaType, on_media_type)
    app.add_exception_handler(ClientLeft, on_client_left)
