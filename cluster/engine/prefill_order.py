"""Which prompts share a step's token budget: the one policy both roles prefill by.

**Order.** Each prompt has a virtual deadline `accepted + min(remaining / tokens_per_s, aging_bound_s)`: a
short prompt overtakes a long one that arrived a little earlier, and nothing is overtaken by what arrives
after its deadline. As a prompt is computed, less remains and its deadline comes nearer.

**Budget.** The earliest deadline is the *head* and gets the budget, except for `short_share` of it, which the
others get, shortest remaining first; what they leave is the head's again. So while one long prompt fills
steps, short ones still pass through the share, and the head always has at least 1 - `short_share`.

**Nothing fits.** `admit` says whether a prompt may compute now (it holds or gets its blocks); who may not is
passed over, and it is asked in order of deadline first, so the oldest gets freed blocks first.

**Bounds.** A prompt that can get blocks becomes head within `aging_bound_s` plus the work that is ahead of
it then. O(n log n) in the number of waiting prompts per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """Parameters of the policy; see the module."""

    tokens_per_s: float = 2000.0
    aging_bound_s: float = 10.0
    short_share: float = 0.25

    def deadline(self, sequence: Sequence) -> float:
        """The virtual deadline, in the clock of `accepted_s`."""
        return sequence.accepted_s + min(sequence.num_remaining / self.tokens_per_s, self.aging_bound_s)

    def compose(
        self, waiting: Iterable[Sequence], budget: int, admit: Callable[[Sequence], bool]
    ) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens in this step, in order; the counts sum to at most `budget`."""
        ranked = sorted(waiting, key=lambda sequence: (self.deadline(sequence), sequence.order))
        head = next((sequence for sequence in ranked if admit(sequence)), None)
        if head is None or budget <= 0:
            return []
        share = int(budget * self.short_share) if len(ranked) > 1 else 0
        head_tokens = min(head.num_remaining, budget - share)
        left = budget - head_tokens
        others: list[tuple[Sequence, int]] = []
        for sequence in sorted(ranked, key=lambda sequence: (sequence.num_remaining, sequence.order)):
            if left == 0:
                break
            if sequence is not head and admit(sequence):
                num_tokens = min(sequence.num_remaining, left)
                others.append((sequence, num_tokens))
                left -= num_tokens
        head_tokens += min(head.num_remaining - head_tokens, left)
        return [(head, head_tokens), *others]
