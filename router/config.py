"""The router's own settings, resolved once: frozen values that each object gets its part of."""

from __future__ import annotations

import msgspec

from cluster.slo_classes import DEFAULT_TARGETS, Targets
from router.cells import CellSettings
from router.elastic import ElasticSettings


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings: unknown keys are errors."""


class PolicyConfig(_Config, frozen=True, kw_only=True):
    """What placement weighs; see `router.policy`."""

    elastic: ElasticSettings = ElasticSettings()
    cells: CellSettings = CellSettings()  # of a fleet too large to look at as a whole
    always_remote: bool = False  # decode workers compute prompts only while no prefill worker can
    growth_tokens: int = 64  # generated tokens a new request should find room for at once
    default_prefill_tokens_per_s: float = 1000.0  # where nothing is measured: only ratios matter then
    default_step_s: float = 0.02
    edge_bytes_s: float = 2e9  # KV from one worker to another, until it is measured
    cold_edge_s: float = 0.02  # a first hand-off between two workers builds their edge


class ConductorConfig(_Config, frozen=True, kw_only=True):
    """Every wait of the conductor has its limit here:

    QUEUED, no place       queue_timeout_s, or at once if no place is expected by then → Overloaded
    QUEUED, others first   for longer than max_backlog_s, predicted       → Overloaded, at once
    QUEUED, nobody there   recovery_wait_s; also after a loss             → NotReady, or the loss
    QUEUED, RESERVE sent   reserve_timeout_s                              → retry, D avoided
    PREFILLING             prefill_timeout_s + 4 x the predicted TTFT     → retry, P avoided
    committed, no token 0  first_token_timeout_s                          → retry, P avoided
    STREAMING_KV           commit_timeout_s                               → retry, P avoided
    DECODING               decode_silence_s without a token               → retry, D avoided
    any                    the request's own deadline                     → DeadlineExceeded
    """

    max_attempts: int = 3
    lease_ttl_s: float = 10.0
    reserve_timeout_s: float = 2.0
    prefill_timeout_s: float = 60.0
    first_token_timeout_s: float = 2.0
    commit_timeout_s: float = 10.0
    decode_silence_s: float = 60.0
    stall_timeout_s: float = 15.0
    queue_timeout_s: float = 30.0
    # A request that others keep waiting longer is refused (`router.attempt`): as long as a prompt may take
    # (`prefill_timeout_s`), and as the longest Retry-After there is.
    max_backlog_s: float = 60.0
    recovery_wait_s: float = 20.0
    max_queued: int = 1024
    max_overtake_s: float = 5.0
    slo: Targets = DEFAULT_TARGETS  # of requests that ask for nothing else
    policy: PolicyConfig = PolicyConfig()
