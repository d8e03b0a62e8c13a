"""The limits of an API key, as the keys file and the flags write them, and what is asked of them.

A key belongs to a *tenant*, its `name=` in the file. Keys of one name share one set of limits, so a key is
rotated by adding the next one under the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

import msgspec

from cluster.errors import ConfigError

MINUTE_S = 60.0
NO_LIMIT = "none"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Limit(Enum):
    """What a tenant can run into."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: no limit. `share`: of the cluster, beside the other tenants', while requests wait for a place."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent: int | None = None
    share: int = 1

    def rate_limits(self) -> dict[Limit, int]:
        """Those per minute that there are."""
        both = ((Limit.REQUESTS, self.requests_per_min), (Limit.TOKENS, self.tokens_per_min))
        return {limit: value for limit, value in both if value is not None}

    @property
    def is_limited(self) -> bool:
        return self.concurrent is not None or bool(self.rate_limits())


class Demand(msgspec.Struct, frozen=True):
    """What a request is about to use: all its prompts, and the most that its answers may have."""

    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def parse_settings(words: Iterable[str], name: str, defaults: KeyLimits) -> tuple[str, KeyLimits]:
    """(tenant, limits) of `name=team-a requests-per-min=60 tokens-per-min=none concurrent=8 share=2`, in any
    order; `name` and `defaults` stand for what is not there.

    Raises:
        ConfigError: an unknown or repeated setting, or a value that it cannot have.
    """
    limits, seen = defaults, set[str]()
    for word in words:
        setting, _, value = word.partition("=")
        if setting in seen:
            raise ConfigError(f"`{setting}` is there twice")
        seen.add(setting)
        if setting == "name":
            if _NAME.fullmatch(value) is None:
                raise ConfigError("`name` must be up to 64 letters, digits, dots, dashes and underscores")
            name = value
        elif setting == "requests-per-min":
            limits = replace(limits, requests_per_min=_number(setting, value))
        elif setting == "tokens-per-min":
            limits = replace(limits, tokens_per_min=_number(setting, value))
        elif setting == "concurrent":
            limits = replace(limits, concurrent=_number(setting, value))
        elif setting == "share":
            share = _number(setting, value)
            if share is None or share > 1000:
                raise ConfigError("`share` must be a whole number from 1 to 1000")
            limits = replace(limits, share=share)
        else:
            raise ConfigError(
                "what follows a digest must be `name=`, `requests-per-min=`, `tokens-per-min=`, "
                "`concurrent=` or `share=`"
            )
    return name, limits


def _number(setting: str, value: str) -> int | None:
    if value == NO_LIMIT:
        return None
    if not (value.isascii() and value.isdigit() and 0 < int(value[:19]) < 10**12):
        raise ConfigError(f"`{setting}` must be a whole number of at least 1, or `{NO_LIMIT}`")
    return int(value)
