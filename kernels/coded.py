"""Matrices as GGUF files keep them: small whole numbers, and a scale and a minimum per block of 32.

A bf16 model reads such a file as bf16(code · scale + minimum). A backend that decodes while it multiplies
keeps the codes instead and gives the same results bit for bit, reading 5 or 8.5 bits per weight of memory.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.requested import requested

BLOCK_SIZE: Final = 32
FORM_VARIABLE: Final = "BATON_GGUF_WEIGHTS"


class CodedForm(enum.StrEnum):
    """What becomes of matrices that a file keeps as codes."""

    AUTO = "auto"  # codes; in a small model decoded ones too, for steps of many rows (`Packing.pack_coded`)
    SMALL = "small"  # codes alone
    EXPAND = "expand"  # decoded ones alone


class CodedFormError(ValueError):
    """`BATON_GGUF_WEIGHTS` names no form."""


def requested_form(environment: Mapping[str, str]) -> CodedForm:
    """
    Raises:
        CodedFormError: the user asks for a form that there is not.
    """
    return requested(environment, FORM_VARIABLE, CodedForm.AUTO, CodedFormError)


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """weight[n, k] = codes[n, k] · scales[n, k // 32] + minima[n, k // 32], rounded once to fp32."""

    codes: Tensor  # [out, in]: uint8 from 0 to 15 with minima, int8 without
    scales: Tensor  # [out, in / 32] fp16
    minima: Tensor | None  # [out, in / 32] fp16

    def __post_init__(self) -> None:
        """Kernels trust it.

        Raises:
            ValueError: a tensor has another type or shape.
        """
        out_features, in_features = self.codes.shape
        blocks = (out_features, in_features // BLOCK_SIZE)
        parts = (self.scales, *(() if self.minima is None else (self.minima,)))
        codes_dtype = torch.int8 if self.minima is None else torch.uint8
        if in_features % BLOCK_SIZE or self.codes.dtype is not codes_dtype:
            raise ValueError(f"codes are {tuple(self.codes.shape)} of {self.codes.dtype}")
        if any(tuple(part.shape) != blocks or part.dtype is not torch.float16 for part in parts):
            raise ValueError(f"scales and minima must be fp16 {blocks}")

    def decode(self) -> Tensor:
        """[out, in] fp32."""
        blocks = self.codes.float().unflatten(1, (-1, BLOCK_SIZE)) * self.scales.float()[..., None]
        if self.minima is not None:
            blocks = blocks + self.minima.float()[..., None]
        return blocks.flatten(1)

    @property
    def is_finite(self) -> bool:
        parts = (self.scales, *(() if self.minima is None else (self.minima,)))
        return all(bool(part.isfinite().all()) for part in parts)


def stack(parts: Sequence[CodedMatrix]) -> CodedMatrix | None:
    """One under the other; None if some have minima and others not."""
    minima = [part.minima for part in parts if part.minima is not None]
    if minima and len(minima) < len(parts):
        return None
    return CodedMatrix(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
    )
