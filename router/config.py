"""The router's own settings, resolved once: frozen values that each object gets its part of."""

from __future__ import annotations

import msgspec


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings: unknown keys are errors."""


class PolicyConfig(_Config, frozen=True, kw_only=True):
    """What placement weighs; see `router.policy`."""

    ttft_floor_s: float = 0.005  # what a prefill costs beside its tokens
    default_prefill_tokens_per_s: float = 1000.0  # where nothing is measured: only ratios matter then
    unmeasured_local_rate: float = (
        0.5  # a decode worker that never prefilled, against the mean prefill worker
    )
    local_gain: float = 0.8  # local prefill must be predicted below this part of the remote TTFT ...
    local_min_gain_s: float = 0.02  # ... and sooner by at least this
    harm_weight: float = 1.0  # one second of delay to one running decode against one second of TTFT
    tie_tolerance: float = 0.05  # predictions this close are equal
    growth_tokens: int = 64  # generated tokens a new request should find room for at once
    prefix_weight: float = 0.5  # a wholly cached prompt against a wholly occupied decode worker


class ConductorConfig(_Config, frozen=True, kw_only=True):
    """Every wait of the conductor has its limit here; see `router.conductor` for which is which."""

    max_attempts: int = 3
    lease_ttl_s: float = 10.0
    reserve_timeout_s: float = 2.0
    prefill_timeout_s: float = 60.0
    first_token_timeout_s: float = 2.0
    commit_timeout_s: float = 10.0
    decode_silence_s: float = 60.0
    stall_timeout_s: float = 15.0
    queue_timeout_s: float = 30.0
    recovery_wait_s: float = 20.0
    max_queued: int = 1024
    max_overtake_s: float = 5.0
    policy: PolicyConfig = PolicyConfig()
