"""Where a request goes: a pure decision over a frozen view of the cluster.

A policy sees only its arguments, so the same decision can be asked for live, in a test and in simulated time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from statistics import mean
from typing import Protocol

from cluster.ids import BlockHash, WorkerId
from router.config import PolicyConfig
from router.perf_model import PrefillEstimate, decode_harm_s, estimate_prefill, prefill_rate
from router.view import ClusterView, WorkerView


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement needs to know of a request."""

    num_tokens: int  # to prefill: the prompt and, on a later attempt, the tokens already delivered
    num_prompt_tokens: int
    max_tokens: int  # generated tokens in all
    hashes: Sequence[BlockHash]  # of the full blocks of what is to prefill
    avoid: frozenset[WorkerId] = frozenset()  # workers an earlier attempt failed on
    too_large_for: frozenset[WorkerId] = frozenset()  # workers that said they can never hold it

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV must be held at once: the last generated token needs none."""
        return self.num_prompt_tokens + self.max_tokens - 1


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` is None when the decode worker prefills itself. `predicted_ttft_s` is from now."""

    prefill: WorkerId | None
    decode: WorkerId
    predicted_ttft_s: float
    prefill_tokens: int  # expected to be computed by whoever prefills
    decode_blocks: int  # expected to be newly taken on the decode worker


class RejectReason(Enum):
    NO_WORKER = auto()  # nobody who could serve it is here
    BUSY = auto()  # somebody could, but not now
    TOO_LARGE = auto()  # nobody ever could


@dataclass(frozen=True, slots=True)
class Reject:
    """`limit_tokens` is set with TOO_LARGE: the most prompt + output tokens that anyone could take."""

    reason: RejectReason
    limit_tokens: int = 0


class PlacementPolicy(Protocol):
    def place(self, view: ClusterView, request: PlacementRequest, now: float) -> Placement | Reject: ...


@dataclass(frozen=True, slots=True)
class LeastTtft:
    """Least predicted TTFT over the prefill workers, then the decode worker with room and prefix.

    Algorithm:
      1. Decode workers that are ready and whose pool and model length could ever hold the request; of those,
         the ones with a free slot and blocks for the uncached prompt plus growth *now*.
      2. P: least `floor + (backlog + uncached tokens) / measured rate`. The backlog includes what this
         router sent and has no token of yet, so a burst spreads.
      3. D: least `occupancy - prefix_weight * cached part of the prompt`, occupancy being the fuller of slots
         and blocks with the request placed.
      4. Local: the D with the least predicted TTFT of its own plus the delay its prefill costs the requests
         that decode there. It wins only if that sum is below `local_gain` of the remote TTFT and sooner by
         `local_min_gain_s`. Without a measurement of P, or with P idle and no prefix that only D holds, P
         wins.

    Order: candidates whose cost is within `tie_tolerance` of the best are equal, and the least recently
    placed of them is taken, so equal workers are used in turn; then the lower id. Workers in `avoid` are
    taken only when no other decode worker has room; an avoided prefill worker is passed over for a local
    prefill.

    When nothing fits: NO_WORKER if no decode worker is ready, TOO_LARGE if none could ever hold it, else
    BUSY.

    Bounds: O(workers x blocks of the prompt) for the prefix look-ups; no state.
    """

    config: PolicyConfig

    def place(self, view: ClusterView, request: PlacementRequest, now: float) -> Placement | Reject:
        ready = [worker for worker in view.decode if worker.is_ready]
        if not ready:
            return Reject(RejectReason.NO_WORKER)
        large_enough = [
            worker
            for worker in ready
            if request.max_kv_tokens <= capacity_tokens(worker) and worker.worker not in request.too_large_for
        ]
        if not large_enough:
            return Reject(RejectReason.TOO_LARGE, max(capacity_tokens(worker) for worker in ready) + 1)
        roomy = [worker for worker in large_enough if self._has_room(worker, request)]
        if not roomy:
            return Reject(RejectReason.BUSY)
        decodes = [worker for worker in roomy if worker.worker not in request.avoid] or roomy
        remote = self._best_prefill(view, request)
        local, local_estimate, local_cost = self._best_local(view, decodes, request)
        if remote is None or self._local_wins(*remote, local, local_cost, request):
            return self._placement(None, local, local_estimate, request)
        decode = self._pick(decodes, lambda worker: self._decode_cost(worker, request))
        return self._placement(remote[0], decode, remote[1], request)

    # ---- candidates

    def _has_room(self, worker: WorkerView, request: PlacementRequest) -> bool:
        needed = self._new_blocks(worker, request)
        if worker.refused_blocks is not None and needed >= worker.refused_blocks:
            return False
        return worker.slots_available > 0 and needed <= worker.blocks_available

    def _best_prefill(
        self, view: ClusterView, request: PlacementRequest
    ) -> tuple[WorkerView, PrefillEstimate] | None:
        candidates = [
            worker
            for worker in view.prefill
            if worker.is_ready
            and worker.worker not in request.avoid
            and request.num_tokens <= capacity_tokens(worker)
        ]
        if not candidates:
            return None
        best = self._pick(candidates, lambda worker: self._estimate(worker, request).ttft_s)
        return best, self._estimate(best, request)

    def _best_local(
        self, view: ClusterView, decodes: list[WorkerView], request: PlacementRequest
    ) -> tuple[WorkerView, PrefillEstimate, float]:
        """(worker, its estimate, the estimate with the harm done to the requests decoding there)."""
        rates = [rate for worker in view.prefill if (rate := prefill_rate(worker)) is not None]
        assumed = mean(rates) * self.config.unmeasured_local_rate if rates else None

        def cost(worker: WorkerView) -> float:
            estimate = self._estimate(worker, request, assumed)
            return estimate.ttft_s + self.config.harm_weight * decode_harm_s(worker, estimate.compute_s)

        best = self._pick(decodes, cost)
        return best, self._estimate(best, request, assumed), cost(best)

    def _local_wins(
        self,
        prefill: WorkerView,
        remote: PrefillEstimate,
        local: WorkerView,
        local_cost: float,
        request: PlacementRequest,
    ) -> bool:
        if not remote.is_measured:
            return False
        if prefill.backlog_tokens == 0 and num_uncached(local, request) >= num_uncached(prefill, request):
            return False
        limit = min(remote.ttft_s * self.config.local_gain, remote.ttft_s - self.config.local_min_gain_s)
        return local_cost < limit

    # ---- costs

    def _estimate(
        self, worker: WorkerView, request: PlacementRequest, assumed_rate: float | None = None
    ) -> PrefillEstimate:
        return estimate_prefill(worker, num_uncached(worker, request), self.config, assumed_rate)

    def _new_blocks(self, worker: WorkerView, request: PlacementRequest) -> int:
        """Blocks for the uncached prompt and the growth a new request should find at once."""
        tokens = min(request.num_tokens + self.config.growth_tokens, request.max_kv_tokens)
        cached = request.num_tokens - num_uncached(worker, request)
        return max(1, -(-max(tokens, request.num_tokens) // worker.block_size) - cached // worker.block_size)

    def _decode_cost(self, worker: WorkerView, request: PlacementRequest) -> float:
        slots = 1 - (worker.slots_available - 1) / worker.max_num_seqs
        blocks = 1 - (worker.blocks_available - self._new_blocks(worker, request)) / worker.num_blocks
        cached = 1 - num_uncached(worker, request) / request.num_tokens
        return max(slots, blocks) - self.config.prefix_weight * cached

    def _pick(self, workers: list[WorkerView], cost: Callable[[WorkerView], float]) -> WorkerView:
        costs = [cost(worker) for worker in workers]
        least = min(costs)
        limit = least + abs(least) * self.config.tie_tolerance
        equal = [worker for worker, value in zip(workers, costs, strict=True) if value <= limit]
        return min(equal, key=lambda worker: (worker.last_placed, worker.worker))

    def _placement(
        self,
        prefill: WorkerView | None,
        decode: WorkerView,
        estimate: PrefillEstimate,
        request: PlacementRequest,
    ) -> Placement:
        return Placement(
            prefill=None if prefill is None else prefill.worker,
            decode=decode.worker,
            predicted_ttft_s=estimate.ttft_s,
            prefill_tokens=num_uncached(prefill or decode, request),
            decode_blocks=self._new_blocks(decode, request),
        )


def capacity_tokens(worker: WorkerView) -> int:
    """Most tokens whose KV one request may have here."""
    return min(worker.num_blocks * worker.block_size, worker.max_model_len - 1)


def num_uncached(worker: WorkerView, request: PlacementRequest) -> int:
    """Tokens to compute here, by what is believed cached; the last one is always computed."""
    return max(1, request.num_tokens - worker.cached_tokens(request.hashes))
