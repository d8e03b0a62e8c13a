"""What one request may ask for: everything a client can make large has its bound here.

Ranges that OpenAI's interface fixes (temperatures, penalties) are in the schema; these are the operator's to
choose.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from cluster.grammar_size import BOUNDS, GrammarBounds
from cluster.request_config import OverloadStatus, RequestConfig, ToolFormatName
from router.quotas.limits import KeyLimits
from router.stream import Patience

_MANY_BODIES = 32


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of the fields of one request; each is a setting of the same name."""

    max_json_depth: int = 200
    max_fields: int = 512
    max_messages: int = 2048
    max_prompts: int = 256
    max_n: int = 16  # choices per prompt, best_of's candidates included
    max_choices: int = 256  # of all prompts together
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_chars: int = 1024  # of one stop string
    max_bad_words_chars: int = 4096  # of all together: they travel with every choice
    max_session_chars: int = 512
    max_listed_ids: int = 1024  # entries of `stop_token_ids`, `logit_bias`, ...
    max_tools: int = 128
    max_grammar_bytes: int = 64 * 2**10  # of a schema, expression or grammar; of all tools together
    max_pattern_size: int = BOUNDS.max_pattern_size
    max_schema_properties: int = BOUNDS.max_properties
    max_prompt_logprobs: int = 2**17  # entries: prompt tokens x (alternatives + 1)
    trust_chat_template: bool = False  # whether a request may bring its own template

    @classmethod
    def of(cls, config: RequestConfig) -> RequestLimits:
        bounds: dict[str, Any] = {
            bound.name: getattr(config, bound.name)
            for bound in fields(cls)
            if bound.name != "trust_chat_template"
        }
        return cls(**bounds, trust_chat_template=config.request_chat_templates == "trust")

    @property
    def grammar(self) -> GrammarBounds:
        return GrammarBounds(self.max_pattern_size, self.max_schema_properties)


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """What one request may cost the gateway."""

    max_body_bytes: int = 8 * 2**20
    max_bodies_bytes: int = _MANY_BODIES * 8 * 2**20  # of all that are no requests yet
    request_arrival_s: float = 60.0
    max_viewers: int = 32
    max_header_bytes: int = 64 * 2**10
    offload_bytes: int = 2 * 2**10  # bodies above this, a millisecond's work, are read on a thread
    request_deadline_s: float | None = None  # None: as long as it takes
    fork_min_tokens: int = 64  # several answers to a prompt this long wait until it is computed once
    overload_status: OverloadStatus = 503
    tool_format: ToolFormatName = "auto"
    api_keys_file: str | None = None  # None: no key is asked for
    allowed_origins: str | None = None  # None: no other server's web page
    key_limits: KeyLimits = field(default_factory=KeyLimits)  # of keys that have none of their own
    patience: Patience = field(default_factory=Patience)
    request: RequestLimits = field(default_factory=RequestLimits)

    @classmethod
    def of(cls, config: RequestConfig) -> GatewayLimits:
        return cls(
            max_body_bytes=config.max_body_bytes,
            max_bodies_bytes=config.max_bodies_bytes or _MANY_BODIES * config.max_body_bytes,
            request_arrival_s=config.request_arrival_s,
            max_viewers=config.max_viewers,
            max_header_bytes=config.max_header_bytes,
            overload_status=config.overload_status,
            tool_format=config.tool_format,
            api_keys_file=config.api_keys_file,
            allowed_origins=config.allowed_origins,
            key_limits=KeyLimits(
                config.key_requests_per_min, config.key_tokens_per_min, config.key_concurrent
            ),
            request=RequestLimits.of(config),
        )
