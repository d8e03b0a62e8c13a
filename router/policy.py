"""Where a request goes, live: the elastic decision (`router.elastic`) within what workers can hold now.

A policy sees only its arguments, so the same decision can be asked for live, in a test and in simulated time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec
import numpy as np

from cluster.ids import BlockHash, WorkerId
from cluster.slo_classes import Targets
from router.affinity import Near
from router.choosing import NONE, highest, is_any
from router.config import PolicyConfig
from router.elastic import Ask, Place, place
from router.fleet import Column, Flags
from router.view import ClusterView


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """What placement needs to know of a request."""

    num_tokens: int  # to prefill: the prompt and, on a later attempt, the tokens already delivered
    num_prompt_tokens: int
    max_tokens: int  # generated tokens in all
    hashes: Sequence[BlockHash]  # of the full blocks of what is to prefill
    targets: Targets  # `ttft_s` from now; 0: it is late
    expected_output: float  # tokens still to be generated
    max_wait_s: float = math.inf  # it is turned away rather than wait longer for prompts before it
    avoid: frozenset[WorkerId] = frozenset()  # workers an earlier attempt failed on
    too_large_for: frozenset[WorkerId] = frozenset()  # workers that said they can never hold it
    near: Near | None = None  # where its session was last

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV must be held at once: the last generated token needs none."""
        return self.num_prompt_tokens + self.max_tokens - 1


class Placement(msgspec.Struct, frozen=True, gc=False):
    """`prefill` is None when the decode worker prefills itself. `predicted_ttft_s` is from now."""

    prefill: WorkerId | None
    decode: WorkerId
    predicted_ttft_s: float
    prefill_tokens: int  # expected to be computed by whoever prefills
    prefill_blocks: int  # expected to be newly taken on the prefill worker; 0 for a local prefill
    decode_blocks: int  # expected to be newly taken on the decode worker


class RejectReason(Enum):
    NO_WORKER = "no_worker"  # nobody who could serve it is here
    BUSY = "busy"  # somebody could, but not now
    TOO_LARGE = "too_large"  # nobody ever could
    BACKLOG = "backlog"  # it would wait for the prompts before it longer than it may
    QUEUE_FULL = "queue_full"  # as many wait for room as may (the conductor's word, as the next)
    QUEUE_TOO_SLOW = "queue_too_slow"  # those that wait for room would not have gone in time


class Reject(msgspec.Struct, frozen=True, gc=False):
    """`limit_tokens` is set with TOO_LARGE: the most prompt + output tokens that anyone could take;
    `retry_after_s` with BACKLOG and QUEUE_TOO_SLOW: when enough of it will be done."""

    reason: RejectReason
    limit_tokens: int = 0
    retry_after_s: float = 0.0


class PlacementPolicy(Protocol):
    def place(self, view: ClusterView, request: PlacementRequest, now: float) -> Placement | Reject: ...


@dataclass(frozen=True, slots=True)
class Elastic:
    """P and D by `router.elastic.place`, among the workers that could take the request now.

    Algorithm:
      1. Decode workers that are ready and whose pool and model length could ever hold the request; of those,
         the ones with a free slot and blocks for the uncached prompt plus growth *now*, that have not refused
         one as small since their last report.
      2. Prefill workers that are ready and can hold the prompt; and the decode workers of 1, for themselves.
      3. `place` decides between the pairs. Steps are paced by the tighter of this request's targets and the
         configured ones: others decode in the same steps.

    Order: as `place`. Workers in `avoid` are taken only when no other decode worker has room; an avoided
    prefill worker is passed over for a local prefill.

    When nothing fits: NO_WORKER if no decode worker is ready, TOO_LARGE if none could ever hold it, BUSY if
    none has room, BACKLOG if the prompts before it would take longer than it may wait. The last is said only
    where every worker it could go to has shown how fast it is.

    Bounds: O(workers) in vector operations, and a look-up of the prefix; no state.
    """

    config: PolicyConfig
    defaults: Targets  # of requests that ask for nothing else

    def place(self, view: ClusterView, request: PlacementRequest, now: float) -> Placement | Reject:
        fleet = view.fleet
        ready = fleet.can_decode
        if not is_any(ready):
            return Reject(RejectReason.NO_WORKER)
        large = view.decode_capacity >= float(max(1, request.max_kv_tokens))
        if request.too_large_for:
            _bar(view, large, request.too_large_for)
        if not is_any(large):
            limit = int(highest(view.decode_capacity)) + 1
            return Reject(RejectReason.TOO_LARGE, limit)
        if view.is_full:
            return Reject(RejectReason.BUSY)
        cached_blocks = view.prefix.lookup(request.hashes, fleet.num_workers)
        needed = self._new_blocks(view, request, cached_blocks)
        decodes = view.open_blocks >= needed
        decodes &= large
        if not is_any(decodes):
            return Reject(RejectReason.BUSY)
        prefills = view.send_capacity >= float(request.num_tokens)
        if request.avoid:
            decodes = _without(view, decodes, request.avoid)
            _bar(view, prefills, request.avoid)
        if not (self.config.always_remote and is_any(prefills)):
            prefills |= decodes
        ask = self._ask(view, request, cached_blocks, prefills, decodes)
        decision = place(fleet, ask, self._targets(request.targets), self.config.elastic)
        if isinstance(decision, Place):
            return self._placement(view, request, decision, needed, cached_blocks)
        return Reject(RejectReason.BACKLOG, retry_after_s=decision.retry_after_s or 0.0)

    def _ask(
        self,
        view: ClusterView,
        request: PlacementRequest,
        cached_blocks: Column | None,
        prefills: Flags,
        decodes: Flags,
    ) -> Ask:
        cached = None
        if cached_blocks is not None:
            cached = cached_blocks * float(view.block_size)
            if (
                len(request.hashes) * view.block_size >= request.num_tokens
            ):  # the last token is always computed
                np.minimum(cached, request.num_tokens - 1.0, out=cached)
        life_s, paced_life_s = view.mean_life_s(), request.expected_output * self.defaults.tpot_s
        if life_s is None:
            life_s = paced_life_s
        is_known = math.isfinite(request.max_wait_s)
        if view.guessed and is_known:
            is_known = not any(prefills[row] for row in view.guessed)
        near = request.near if cached_blocks is None else None
        return Ask(
            num_tokens=request.num_tokens,
            expected_output=request.expected_output,
            cached=cached,
            kv_bytes_per_token=view.kv_bytes_per_token,
            life_s=life_s,
            paced_life_s=paced_life_s,
            max_wait_s=request.max_wait_s if is_known else math.inf,
            may_prefill=prefills,
            may_decode=decodes,
            near_prefill=NONE if near is None else view.rows.get(near.prefill, NONE),
            near_decode=NONE if near is None else view.rows.get(near.decode, NONE),
        )

    def _targets(self, own: Targets) -> Targets:
        defaults = self.defaults
        return Targets(own.ttft_s, min(own.tpot_s, defaults.tpot_s), min(own.gap_s, defaults.gap_s))

    def _new_blocks(
        self, view: ClusterView, request: PlacementRequest, cached_blocks: Column | None
    ) -> Column | float:
        """Per worker, blocks for the uncached prompt and the growth a new request should find at once; one
        figure where nothing is cached."""
        tokens = min(request.num_tokens + self.config.growth_tokens, request.max_kv_tokens)
        num_blocks = float(-(-max(tokens, request.num_tokens) // view.block_size))
        if cached_blocks is None:
            return max(1.0, num_blocks)
        most_cached = min((request.num_tokens - 1) // view.block_size, num_blocks - 1)
        if len(request.hashes) > most_cached:
            cached_blocks = np.minimum(cached_blocks, most_cached)
        return num_blocks - cached_blocks

    def _placement(
        self,
        view: ClusterView,
        request: PlacementRequest,
        decision: Place,
        needed: Column | float,
        cached_blocks: Column | None,
    ) -> Placement:
        prefill, decode = view.ids[decision.prefill], view.ids[decision.decode]
        assert prefill is not None, decision
        assert decode is not None, decision
        cached = 0 if cached_blocks is None else int(cached_blocks[decision.prefill])
        num_blocks = -(-request.num_tokens // view.block_size)
        is_local = decision.prefill == decision.decode
        return Placement(
            prefill=None if is_local else prefill,
            decode=decode,
            predicted_ttft_s=decision.ttft_s,
            prefill_tokens=max(1, request.num_tokens - cached * view.block_size),
            prefill_blocks=0 if is_local else max(1, num_blocks - cached),
            decode_blocks=int(needed if isinstance(needed, float) else needed[decision.decode]),
        )


def _bar(view: ClusterView, flags: Flags, workers: Iterable[WorkerId]) -> None:
    """Take workers out of `flags`."""
    for worker in workers:
        if (row := view.rows.get(worker)) is not None:
            flags[row] = False


def _without(view: ClusterView, flags: Flags, workers: Iterable[WorkerId]) -> Flags:
    """The others, if there are any."""
    others = flags.copy()
    _bar(view, others, workers)
    return others if is_any(others) else flags
