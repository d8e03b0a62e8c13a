"""What a run offers: every request, decided before the first one is sent.

A plan is a function of its settings and a seed alone, so the same plan can be offered to several servers.

1. `arrivals` says when, `workloads` say what; together they make a `Plan`.
2. `client` offers it: open loop sends request i at `scheduled_s`; closed loop sends the next one whenever a
   slot is free; a later turn of a chat follows its answer.
3. Each request comes back as one `records.RequestRecord`, whatever became of it.
"""

from __future__ import annotations

from typing import Any

import msgspec


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request to offer.

    `body` is the JSON object of the request without what every request of the run shares
    (`Plan.shared_body`). In a chat, turn 0 is an ordinary request; turn k > 0 is sent `think_s` after the
    answer of turn k - 1, to which its scheduled time then refers, and its `messages` follow the history of
    its session (all earlier messages and answers). A turn whose earlier turn failed is not sent; its record
    says `skipped`.
    """

    index: int  # position in the plan, from 0
    scheduled_s: float  # since the run's start; closed loop: 0.0
    body: dict[str, Any]  # "prompt" (ids or text) or "messages", "max_tokens", ...
    input_tokens: int | None = None  # to be checked against usage.prompt_tokens; None: not known before
    output_tokens: int | None = (
        None  # to be checked against usage.completion_tokens; None: the model may stop
    )
    session: int | None = None  # requests of one chat share it and run in order
    turn: int = 0
    think_s: float = 0.0
    prefix_group: int | None = None  # requests whose prompts begin alike


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """How requests arrive, as the result file tells it."""

    kind: str  # "poisson", "gamma", "constant", "ramp", "piecewise", "trace", "burst", "closed-loop"
    seed: int
    rate: float | None = None  # requests per second, mean; None: no rate (closed loop, burst)
    burstiness: float = 1.0  # gamma shape; 1 is Poisson
    closed_loop: int | None = None  # requests in flight, closed loop only
    details: dict[str, Any] = {}  # ramp ends, pieces, ...


class TraceSource(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    sha256: str
    format: str  # "azure", "mooncake", "burstgpt", "canonical", "sharegpt"
    speed_up: float = 1.0
    num_rows: int = 0  # rows taken, each one arrival
    num_rows_skipped: int = 0  # rows between those: without tokens, or too long for the model


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str  # "/v1/completions" or "/v1/chat/completions"
    shared_body: dict[str, Any]  # model, stream, stream_options, temperature, ignore_eos, ...
    requests: tuple[PlannedRequest, ...]
    arrival: Arrival
    workload: dict[str, Any]  # settings of the workload, as the result file tells them
    trace: TraceSource | None = None
