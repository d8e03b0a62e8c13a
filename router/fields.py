"""Which request fields exist, beside the ones a schema serves: nothing a client sends is silently ignored.

1. A JSON null counts as "not sent", everywhere.
2. A field of the schema goes on to be validated.
3. `ACCEPTED` fields are taken if they have their type: labels that nothing is done with, and wishes that
   cannot change an answer's correctness. They are ignored as in 6, but at a value that asks for nothing.
4. A known field that is not served (`UNSUPPORTED`) is accepted only at the value that asks for nothing, and
   otherwise refused with what to do instead. So is a field of another route.
5. `INTERNAL` names belong to transfers inside a cluster; no client sets them.
6. Anything else is ignored as clients expect, but never silently: the reply's `x-baton-ignored` header names
   it, with a suggestion, and the log does so once.

How many fields a request may have is limited: everything here is done on the event loop.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cluster.errors import InvalidRequest

logger = logging.getLogger(__name__)

_MAX_NAMED = 8  # ignored fields that one header names
_HEADER_TEXT = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_STRING, _BOOLEAN, _OBJECT = (str, "a string"), (bool, "a boolean"), (dict, "an object")

# Field |-> the type it must have.
ACCEPTED: dict[str, tuple[type, str]] = {
    "metadata": _OBJECT,
    "safety_identifier": _STRING,
    "request_id": _STRING,
    "include_reasoning": _BOOLEAN,  # reasoning is part of the text, for whoever wants to split it
    "prompt_cache_retention": _STRING,  # prefixes are kept as long as there is room
    "service_tier": _STRING,
    "store": _BOOLEAN,
    "verbosity": _STRING,
    "prediction": _OBJECT,
    "web_search_options": _OBJECT,
    "moderation": _OBJECT,
    "modalities": (list, "a list"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "metadata": ({},),
    "include_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "modalities": (["text"],),
}

# What clients copy into a message from an earlier answer or keep there for themselves.
MESSAGE_LABELS = frozenset(
    {"id", "metadata", "provider_specific_fields", "reasoning_details", "status", "thinking_blocks"}
)

INTERNAL = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "transfer_id", "transfer_params"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        *("disagg_prefill_dp_rank", "do_remote_decode", "do_remote_prefill", "remote_engine_id"),
        *("remote_block_ids", "remote_host", "remote_port", "data_parallel_rank", "tp_size", "dp_rank"),
        *("rid", "extra_key", "kv_address", "lease"),
    }
)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """`neutral`: the values that ask for nothing. `hint`: what to do instead, if there is something."""

    neutral: tuple[Any, ...] = ()
    hint: str = ""


_CHAT = "it belongs to /v1/chat/completions"
_TEXT = "it belongs to /v1/completions"

# Of the other route; a schema that serves them comes first.
_ELSEWHERE: dict[str, Unsupported] = {
    "messages": Unsupported((), _CHAT),
    "tools": Unsupported(([],), _CHAT),
    "tool_choice": Unsupported(("none",), _CHAT),
    "parallel_tool_calls": Unsupported((True, False), _CHAT),
    "top_logprobs": Unsupported((0,), "use `logprobs` with a number"),
    "max_completion_tokens": Unsupported((), _CHAT),
    "add_generation_prompt": Unsupported((True,), _CHAT),
    "continue_final_message": Unsupported((False,), _CHAT),
    "chat_template": Unsupported((), _CHAT),
    "chat_template_kwargs": Unsupported(({},), _CHAT),
    "reasoning_effort": Unsupported((), _CHAT),
    "thinking_token_budget": Unsupported((), _CHAT),
    "documents": Unsupported(([],), _CHAT),
    "prompt": Unsupported((), _TEXT),
    "best_of": Unsupported((1,), _TEXT),
}

UNSUPPORTED: dict[str, Unsupported] = _ELSEWHERE | {
    "functions": Unsupported(([],), "use `tools`"),
    "function_call": Unsupported(("none",), "use `tool_choice`"),
    "stop_regex": Unsupported((), "use `stop` or `structured_outputs`"),
    "suffix": Unsupported(("",), "text cannot be inserted before a suffix"),
    "prompt_embeds": Unsupported((), "send text or token ids"),
    "audio": Unsupported((), "the model writes text only"),
    "separate_reasoning": Unsupported((False,)),
    "mm_processor_kwargs": Unsupported(),
    "logits_processors": Unsupported(([],)),
    "custom_logit_processor": Unsupported(),
    "beam_width": Unsupported((), "use `use_beam_search`; the width is `n`"),
    "no_stop_trim": Unsupported((False,), "use `include_stop_str_in_output`"),
    "return_tokens_as_token_ids": Unsupported((False,), "use `return_token_ids`"),
    "lora_path": Unsupported(),
    "return_hidden_states": Unsupported((False,)),
    "return_progress": Unsupported((False,)),
    "repetition_detection": Unsupported(),
}


def screen_fields(
    raw: Mapping[str, Any], served: Collection[str], most: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the fields of `raw` that a schema with the names `served` has to look at, what is ignored).

    Raises:
        InvalidRequest: an internal or unsupported field, a label of the wrong type, or more than `most`.
    """
    if len(raw) > most:
        raise InvalidRequest(f"A request may have at most {most} fields; this one has {len(raw)}.")
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in raw.items():
        if value is None:
            continue
        if name in served:
            kept[name] = value
        elif name in ACCEPTED:
            kind, described = ACCEPTED[name]
            if type(value) is not kind:
                raise InvalidRequest(f"`{name}` must be {described}.", param=name)
            if value not in _NEUTRAL.get(name, ()):
                ignored.append(name)
        elif name in UNSUPPORTED:
            _refuse_unless_neutral(name, value, UNSUPPORTED[name])
        elif name in INTERNAL:
            raise InvalidRequest(
                f"`{name}` is internal to a cluster and never taken from a client.",
                param=name,
                code="internal_parameter",
            )
        else:
            ignored.append(name)
    return kept, tuple(ignored)


def _refuse_unless_neutral(name: str, value: Any, rule: Unsupported) -> None:
    if any(type(value) is type(neutral) and value == neutral for neutral in rule.neutral):
        return
    message = f"`{name}` is not supported"
    if rule.neutral:
        message += " with this value"
    raise InvalidRequest(
        f"{message}: {rule.hint}." if rule.hint else f"{message}.", param=name, code="unsupported_parameter"
    )


class IgnoredFields:
    """Tells of fields that had no effect: the client every time, the log once per field. A name that nobody
    knows is the client's own text, so the log does not repeat it."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def tell(self, names: Collection[str], served: Collection[str]) -> str:
        """The value of the `x-baton-ignored` header; empty if nothing was ignored."""
        shown: list[str] = []
        for name in names:
            is_known = name in ACCEPTED or name in served or name.removeprefix("messages.") in MESSAGE_LABELS
            if is_known:
                self._log_once(f"`{name}`")
            if len(shown) == _MAX_NAMED:
                continue
            printable = name if _HEADER_TEXT.fullmatch(name) else "(a name that is no word)"
            suggestion = "" if is_known else _suggestion(printable, frozenset(served))
            if not is_known:
                self._log_once(f"of an unknown name{suggestion}")
            shown.append(f"{printable}{suggestion}")
        beyond = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return ", ".join(shown) + beyond

    def _log_once(self, which: str) -> None:
        if which not in self._logged:
            self._logged.add(which)
            logger.warning("a request field %s has no effect here", which)


@lru_cache(maxsize=256)
def _suggestion(name: str, served: frozenset[str]) -> str:
    """What it may have been meant to be; looking for that takes a fifth of a millisecond."""
    close = difflib.get_close_matches(name, [*sorted(served), *ACCEPTED], n=1, cutoff=0.8)
    return f" (did you mean {close[0]}?)" if close else ""
