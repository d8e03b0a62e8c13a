"""How far one model's predictions are from another's, as pure functions of logits and token lists.

KL(P || Q) = sum_v p(v) · (log p(v) - log q(v))        in nats, one number per position
perplexity = exp(-mean log q(next token))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_ROWS = 64  # of logits that are carried in fp64 at a time


def kl_per_position(base: Tensor, other: Tensor) -> Tensor:
    """logits [positions, vocab] of both → fp64 [positions] of KL(base || other)."""
    parts = []
    for start in range(0, base.shape[0], _ROWS):
        p = base[start : start + _ROWS].double().log_softmax(dim=-1)
        q = other[start : start + _ROWS].double().log_softmax(dim=-1)
        parts.append((p.exp() * (p - q)).sum(dim=-1))
    return torch.cat(parts)


def log_likelihoods(logits: Tensor, next_tokens: Sequence[int]) -> Tensor:
    """logits [positions, vocab] → fp64 [positions] of log q(next token)."""
    targets = torch.tensor(list(next_tokens))[:, None]
    parts = [
        logits[start : start + _ROWS].double().log_softmax(dim=-1).gather(1, targets[start : start + _ROWS])
        for start in range(0, logits.shape[0], _ROWS)
    ]
    return torch.cat(parts).squeeze(1)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


@dataclass(frozen=True, slots=True)
class Quality:
    """One variant against the base; `kl_*` in nats per token."""

    name: str
    weight_megabytes: float
    perplexity: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    same_argmax: float  # share of positions, teacher-forced
    mean_common_prefix: float  # tokens of free-running greedy answers


@dataclass(slots=True)
class Tally:
    """Collects one variant's windows and answers; `quality` sums them up."""

    name: str
    weight_bytes: int
    divergences: list[Tensor] = field(default_factory=list)
    likelihoods: list[Tensor] = field(default_factory=list)
    agreements: list[Tensor] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)

    def add_window(self, base: Tensor, logits: Tensor, tokens: Sequence[int]) -> None:
        """Logits [len(tokens), vocab] of a window of text; the last one predicts nothing we know."""
        self.divergences.append(kl_per_position(base, logits))
        self.agreements.append(base.argmax(dim=-1) == logits.argmax(dim=-1))
        self.likelihoods.append(log_likelihoods(logits[:-1], tokens[1:]))

    def add_answer(self, base: Sequence[int], answer: Sequence[int]) -> None:
        self.prefixes.append(common_prefix(base, answer))

    def quality(self) -> Quality:
        divergence = torch.cat(self.divergences)
        return Quality(
            name=self.name,
            weight_megabytes=round(self.weight_bytes / 1e6, 1),
            perplexity=round(math.exp(-torch.cat(self.likelihoods).mean().item()), 4),
            kl_mean=round(divergence.mean().item(), 6),
            kl_p99=round(divergence.quantile(0.99).item(), 6),
            kl_max=round(divergence.max().item(), 6),
            same_argmax=round(torch.cat(self.agreements).double().mean().item(), 4),
            mean_common_prefix=round(sum(self.prefixes) / max(len(self.prefixes), 1), 1),
        )
