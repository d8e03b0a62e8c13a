"""Int8 matrices: the rounding that every backend shares, in plain torch.

A weight gets one scale per output channel, an activation one per row: value ≈ scale · q with q a whole number
in [-127, 127]. Zero is always exact, and so is the sign.

`INT8` weights obey one rule more: of each two neighbours along k (2i, 2i + 1), the positive ones add up to at
most `PAIR_LIMIT`, and so do the negative ones' magnitudes. Then 255 · q0 + 255 · q1 fits 16 signed bits: the
byte products of machines without a dot-product instruction are exact too, at twice the speed. A channel whose
neighbours would break the rule gets a larger scale: of Gaussian weights about a third larger.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

LEVELS = 127.0
PAIR_LIMIT = 128
SMALLEST = 1e-30  # rows and channels whose largest magnitude is below count as zeros
MAX_IN_FEATURES = 131_072  # 127 · 127 · this fits an int32 sum


class Quantization(enum.StrEnum):
    """What happens to the matrices of a model: its norms, biases and embedding rows stay as they are."""

    NONE = "none"
    INT8 = "int8"  # weights int8 per output channel, activations int8 per row, exact integer sums
    INT8_WEIGHTS = "int8-weights"  # weights int8 per output channel; activations and sums as without


def quantize_weight(weight: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """weight [out, in] → (int8 [out, in], scales fp32 [out]). A channel with a NaN or an infinity becomes
    zeros of scale NaN: its results are NaN.

    Raises:
        ValueError: more than `MAX_IN_FEATURES` input features: sums could overflow.
    """
    if weight.shape[1] > MAX_IN_FEATURES:
        raise ValueError(f"int8 takes at most {MAX_IN_FEATURES} input features: {weight.shape[1]}")
    parts = [_quantize_channels(part.float(), quantization) for part in weight.split(4096)]
    if not parts:
        return weight.to(torch.int8), weight.new_zeros(0, dtype=torch.float32)
    values, scales = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [num_tokens, in] → (int8 [num_tokens, in], scales fp32 [num_tokens]).

    scale = max |x| / 127, q = x · (127 / max |x|) to the nearest integer, ties to even; all in fp32. Rows of
    zeros and rows with a NaN or an infinity as in `quantize_weight`.
    """
    x = x.float()
    return _quantize(x, x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0]))


def _quantize_channels(weight: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    if weight.shape[1] == 0:
        return weight.to(torch.int8), weight.new_zeros(weight.shape[0])
    largest = weight.abs().amax(dim=1)
    if quantization is Quantization.INT8:
        pairs = torch.nn.functional.pad(weight, (0, weight.shape[1] % 2)).unflatten(1, (-1, 2))
        positive, negative = pairs.clamp(min=0).sum(dim=2), pairs.clamp(max=0).sum(dim=2).neg()
        # rounding adds at most a half to each of the two
        bound = torch.maximum(positive, negative).amax(dim=1)
        largest = torch.maximum(largest, bound * (LEVELS / (PAIR_LIMIT - 1)))
    return _quantize(weight, largest)


def _quantize(values: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    is_finite, is_zero = largest.isfinite(), largest < SMALLEST
    # division by tensors: torch may multiply by a reciprocal, rounded twice, where one side is a number
    top = torch.full_like(largest, LEVELS)
    inverse = torch.where(is_finite & ~is_zero, top / largest, 0.0)
    scaled = torch.where(inverse[:, None] > 0, values * inverse[:, None], 0.0)
    scales = torch.where(is_zero, 0.0, largest / top)
    return scaled.round().to(torch.int8), torch.where(is_finite, scales, torch.nan)
