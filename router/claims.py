"""What this router has placed on one worker, and what the worker's report says beyond it.

1. `ClaimBook.add` enters an attempt's `Claim`; `prefilled` and `decoding` move it on; `remove` takes it out.
2. Each of them moves the `Totals` by exactly what the claim is, in integers: they equal the sums over the
   claims at any time, so they cannot drift or leak.
3. A report is of a moment: what it says beyond the claims of that moment is somebody else's (other routers'
   requests, growth) and stays until the next one. Work that a report says is done is a `Backlog`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from cluster.ids import BlockHash, RequestId


class Phase(Enum):
    """Of a claim on one worker."""

    PREFILL = auto()  # its prompt waits or is computed here
    COMING = auto()  # it will decode here; its prompt is computed elsewhere
    DECODE = auto()
    HELD = auto()  # computed here, KV still held for the hand-off


class Claim(msgspec.Struct, frozen=True, gc=False):
    """One attempt's claim on one worker. Immutable: a change of phase is another claim."""

    phase: Phase
    num_tokens: int  # of the prompt, and what a former attempt generated
    new_tokens: int = 0  # of them to be computed here
    attention: int = 0  # query-key pairs of those
    num_blocks: int = 0  # KV, beyond what was cached
    stays: bool = False  # it decodes here
    hashes: tuple[BlockHash, ...] = ()  # full blocks that it will leave in the cache
    sent_at: float | None = None  # when the worker was told of the prompt
    is_seen: bool = False  # the prompt is part of the latest report


class Totals(msgspec.Struct):
    """Sums over claims."""

    seqs: int = 0
    blocks: int = 0
    new_tokens: int = 0  # of prompts that wait or are computed here
    attention: int = 0
    queued_rows: int = 0  # of these prompts, the ones that will decode here
    queued_context: int = 0
    coming_rows: int = 0  # all that will decode here
    coming_context: int = 0
    rows: int = 0
    context: int = 0

    def move(self, claim: Claim, sign: int) -> None:
        self.seqs += sign
        self.blocks += sign * claim.num_blocks
        if claim.phase is Phase.PREFILL:
            self.new_tokens += sign * claim.new_tokens
            self.attention += sign * claim.attention
            if claim.stays:
                self.queued_rows += sign
                self.queued_context += sign * claim.num_tokens
        if claim.phase is Phase.COMING or (claim.phase is Phase.PREFILL and claim.stays):
            self.coming_rows += sign
            self.coming_context += sign * claim.num_tokens
        if claim.phase is Phase.DECODE:
            self.rows += sign
            self.context += sign * claim.num_tokens


class ClaimBook:
    """Owns the claims on one worker and their totals."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._claims: dict[RequestId, Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._claims.values())

    def requests(self) -> list[RequestId]:
        """Oldest first."""
        return list(self._claims)

    def get(self, request: RequestId) -> Claim | None:
        return self._claims.get(request)

    def add(self, request: RequestId, claim: Claim) -> None:
        """A request has one claim per worker: another takes the place of the former."""
        self.remove(request)
        self._claims[request] = claim
        self.totals.move(claim, 1)

    def change(self, request: RequestId, claim: Claim) -> None:
        """In its place in the order."""
        self.totals.move(self._claims[request], -1)
        self._claims[request] = claim
        self.totals.move(claim, 1)

    def remove(self, request: RequestId) -> Claim | None:
        """Fine for an unknown request."""
        claim = self._claims.pop(request, None)
        if claim is not None:
            self.totals.move(claim, -1)
        return claim

    def note_report(self, told_before: float) -> Totals:
        """Mark the prompts that a report of now must know of; returns their totals."""
        seen = Totals()
        for request, claim in self._claims.items():
            if claim.phase is not Phase.PREFILL:
                continue
            is_seen = claim.sent_at is not None and claim.sent_at <= told_before
            if is_seen != claim.is_seen:
                claim = self._claims[request] = msgspec.structs.replace(claim, is_seen=is_seen)
            if is_seen:
                seen.move(claim, 1)
        return seen


@dataclass(slots=True)
class Backlog:
    """A sum of work that a worker reported, with what has joined and left since."""

    foreign: float = 0.0  # reported beyond what this router has there
    done: float = 0.0  # of this router's, reported as computed (or given up) already

    def report(self, value: float, seen: float) -> None:
        """`seen`: what this router's claims that are part of the report come to, whole."""
        self.foreign, self.done = max(0.0, value - seen), max(0.0, seen - value)

    def left(self, own: float) -> None:
        """A claim of that much that was part of the report is over: what was done was most likely its."""
        self.done = max(0.0, self.done - own)

    def value(self, own: float) -> float:
        """`own`: what this router's claims come to now, whole."""
        return max(0.0, self.foreign + own - self.done)
