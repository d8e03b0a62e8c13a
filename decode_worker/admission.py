"""Whether a decode worker takes a request on, and the blocks it gets when it does.

1. A prompt whose prompt + `max_tokens` cannot fit the whole pool is refused for good (`TOO_LARGE`), so that a
   sequence that runs alone can always be completed.
2. No slot, or preempted sequences that wait for blocks: not now. What is here comes first.
3. The cached head of the prompt is pinned, and the missing prompt blocks and `growth_blocks` for the first
   generated tokens are allocated, all or nothing; never beyond what the request can need. As many blocks
   again must stay available for each sequence that is here already, so that it can grow.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine.pace import pace_of
from cluster.engine.sequence import Sequence, num_blocks_for
from cluster.errors import InvalidRequest
from cluster.ids import RouterId
from cluster.kv.block_manager import BlockManager
from cluster.slo_classes import DEFAULT_TARGETS, Targets
from cluster.wire.messages import AttemptFailed, Nack, NackReason, Reserve
from cluster.worker_io import ToRouter


@dataclass(frozen=True, slots=True)
class IntakeConfig:
    """`growth_blocks` are granted beyond the prompt; as many per sequence here stay free at every grant."""

    block_bytes: int
    max_num_seqs: int = 64
    growth_blocks: int = 1
    max_ttl_s: float = 60.0
    retry_after_s: float = 0.25
    targets: Targets = DEFAULT_TARGETS  # of requests that bring none


def attempt_failed(
    router: RouterId, of: Reserve | Sequence, code: str, message: str, *, retryable: bool = True
) -> ToRouter:
    """`AttemptFailed` for a reserve or a sequence."""
    failed = AttemptFailed(
        request=of.request, attempt=of.attempt, code=code, message=message, retryable=retryable
    )
    return ToRouter(router, failed)


def nack(
    router: RouterId, message: Reserve, config: IntakeConfig, reason: NackReason, detail: str
) -> ToRouter:
    """The refusal of a reserve."""
    refusal = Nack(
        request=message.request,
        attempt=message.attempt,
        reason=reason,
        detail=detail,
        retry_after_s=0.0 if reason is NackReason.TOO_LARGE else config.retry_after_s,
    )
    return ToRouter(router, refusal)


def admit(
    router: RouterId,
    message: Reserve,
    blocks: BlockManager,
    config: IntakeConfig,
    order: int,
    now: float,
    *,
    num_here: int,
    has_preempted: bool,
) -> Sequence | ToRouter:
    """The request's sequence with its blocks, or the refusal. `num_here`: sequences that are here already."""
    try:
        sequence = Sequence(
            router,
            message.request,
            message.attempt,
            message.token_ids,
            message.num_prompt_tokens,
            message.sampling,
            message.cache_salt,
            order,
            now,
            pace_of(
                message.slo,
                config.targets,
                now,
                is_resumed=len(message.token_ids) > message.num_prompt_tokens,
            ),
        )
    except InvalidRequest as error:
        return attempt_failed(router, message, "bad_request", error.message, retryable=False)
    size, pool = blocks.block_size, blocks.num_blocks
    num_prompt = num_blocks_for(sequence.num_tokens, size)
    num_most = max(num_blocks_for(sequence.max_tokens_with_kv, size), num_prompt)
    if num_most > pool:
        num_new = sequence.sampling.max_tokens
        detail = (
            f"{sequence.num_prompt_tokens} prompt tokens and {num_new} new ones do not fit this worker's "
            f"KV pool of {pool * size} tokens"
        )
        return nack(router, message, config, NackReason.TOO_LARGE, detail)
    if num_here >= config.max_num_seqs:
        detail = f"{num_here} sequences are here already"
        return nack(router, message, config, NackReason.NO_SLOT, detail)
    if has_preempted:
        detail = "preempted sequences wait for blocks"
        return nack(router, message, config, NackReason.NO_BLOCKS, detail)
    num_blocks = min(num_prompt + config.growth_blocks, num_most)
    keep_free = config.growth_blocks * num_here
    if not sequence.reserve(blocks, num_blocks, leave_last=message.local, keep_free=keep_free):
        available = blocks.num_available
        detail = f"{num_blocks} blocks and {keep_free} for growth, {available} available"
        return nack(router, message, config, NackReason.NO_BLOCKS, detail)
    return sequence
