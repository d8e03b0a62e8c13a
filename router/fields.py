"""Which request fields exist, beside the ones a schema serves: nothing a client sends is silently ignored.

1. A JSON null counts as "not sent", everywhere.
2. A field of the schema goes on to be validated.
3. Bookkeeping that asks for nothing (`BOOKKEEPING`) is accepted if it has its type.
4. A known field that is not served (`UNSUPPORTED`) is accepted only at the value that asks for nothing, and
   otherwise refused with what to do instead.
5. `INTERNAL` names belong to transfers inside a cluster; no client sets them.
6. Anything else is refused by name, with a suggestion.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest

# Labels for the client's own use, and the type each must have; they cannot change an answer.
BOOKKEEPING: dict[str, tuple[type, str]] = {
    "user": (str, "a string"),
    "metadata": (dict, "an object"),
    "safety_identifier": (str, "a string"),
    "prompt_cache_key": (str, "a string"),
    "parallel_tool_calls": (bool, "a boolean"),
    "session_id": (str, "a string"),
}

INTERNAL = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "transfer_id", "transfer_params"),
        *(
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "bootstrap_pair_key",
            "disagg_prefill_dp_rank",
        ),
        *("do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host"),
        *(
            "remote_port",
            "data_parallel_rank",
            "tp_size",
            "dp_rank",
            "rid",
            "extra_key",
            "kv_address",
            "lease",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """`neutral`: the values that ask for nothing. `hint`: what to do instead, if there is something."""

    neutral: tuple[Any, ...] = ()
    hint: str = ""


_TOOLS = Unsupported(neutral=([],), hint="tool calls are not served yet")
_GUIDED = Unsupported(hint="structured output is not served yet")
_BEAMS = Unsupported(hint="beam search is not served")
_TEMPLATE = Unsupported(hint="the model's own chat template is used")

UNSUPPORTED: dict[str, Unsupported] = {
    "n": Unsupported((1,), "send one request per choice"),
    "best_of": Unsupported((1,), "send one request per candidate"),
    "tools": _TOOLS,
    "tool_choice": Unsupported(("none",), "tool calls are not served yet"),
    "functions": _TOOLS,
    "function_call": Unsupported(("none",), "tool calls are not served yet"),
    "response_format": Unsupported(({"type": "text"},), "structured output is not served yet"),
    "structured_outputs": _GUIDED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "json_schema": _GUIDED,
    "regex": _GUIDED,
    "ebnf": _GUIDED,
    "structural_tag": _GUIDED,
    "stop_regex": _GUIDED,
    "echo": Unsupported((False,), "the prompt is not repeated in the answer"),
    "suffix": Unsupported(("",), "text cannot be inserted before a suffix"),
    "prompt_logprobs": Unsupported((), "only generated tokens have log-probabilities"),
    "prompt_embeds": Unsupported((), "send text or token ids"),
    "modalities": Unsupported((["text"],), "the model writes text only"),
    "audio": Unsupported((), "the model writes text only"),
    "prediction": Unsupported(),
    "web_search_options": Unsupported(),
    "moderation": Unsupported(),
    "store": Unsupported((False,), "nothing is stored"),
    "service_tier": Unsupported(("auto", "default"), "there is one tier"),
    "priority": Unsupported((0,), "requests are served in order of arrival"),
    "verbosity": Unsupported(("medium",)),
    "reasoning_effort": Unsupported(("none",)),
    "include_reasoning": Unsupported((True,)),
    "separate_reasoning": Unsupported((False,)),
    "thinking_token_budget": Unsupported(),
    "documents": Unsupported(([],)),
    "chat_template": _TEMPLATE,
    "mm_processor_kwargs": Unsupported(),
    "logits_processors": Unsupported(([],)),
    "custom_logit_processor": Unsupported(),
    "use_beam_search": Unsupported((False,), "beam search is not served"),
    "beam_width": _BEAMS,
    "length_penalty": Unsupported((1, 1.0), "beam search is not served"),
    "early_stopping": Unsupported((False,), "beam search is not served"),
    "no_stop_trim": Unsupported((False,), "use `include_stop_str_in_output`"),
    "request_id": Unsupported((), "send an `X-Request-Id` header"),
    "return_tokens_as_token_ids": Unsupported((False,), "use `return_token_ids`"),
    "lora_path": Unsupported(),
    "return_hidden_states": Unsupported((False,)),
    "return_progress": Unsupported((False,)),
    "repetition_detection": Unsupported(),
}


def screen_fields(raw: dict[str, Any], served: Collection[str]) -> dict[str, Any]:
    """The fields of `raw` that a schema with the names `served` has to look at.

    Raises:
        InvalidRequest: an internal, unsupported or unknown field.
    """
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        if name in served:
            if value is not None:
                kept[name] = value
        elif name in BOOKKEEPING:
            kind, described = BOOKKEEPING[name]
            if value is not None and type(value) is not kind:
                raise InvalidRequest(f"`{name}` must be {described}.", param=name)
        elif name in UNSUPPORTED:
            if value is not None:
                _refuse_unless_neutral(name, value, UNSUPPORTED[name])
        elif name in INTERNAL:
            if value is not None:
                raise InvalidRequest(
                    f"`{name}` is internal to a cluster and never taken from a client.",
                    param=name,
                    code="internal_parameter",
                )
        else:
            raise _unknown(name, served)
    return kept


def _refuse_unless_neutral(name: str, value: Any, rule: Unsupported) -> None:
    if any(type(value) is type(neutral) and value == neutral for neutral in rule.neutral):
        return
    message = f"`{name}` is not supported"
    if rule.neutral:
        message += " with this value"
    raise InvalidRequest(
        f"{message}: {rule.hint}." if rule.hint else f"{message}.", param=name, code="unsupported_parameter"
    )


def _unknown(name: str, served: Collection[str]) -> InvalidRequest:
    shown = name if len(name) <= 64 else name[:64] + "…"
    close = difflib.get_close_matches(shown, [*served, *UNSUPPORTED, *BOOKKEEPING], n=1)
    suggestion = f" Did you mean `{close[0]}`?" if close else ""
    return InvalidRequest(f"Unknown field: `{shown}`.{suggestion}", param=shown, code="unknown_parameter")
