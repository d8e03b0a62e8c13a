"""Tile shapes per kind of device: looked up, never searched for while serving.

In `Mode.EXACT` everything here that shapes a sum is part of the numeric configuration: two workers give equal
bits only with equal tiles. So the tables go by compute capability, never by product, free memory or load,
and a tile never depends on how many rows a call has.

The numbers for GPUs are chosen from the size of registers and shared memory, and checked by compiling
(`kernels.triton.compile_check`). They have not been measured.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kernels.requested import requested

MODE_VARIABLE: Final = "BATON_GPU_MODE"


class Mode(enum.StrEnum):
    """What a GPU's results depend on."""

    EXACT = "exact"  # a row's bits depend on that row alone, on one kind of GPU
    FAST = "fast"  # the vendor's matrix products, split counts as they come: bits may depend on the batch


class ModeError(ValueError):
    """`BATON_GPU_MODE` names no mode."""


def requested_mode(environment: Mapping[str, str]) -> Mode:
    """
    Raises:
        ModeError: the user asks for a mode that there is not.
    """
    return requested(environment, MODE_VARIABLE, Mode.EXACT, ModeError)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`rows`: query heads of one KV head, of one or several positions, that one program keeps."""

    rows: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class GemmTile:
    """`rows` of x by `columns` of the weight, `depth` of the sum at a time; sums are cut in `split_k`."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    most_programs: int  # a weight's sums are cut until so many programs would work on one tile of rows
    least_depth: int  # of one cut

    def split_k(self, out_features: int, in_features: int) -> int:
        """Into how many parts the sum over `in_features` is cut: by the weight's shape alone."""
        across, splits = -(-out_features // self.columns), 1
        while 2 * splits * across <= self.most_programs and in_features // (2 * splits) >= self.least_depth:
            splits *= 2
        return splits

    def part_depth(self, out_features: int, in_features: int) -> int:
        """Length of a part of the sum, a multiple of `depth`; the last may be shorter."""
        splits = self.split_k(out_features, in_features)
        return -(-in_features // (splits * self.depth)) * self.depth


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of one kind of device, for 2-byte and for 4-byte elements."""

    name: str
    num_processors: int  # typical: only how work is spread follows from it, never a sum
    attention: AttentionTile
    attention_wide: AttentionTile  # head_dim above 128
    attention_fp32: AttentionTile
    attention_fast: AttentionTile  # of decode rows in `Mode.FAST`
    gemm: GemmTile
    gemm_fp32: GemmTile

    def attention_for(
        self, head_dim: int, item_bytes: int, group: int, mode: Mode, is_decode: bool
    ) -> AttentionTile:
        """`group`: query heads per KV head. In exact mode decode and prefill share one tile: another tile may
        be another instruction."""
        if item_bytes == 4:
            return self.attention_fp32
        if head_dim > 128:
            return self.attention_wide
        small = mode is Mode.FAST and is_decode and group <= self.attention_fast.rows
        return self.attention_fast if small else self.attention

    def gemm_for(self, item_bytes: int) -> GemmTile:
        return self.gemm_fp32 if item_bytes == 4 else self.gemm


HOPPER = Tiles(
    name="sm90",
    num_processors=132,
    attention=AttentionTile(rows=64, num_warps=4, num_stages=2),
    attention_wide=AttentionTile(rows=64, num_warps=8, num_stages=1),
    attention_fp32=AttentionTile(rows=16, num_warps=8, num_stages=1),
    attention_fast=AttentionTile(rows=16, num_warps=4, num_stages=3),
    gemm=GemmTile(64, 128, 64, num_warps=4, num_stages=4, most_programs=264, least_depth=512),
    gemm_fp32=GemmTile(32, 64, 32, num_warps=4, num_stages=2, most_programs=264, least_depth=512),
)
AMPERE = Tiles(
    name="sm80",
    num_processors=108,
    attention=AttentionTile(rows=32, num_warps=4, num_stages=1),
    attention_wide=AttentionTile(rows=16, num_warps=4, num_stages=1),
    attention_fp32=AttentionTile(rows=16, num_warps=8, num_stages=1),
    attention_fast=AttentionTile(rows=16, num_warps=4, num_stages=1),
    gemm=GemmTile(64, 128, 32, num_warps=4, num_stages=3, most_programs=216, least_depth=512),
    gemm_fp32=GemmTile(32, 64, 32, num_warps=4, num_stages=2, most_programs=216, least_depth=512),
)
INTERPRETER = Tiles(
    name="interpreter",
    num_processors=2,
    attention=AttentionTile(rows=16, num_warps=1, num_stages=1),
    attention_wide=AttentionTile(rows=16, num_warps=1, num_stages=1),
    attention_fp32=AttentionTile(rows=16, num_warps=1, num_stages=1),
    attention_fast=AttentionTile(rows=16, num_warps=1, num_stages=1),
    gemm=GemmTile(16, 64, 64, num_warps=1, num_stages=1, most_programs=8, least_depth=64),
    gemm_fp32=GemmTile(16, 64, 64, num_warps=1, num_stages=1, most_programs=8, least_depth=64),
)


def tiles_for(capability: tuple[int, int]) -> Tiles:
    """Capability 9.0 has tables of its own; others take the cautious ones of 8.0."""
    return HOPPER if capability == (9, 0) else AMPERE
