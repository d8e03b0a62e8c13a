"""What one request may ask for, as the operator sets it: a part of the settings, which routers are told."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

KiB: Final = 1 << 10
MiB: Final = 1 << 20

OverloadStatus = Literal[429, 503, 529]
RequestTemplates = Literal["refuse", "trust"]
ToolFormatName = Literal["auto", "hermes", "json", "mistral"]

AtLeastOne = Annotated[int, Meta(ge=1)]

MAX_JSON_DEPTH: Final = 200  # deeper values cannot be walked safely: templates and compilers recurse

BYTES: Final = {"unit": "bytes"}  # marks settings that also take "512MiB"


class RequestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of requests, and of those who make them. The descriptions are the help texts of the command
    line."""

    max_body_bytes: Annotated[int, Meta(ge=1024, extra=BYTES, description="largest body of a request")] = (
        8 * MiB
    )
    max_header_bytes: Annotated[
        int, Meta(ge=1024, extra=BYTES, description="most that a request's address and headers may take")
    ] = 64 * KiB
    max_bodies_bytes: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        Meta(
            extra=BYTES,
            description="most that bodies in arrival take together (default: 32 times the largest)",
        ),
    ] = None
    request_arrival_s: Annotated[
        float, Meta(gt=0, description="how long a request may take to arrive whole")
    ] = 60.0
    max_json_depth: Annotated[
        int, Meta(ge=8, le=MAX_JSON_DEPTH, description="how deep a request may be nested")
    ] = MAX_JSON_DEPTH
    max_fields: Annotated[int, Meta(ge=32, le=65536, description="most fields of a request")] = 512
    max_grammar_bytes: Annotated[
        int, Meta(ge=0, extra=BYTES, description="largest schema, grammar or list of tools of a request")
    ] = 64 * KiB
    max_pattern_size: Annotated[
        int, Meta(ge=1, le=1_000_000, description="most characters that a pattern may repeat to")
    ] = 10_000
    max_schema_properties: Annotated[
        int, Meta(ge=0, le=1_000_000, description="most properties of a schema")
    ] = 1_000
    max_messages: Annotated[AtLeastOne, Meta(description="most messages of a chat")] = 2048
    max_prompts: Annotated[AtLeastOne, Meta(description="most prompts of a completion request")] = 256
    max_n: Annotated[int, Meta(ge=1, le=128, description="most answers to one prompt")] = 16
    max_choices: Annotated[
        AtLeastOne, Meta(description="most answers of one request, to all of its prompts")
    ] = 256
    max_logprobs: Annotated[
        int, Meta(ge=0, le=1000, description="most alternatives per token with log-probabilities")
    ] = 20
    max_prompt_logprobs: Annotated[
        int,
        Meta(
            ge=0,
            le=524288,
            description="most log-probabilities of a prompt: its tokens, times alternatives and itself",
        ),
    ] = 131072
    max_stop_strings: Annotated[int, Meta(ge=0, le=1024, description="most stop strings of a request")] = 16
    max_stop_chars: Annotated[int, Meta(ge=1, le=65536, description="longest stop string, in characters")] = (
        1024
    )
    max_bad_words_chars: Annotated[
        int, Meta(ge=0, le=65536, description="most characters of all `bad_words` together")
    ] = 4096
    max_listed_ids: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="most entries of `stop_token_ids`, `allowed_token_ids`, `logit_bias` or `bad_words`",
        ),
    ] = 1024
    max_session_chars: Annotated[
        int,
        Meta(ge=1, le=65536, description="longest `session_id`, `prompt_cache_key` or `user`, in characters"),
    ] = 512
    max_tools: Annotated[int, Meta(ge=0, description="most tools of a request")] = 128
    max_viewers: Annotated[
        int, Meta(ge=0, le=10_000, description="most pages that watch the cluster at a time")
    ] = 32
    max_queued: Annotated[AtLeastOne, Meta(description="most requests that wait for a place")] = 1024
    tool_format: Annotated[
        ToolFormatName, Meta(description="how the model writes tool calls; auto: as its chat template says")
    ] = "auto"
    request_chat_templates: Annotated[
        RequestTemplates, Meta(description="whether a request may bring a chat template of its own")
    ] = "refuse"
    api_keys_file: Annotated[
        str | None,
        Meta(description="file with a line `sha256:…` per API key (default: no key is asked for)"),
    ] = None
    allowed_origins: Annotated[
        str | None,
        Meta(
            description="web pages that browsers may let use the API, as https://HOST[:PORT], separated by "
            "commas; *: any (default: the router's own page alone)"
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Meta(
            description="names by which clients may ask the server, beside localhost and addresses, "
            "separated by commas; *: any (default: none more on loopback without keys, else any)"
        ),
    ] = None
    key_requests_per_min: Annotated[
        AtLeastOne | None,
        Meta(description="requests per minute of a key whose line does not say (default: no limit)"),
    ] = None
    key_tokens_per_min: Annotated[
        AtLeastOne | None,
        Meta(description="its tokens per minute, prompt and answer together (default: no limit)"),
    ] = None
    key_concurrent: Annotated[
        AtLeastOne | None, Meta(description="its requests at once (default: no limit)")
    ] = None
    overload_status: Annotated[
        OverloadStatus, Meta(description="HTTP status of what is refused because all workers are busy")
    ] = 503
