"""Says before anything is drawn which settings cannot work together, one sentence each."""

from __future__ import annotations

import math

from bench.load.plans.settings import (
    Chats,
    Endpoint,
    PlanSettings,
    PromptForm,
    SharedPrefix,
    ShareGpt,
    TraceReplay,
)
from cluster.errors import ConfigError

_OURS = ("model", "stream", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "ignore_eos")
MAX_ID = 2**22  # several times any vocabulary; each id of the range takes memory
MIN_FACTOR, MAX_FACTOR = 1e-6, 1e6


def check_settings(settings: PlanSettings, *, has_server: bool) -> None:
    """Raises:
    ConfigError: a setting that cannot work, alone or with the others.
    """
    _check_form(settings, has_server=has_server)
    _check_body(settings)
    if settings.max_model_len is not None and settings.max_model_len < 2:
        raise ConfigError(
            f"A model of {settings.max_model_len} tokens holds no prompt and output: use 2 or more."
        )
    first, end = settings.id_range
    if not 0 <= first < end:
        raise ConfigError(
            f"The id range {first} to {end} holds no token ids: use a first one from 0 and a larger end."
        )
    if end > MAX_ID:
        raise ConfigError(f"The id range ends at {end}, above {MAX_ID:,}: no vocabulary is so large.")
    workload = settings.workload
    if settings.arrival.kind == "trace" and not isinstance(workload, TraceReplay):
        raise ConfigError("Trace arrivals need a trace: name its file, or use another arrival.")
    match workload:
        case SharedPrefix():
            if workload.num_groups < 1 or workload.prefix_tokens < 1 or not 0 <= workload.skew <= 100:
                raise ConfigError(
                    "Shared prefixes need 1 or more groups, 1 or more prefix tokens and a skew of 0 or more."
                )
        case Chats():
            _check_seconds("think time", workload.think_s)
            if settings.endpoint is not Endpoint.CHAT:
                raise ConfigError("Chats follow the answers they get: use the chat endpoint.")
            if workload.system_tokens < 0:
                raise ConfigError(
                    f"A system message of {workload.system_tokens} tokens cannot be written: use 0 or more."
                )
        case TraceReplay():
            _check_seconds("trace offset", workload.offset_s)
            if not all(MIN_FACTOR <= x <= MAX_FACTOR for x in (workload.scale, workload.speed_up)):
                raise ConfigError(
                    "A trace's scale and speed-up must be numbers above 0, from 0.000001 to 1,000,000."
                )
            if workload.block_tokens < 1:
                raise ConfigError(
                    f"A hash id of {workload.block_tokens} tokens stands for nothing: use 1 or more."
                )
            if workload.random_offset and workload.offset_s:
                raise ConfigError("The trace starts at an offset or at a random row: give one of them.")
        case ShareGpt():
            _check_seconds("think time", workload.think_s)
            if workload.turns < 1:
                raise ConfigError(f"{workload.turns} turns of a conversation are none: use 1 or more.")
            if workload.turns > 1 and settings.endpoint is not Endpoint.CHAT:
                raise ConfigError(
                    "Later turns follow the answers they get: use the chat endpoint, or 1 turn."
                )


def _check_form(settings: PlanSettings, *, has_server: bool) -> None:
    form = settings.form
    workload = settings.workload
    if settings.endpoint is Endpoint.CHAT and form is PromptForm.IDS:
        raise ConfigError(
            "The chat endpoint takes messages, not token ids: use text, or the completions endpoint."
        )
    if isinstance(workload, ShareGpt):
        if form is PromptForm.IDS:
            raise ConfigError("Conversations are text: ask for text prompts.")
        if has_server:
            return
        if workload.output is None:
            raise ConfigError(
                "Recorded answers are as long as the server counts them: name one, or output lengths."
            )
        if settings.max_model_len is not None:
            raise ConfigError("Whether a conversation fits the model takes a server that counts: name one.")
    elif form is PromptForm.TEXT and not has_server:
        raise ConfigError("Texts of exact length take a server with /tokenize: name one, or offer token ids.")


def _check_body(settings: PlanSettings) -> None:
    for name in _OURS:
        if name in settings.extra_body:
            raise ConfigError(f"Extra field `{name}`: the plan decides it, use the setting for it.")
    options = settings.extra_body.get("stream_options", {})
    if not isinstance(options, dict) or options.get("include_usage", True) is not True:
        raise ConfigError(
            "Extra field `stream_options` must be an object that leaves `include_usage` on: lengths are "
            "checked by it."
        )


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"A {name} of {value:g} s cannot be kept: use 0 or more.")
