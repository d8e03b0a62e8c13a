"""Choosing a step's tokens without the host: what `kernels.triton.sampler` does for rows without edits.

1. The rules of the rows lie in arrays on the device, and are written only when the rows change.
2. `choose` finds each row's peak, draws for every row if any draws, and takes the largest logit where a row
   is greedy. Nothing depends on a number that the host would have to see, so a graph can hold all of it.
3. A row whose peak is not a finite number has the id 0 and a flag: the other sampler knows what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.draw_kind import DrawKind, is_greedy
from kernels.ops import SamplingParameters
from kernels.triton.sampling_edits import LARGEST
from kernels.triton.selection import (
    Rows,
    draw_rows,
    inverse_temperatures,
    kept_count,
    kept_share,
    signed,
)


class TritonDeviceSampler:
    """`kernels.ops.DeviceSampler`."""

    def __init__(self, device: torch.device, max_rows: int, vocab_size: int) -> None:
        self._size = vocab_size
        max_rows = -(-max_rows // 4) * 4  # every array at an address that kernels are compiled for
        pinned = device.type == "cuda"
        # int64: counts, seeds, whether greedy; fp32: 1 / temperature, min-p; fp64: top-p
        shapes = (
            ((3, max_rows), torch.int64),
            ((2, max_rows), torch.float32),
            ((1, max_rows), torch.float64),
        )
        self._host = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for shape, dtype in shapes]
        self._device = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        self._places = torch.arange(max_rows, device=device)
        neutral = ((vocab_size, 0, 1), (1.0, 0.0), (1.0,))  # a row without a rule is greedy
        for host, there, values in zip(self._host, self._device, neutral, strict=True):
            host.copy_(torch.tensor(values, dtype=host.dtype)[:, None].expand_as(host))
            there.copy_(host)

    def set_rules(self, rules: Sequence[SamplingParameters]) -> None:
        integers, floats, shares = (host.numpy() for host in self._host)
        count = len(rules)
        if count > integers.shape[1]:
            raise ValueError(f"{count} rules, of at most {integers.shape[1]}")
        greedy = [is_greedy(rule) for rule in rules]
        integers[:, :count] = (
            [kept_count(rule.top_k, self._size) for rule in rules],
            [signed(rule.seed) for rule in rules],
            greedy,
        )
        floats[0, :count] = inverse_temperatures(
            [1.0 if one else min(rule.temperature, LARGEST) for rule, one in zip(rules, greedy, strict=True)]
        )
        floats[1, :count] = np.array([min(rule.min_p, 1.0) for rule in rules], np.float32)
        shares[0, :count] = [kept_share(rule.top_p) for rule in rules]
        for host, there in zip(self._host, self._device, strict=True):
            there.copy_(host, non_blocking=True)

    def choose(self, logits: Tensor, best: Tensor, positions: Tensor, kind: DrawKind, chosen: Tensor) -> None:
        num_rows = logits.shape[0]
        peaks = logits.gather(1, best[:, None])[:, 0]
        is_usual = peaks.isfinite()
        ids = best
        if kind is not DrawKind.GREEDY:
            integers, floats, shares = self._device
            drawn = draw_rows(
                Rows(
                    scores=logits,
                    places=self._places[:num_rows],
                    peaks=peaks,
                    inverses=floats[0, :num_rows],
                    least=floats[1, :num_rows],
                    counts=integers[0, :num_rows],
                    shares=shares[0, :num_rows],
                    seeds=integers[1, :num_rows],
                    positions=positions,
                    by_count=kind is DrawKind.NARROW,
                    by_weight=kind is DrawKind.NARROW,
                )
            )
            ids = torch.where(integers[2, :num_rows] == 1, best, drawn)
        chosen[0].copy_(torch.where(is_usual, ids, 0))
        chosen[1].copy_(~is_usual)
