"""One attempt at a request on one worker, as both schedulers see it: its tokens, and where their KV is.

Life of a sequence:

1. It is made from the prompt a router sent (on a later attempt that includes tokens already delivered).
2. `reserve` pins the cached head of the prompt and takes the blocks for the rest; `num_computed` is then
   what was cached.
3. `row` describes its share of a step; `advance` accounts for it once the step is done, `append` adds the
   sampled token.
4. `publish` enters its computed full blocks into the prefix cache, `release` gives all blocks back. A
   sequence without blocks can be reserved again: that is preemption by recompute.

Lists handed to a `Row` are the sequence's own, not copies: they do not change while a step runs.
"""

from __future__ import annotations

from cluster.engine.batch import Row, SampleSpec
from cluster.engine.pace import Pace, unpromised
from cluster.errors import InvalidRequest
from cluster.ids import Attempt, BlockId, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import FinishReason, SamplingParams, finish_reason_at, looks_back

MAX_TOKEN_ID = 2**32 - 1

SequenceKey = tuple[RequestId, Attempt]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens of KV take."""
    return -(-num_tokens // block_size)


class Sequence:
    """Mutable; its scheduler is the only writer. `num_computed` tokens have their KV in `block_ids`.

    `order` is the sequence's age on this worker (lower is older); `accepted_s` when it arrived here; `pace`
    what it is promised.

    Raises:
        InvalidRequest: no tokens, ids out of range, or a prompt length that does not fit the tokens.
    """

    __slots__ = (
        "accepted_s",
        "attempt",
        "block_ids",
        "cache_salt",
        "key",
        "looks_back",
        "num_cached",
        "num_computed",
        "num_initial",
        "num_prompt_tokens",
        "order",
        "output_ids",
        "pace",
        "request",
        "router",
        "sample",
        "sampling",
        "started_s",
        "token_ids",
    )

    def __init__(
        self,
        router: RouterId,
        request: RequestId,
        attempt: Attempt,
        token_ids: list[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        cache_salt: str,
        order: int,
        now: float,
        pace: Pace | None = None,
    ) -> None:
        if not 0 < num_prompt_tokens <= len(token_ids):
            raise InvalidRequest(f"a prompt of {num_prompt_tokens} tokens out of {len(token_ids)} given")
        if min(token_ids) < 0 or max(token_ids) > MAX_TOKEN_ID:
            raise InvalidRequest("token ids must be between 0 and 4294967295", param="prompt")
        self.router = router
        self.request = request
        self.attempt = attempt
        self.key: SequenceKey = (request, attempt)
        self.token_ids = list(token_ids)  # prompt and outputs
        self.output_ids = self.token_ids[num_prompt_tokens:]
        self.num_prompt_tokens = num_prompt_tokens  # the client's prompt: outputs start here
        self.num_initial = len(token_ids)  # what the router sent: this attempt's own outputs start here
        self.sampling = sampling
        self.looks_back = looks_back(sampling)
        self.cache_salt = cache_salt
        self.order = order
        self.accepted_s = now
        self.pace = pace or unpromised(now)
        self.started_s: float | None = None  # set by the scheduler when the first chunk is planned
        self.block_ids: list[BlockId] = []
        self.num_computed = 0
        self.num_cached = 0  # tokens found in the cache by the first `reserve`
        self.sample = SampleSpec(sampling, self.token_ids[:num_prompt_tokens], self.output_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens without KV. 1 while decoding: the last token's KV is computed by the next step."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens this attempt generated, here or (token 0) on the prefill worker."""
        return len(self.token_ids) - self.num_initial

    @property
    def needs_scores(self) -> bool:
        """Log-probabilities of the prompt are wanted, and have not gone out with a first token yet."""
        return self.sampling.prompt_logprobs is not None and not self.output_ids

    @property
    def max_tokens_with_kv(self) -> int:
        """The longest this sequence can get in the pool; the last token of a request needs no KV."""
        return self.num_prompt_tokens + max(self.sampling.max_tokens, 1) - 1

    @property
    def most_left(self) -> int:
        """Tokens that may still be generated."""
        return self.sampling.max_tokens - len(self.output_ids)

    def reserve(
        self, blocks: BlockManager, num_blocks: int, *, leave_last: bool = True, keep_free: int = 0
    ) -> bool:
        """Take `num_blocks` blocks, cached ones first; False (and no change) if there are not so many.

        `leave_last`: at least the last token is left to compute, so that a next one can be sampled. Where the
        prompt is to be scored, all of it is.
        `keep_free`: blocks that must still be available afterwards.
        """
        assert not self.block_ids, "reserved twice"
        tokens = self.token_ids[:-1] if leave_last else self.token_ids
        matched = [] if leave_last and self.needs_scores else blocks.match(tokens, self.cache_salt)
        num_fresh = max(num_blocks - len(matched), 0)
        fresh = blocks.allocate(num_fresh) if num_fresh + keep_free <= blocks.num_available else None
        if fresh is None:
            blocks.release(matched)
            return False
        self.block_ids = matched + fresh
        self.num_computed = len(matched) * blocks.block_size
        if self.started_s is None:
            self.num_cached = self.num_computed
        return True

    def row(self, num_tokens: int, drafts_end: int = 0) -> Row:
        """The next `num_tokens` tokens as a step's row; samples if they reach the end. `drafts_end`: as
        `Row.end`."""
        start = self.num_computed
        end = start + num_tokens
        total = len(self.token_ids)
        return Row(
            self.request,
            self.attempt,
            (self.token_ids[-1],) if start + 1 == total else self.token_ids[start:end],
            start,
            self.block_ids,
            self.sample if end == total else None,
            self.sample if start + 1 < self.num_prompt_tokens and self.needs_scores else None,
            drafts_end,
        )

    def decode_row(self) -> Row:
        """`row(1)` of one that decodes: its last token, of which nothing but the next one is wanted."""
        return Row(
            self.request, self.attempt, (self.token_ids[-1],), self.num_computed, self.block_ids, self.sample
        )

    def advance(self, num_tokens: int) -> None:
        """The KV of the next `num_tokens` tokens is in the blocks."""
        self.num_computed += num_tokens
        assert self.num_computed <= len(self.token_ids)

    def append(self, token_id: int) -> FinishReason | None:
        """Add a generated token; why generation ends with it, or None."""
        self.token_ids.append(token_id)
        self.output_ids.append(token_id)
        return finish_reason_at(self.sampling, token_id, len(self.output_ids))

    def take(self, token_id: int, now: float) -> FinishReason | None:
        """A step in which it decoded gave it one token, not its first: `advance`, `append` and its pace."""
        self.num_computed += 1
        self.pace.last_s = now
        self.token_ids.append(token_id)
        self.output_ids.append(token_id)
        return finish_reason_at(self.sampling, token_id, len(self.output_ids))

    def catch_up(self, token_ids: tuple[int, ...]) -> None:
        """It went on by these, a step each; `output_ids` may have taken them by itself."""
        if len(self.output_ids) == len(self.token_ids) - self.num_prompt_tokens:
            self.output_ids += token_ids
        self.token_ids += token_ids
        self.advance(len(token_ids))

    def finish_reason_of(self, token_id: int) -> FinishReason | None:
        """Why generation would end with this token, or None; the sequence does not change."""
        return finish_reason_at(self.sampling, token_id, len(self.output_ids) + 1)

    def publish(self, blocks: BlockManager) -> None:
        """Enter the full blocks whose KV is computed into the prefix cache; cheap when repeated."""
        num_full = self.num_computed // blocks.block_size
        if num_full:
            blocks.publish(
                self.block_ids[:num_full], self.token_ids[: num_full * blocks.block_size], self.cache_salt
            )

    def release(self, blocks: BlockManager) -> None:
        """Give all blocks back. Only when no step, send or receive touches them any more."""
        block_ids, self.block_ids = self.block_ids, []
        self.num_computed = 0
        blocks.release(block_ids)
