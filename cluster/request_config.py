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
    max_grammar_bytes: Annotated[
        int, Meta(ge=0, extra=BYTES, description="largest schema, grammar or list of tools of a request")
    ] = 64 * KiB
    max_messages: Annotated[AtLeastOne, Meta(description="most messages of a chat")] = 2048
    max_n: Annotated[int, Meta(ge=1, le=128, description="most answers to one prompt")] = 16
    max_choices: Annotated[
        AtLeastOne, Meta(description="most answers of one request, to all of its prompts")
    ] = 256
    max_logprobs: Annotated[
        int, Meta(ge=0, le=1000, description="most alternatives per token with log-probabilities")
    ] = 20
    max_stop_strings: Annotated[int, Meta(ge=0, le=1024, description="most stop strings of a request")] = 16
    max_tools: Annotated[int, Meta(ge=0, description="most tools of a request")] = 128
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
