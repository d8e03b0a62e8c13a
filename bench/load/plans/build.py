"""Brings together when and what: settings in, a `Plan` out.

1. The settings are checked against one another.
2. The workload gives units (`workloads`), the arrival their times (`arrivals`, `replay`); what does not fit
   the model is skipped or cut.
3. Every draft is written (`prompts`) and becomes a `PlannedRequest`, in order of arrival, turns of a chat
   together.
4. `Plan.workload` tells the settings and what was counted on the way.

The plan is a function of settings, trace file and, for text, the server's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

import msgspec

from bench.load.plan import Arrival, Plan, PlannedRequest, TraceSource
from bench.load.plans.arrivals import schedule
from bench.load.plans.prompts import ChatWriter, Draft, IdsWriter, LiteralWriter, TextWriter, Writer
from bench.load.plans.replay import num_skipped_among, select
from bench.load.plans.settings import (
    Chats,
    Endpoint,
    PlanSettings,
    PromptForm,
    SharedPrefix,
    ShareGpt,
    Synthetic,
    TraceReplay,
)
from bench.load.plans.settings_check import check_settings
from bench.load.plans.sharegpt_units import conversation_units
from bench.load.plans.tokenize_client import TokenizeClient
from bench.load.plans.tokens import TokenStream, num_tokens
from bench.load.plans.traces import read_trace
from bench.load.plans.workloads import (
    Unit,
    chat_units,
    fit_chat,
    fit_draft,
    replay_units,
    shared_prefix_units,
    synthetic_units,
)
from cluster.errors import ConfigError

MAX_SPAN_S = 1e9  # 30 years


@dataclass(frozen=True, slots=True)
class Offer:
    """Units and their times, before anything is written."""

    units: Sequence[Unit]
    times_s: Sequence[float]
    arrival: Arrival
    facts: dict[str, Any] = field(default_factory=dict)
    trace: TraceSource | None = None


def build_plan(settings: PlanSettings, server: TokenizeClient | None) -> Plan:
    """Everything that will be offered. `server` counts the tokens of texts; prompts of ids do without.

    Raises:
        ConfigError: settings that cannot work together, or lengths that cannot be written.
        TraceError: a trace or conversation file is not what it should be.
        TokenizeError: the server does not count tokens.
    """
    check_settings(settings, has_server=server is not None)
    writer = _writer(settings, server)
    offer = _offer(settings, server, writer)
    _check_end(offer)
    requests, num_raised = _write(offer, writer, settings)
    known_inputs = [request.input_tokens for request in requests if request.input_tokens is not None]
    workload = {
        **msgspec.to_builtins(settings.workload),
        "prompt_form": settings.form.value,
        "seed": settings.seed,
        "salt": settings.salt,
        "max_model_len": settings.max_model_len,
        "oversize": settings.oversize.value,
        "num_arrivals": len(offer.units),
        "num_requests": len(requests),
        "total_known_input_tokens": sum(known_inputs),
        "total_max_output_tokens": sum(request.body["max_tokens"] for request in requests),
        "num_raised_to_template": num_raised,
        **offer.facts,
    }
    return Plan(
        endpoint=settings.endpoint.path,
        shared_body=_shared_body(settings),
        requests=tuple(requests),
        arrival=_with_seed(offer.arrival, settings.seed),
        workload=workload,
        trace=offer.trace,
    )


def check_plan(settings: PlanSettings, server: TokenizeClient | None) -> None:
    """Everything of `build_plan` except writing the prompts, to know early whether it will work.

    Raises:
        BatonError: as `build_plan`.
    """
    check_settings(settings, has_server=server is not None)
    _check_end(_offer(settings, server, _writer(settings, server)))


def _check_end(offer: Offer) -> None:
    last_s = max(offer.times_s, default=0.0)
    if last_s > MAX_SPAN_S:
        raise ConfigError(
            f"The last request would be due after {last_s:.3g} s: use a higher rate, a shorter --duration or "
            "fewer requests; of a trace, look at its timestamps."
        )


def _with_seed(arrival: Arrival, seed: int) -> Arrival:
    """Arrivals that draw nothing are told with the plan's seed, which decided everything else."""
    if arrival.kind in ("constant", "burst", "closed-loop", "trace"):
        return msgspec.structs.replace(arrival, seed=seed)
    return arrival


def _shared_body(settings: PlanSettings) -> dict[str, Any]:
    extra = dict(settings.extra_body)
    stream_options = {"include_usage": True, **extra.pop("stream_options", {})}
    body: dict[str, Any] = {
        "model": settings.model,
        "stream": True,
        "stream_options": stream_options,
        "temperature": settings.temperature,
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    return body | extra


def _writer(settings: PlanSettings, server: TokenizeClient | None) -> Writer:
    stream = TokenStream(settings.seed, settings.salt)
    if settings.form is PromptForm.IDS:
        return IdsWriter(stream, *settings.id_range)
    is_chat = settings.endpoint is Endpoint.CHAT
    if server is None:
        return LiteralWriter(is_chat=is_chat)
    return ChatWriter(stream, server) if is_chat else TextWriter(stream, server)


def _offer(settings: PlanSettings, server: TokenizeClient | None, writer: Writer) -> Offer:
    workload = settings.workload
    if isinstance(workload, TraceReplay):
        return _offer_trace(settings, workload)
    arrival = settings.arrival
    times_s = schedule(arrival, settings.num_requests, settings.duration_s)
    match workload:
        case ShareGpt():
            found = conversation_units(workload, settings, len(times_s), server)
            return Offer(found.units, times_s, arrival, found.facts, found.source)
        case Chats():
            assert isinstance(writer, ChatWriter), "check_settings lets chats through with a server only"
            chats = chat_units(workload, settings.seed, len(times_s))
            return _fit_chats(Offer(chats, times_s, arrival), workload, settings, writer)
        case Synthetic():
            units = synthetic_units(workload, settings.seed, len(times_s))
        case SharedPrefix():
            units = shared_prefix_units(workload, settings.seed, len(times_s))
        case _:
            assert_never(workload)
    return _fit_drawn(Offer(units, times_s, arrival), settings)


def _offer_trace(settings: PlanSettings, workload: TraceReplay) -> Offer:
    trace = read_trace(Path(workload.path), workload.format)
    selection = select(trace, workload, settings)
    source = TraceSource(
        path=trace.path,
        sha256=trace.sha256,
        format=trace.format,
        speed_up=selection.speed_up,
        num_rows=len(selection.rows),
        num_rows_skipped=num_skipped_among(selection.rows),
    )
    units = replay_units(workload, selection.rows)
    return Offer(units, selection.times_s, selection.arrival, selection.facts, source)


def _fit_drawn(offer: Offer, settings: PlanSettings) -> Offer:
    limit = settings.max_model_len
    units: list[Unit] = []
    num_clamped = 0
    for (draft,) in offer.units:
        fitting = fit_draft(draft, limit, settings.oversize)
        if fitting is None:
            assert not isinstance(draft.prompt, str)
            raise _too_long(num_tokens(draft.prompt), draft.output_tokens, limit)
        num_clamped += fitting is not draft
        units.append((fitting,))
    return Offer(units, offer.times_s, offer.arrival, {"num_oversize_clamped": num_clamped})


def _fit_chats(offer: Offer, workload: Chats, settings: PlanSettings, writer: ChatWriter) -> Offer:
    limit = settings.max_model_len
    first_added = writer.system_overhead() if workload.system_tokens else writer.template_tokens
    units: list[Unit] = []
    num_cut = 0
    for unit in offer.units:
        fitting = fit_chat(unit, limit, settings.oversize, first_added, writer.turn_tokens)
        if fitting is None:
            raise ConfigError(
                f"A chat of {len(unit)} turns does not fit the model's {limit} tokens: use fewer turns or "
                "shorter messages and answers, or clamp (which leaves the last turns out)."
            )
        num_cut += len(unit) - len(fitting)
        units.append(fitting)
    facts = {"num_turns_oversize_cut": num_cut, "template_tokens": first_added}
    return Offer(units, offer.times_s, offer.arrival, facts)


def _too_long(input_tokens: int, output_tokens: int, limit: int | None) -> ConfigError:
    return ConfigError(
        f"A drawn request of {input_tokens} + {output_tokens} tokens does not fit the model's {limit}: give "
        "the lengths a `max`, or clamp them."
    )


def _write(offer: Offer, writer: Writer, settings: PlanSettings) -> tuple[list[PlannedRequest], int]:
    requests: list[PlannedRequest] = []
    num_raised = 0
    for unit, scheduled_s in zip(offer.units, offer.times_s, strict=True):
        for draft in unit:
            written = writer.write(draft)
            num_raised += _is_raised(draft, written.input_tokens)
            requests.append(
                PlannedRequest(
                    index=len(requests),
                    scheduled_s=scheduled_s,
                    body={**written.body, "max_tokens": draft.output_tokens},
                    input_tokens=written.input_tokens,
                    output_tokens=draft.output_tokens if settings.ignore_eos else None,
                    session=draft.session,
                    turn=draft.turn,
                    think_s=draft.think_s,
                    prefix_group=draft.prefix_group,
                )
            )
    return requests, num_raised


def _is_raised(draft: Draft, input_tokens: int | None) -> bool:
    """Whether the prompt came out longer than drafted, because the server adds more than that."""
    if draft.session is not None or isinstance(draft.prompt, str) or input_tokens is None:
        return False
    return input_tokens > num_tokens(draft.prompt)
