"""One simulated request: what it asks, where it is, and when its first and last token came."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Request:
    """`num_output` is known to the simulated model alone; no policy reads it before the request has ended."""

    index: int
    arrival_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's blocks, for the prefix caches
    # written by the worker that computes it
    num_tokens: int = 0  # to prefill: the prompt and, after a preemption, what it had generated
    num_computed: int = 0
    num_generated: int = 0
    has_begun: bool = False
    start_step: int = 0  # of the worker, when it joined the batch
    kv_arrives_s: float = 0.0  # when the last piece of its KV is where it decodes
    first_s: float | None = None
    finish_s: float | None = None
    last_token_s: float = 0.0  # last token before it joined a batch
    worst_gap_s: float = 0.0
    num_preemptions: int = 0
    is_batch: bool = False
    # written by the policy
    deadline_s: float = 0.0
    decode_s: float = 0.0
    load_s: float = 0.0
    prefill_at: int = -1
    decode_at: int = -1
    is_reserved: bool = False  # counted in the decode worker's load
    is_promised: bool = False  # its KV, where it is computed
    is_rejected: bool = False

    @property
    def new_kv_tokens(self) -> int:
        return 0 if self.has_begun else self.num_tokens + 1

    @property
    def tpot_s(self) -> float:
        if self.num_output <= 1 or self.first_s is None or self.finish_s is None:
            return 0.0
        return (self.finish_s - self.first_s) / (self.num_output - 1)
