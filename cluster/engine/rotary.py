"""The table of cos and sin that `Backend.rotary` reads."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from cluster.engine.rope_spec import RopeSpec, RopeType


def rotary_tables(rope: RopeSpec, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos, sin [num_positions, head_dim // 2] fp32.

    The angle is position·frequency rounded to fp32, as the published models compute it; its cosine is
    taken in fp64 and rounded once, one element at a time, so that an entry's bits depend neither on the
    length of the table nor on the number of threads.
    """
    frequencies = inverse_frequencies(rope, head_dim).numpy()
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies[None, :]
    cos = np.cos(angles.astype(np.float64)).astype(np.float32)
    sin = np.sin(angles.astype(np.float64)).astype(np.float32)
    if rope.rope_type is RopeType.YARN:
        cos *= np.float32(rope.attention_factor)
        sin *= np.float32(rope.attention_factor)
    return torch.from_numpy(cos), torch.from_numpy(sin)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim // 2] fp32, in the order of operations of the published models."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    base = 1.0 / powers
    match rope.rope_type:
        case RopeType.DEFAULT:
            return base
        case RopeType.LINEAR:
            return base / rope.factor
        case RopeType.FACTORS:
            return 1.0 / (torch.tensor(rope.frequency_factors, dtype=torch.float32) * powers)
        case RopeType.LLAMA3:
            return _llama3(base, rope)
        case RopeType.YARN:
            return _yarn(powers, rope, head_dim)


def _llama3(base: Tensor, rope: RopeSpec) -> Tensor:
    """Wavelengths beyond `original / low_freq_factor` are stretched, those below `original /
    high_freq_factor` are kept, a linear ramp in between."""
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    wavelengths = 2 * math.pi / base
    scaled = torch.where(wavelengths > low_wavelength, base / rope.factor, base)
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramped = (1 - smooth) * scaled / rope.factor + smooth * scaled
    in_between = (wavelengths >= high_wavelength) & (wavelengths <= low_wavelength)
    return torch.where(in_between, ramped, scaled)


def _yarn(powers: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Frequencies that turn more than `beta_fast` times over the original length are kept, those below
    `beta_slow` turns are interpolated, a linear ramp over the dimensions in between."""

    def dimension(num_turns: float) -> float:
        turns = rope.original_max_position / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
