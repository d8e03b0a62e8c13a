"""Triton's kernels where there is no GPU: in its interpreter, fp32 and fp16, tiny shapes."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch

from kernels.triton.availability import interpreting, why_unavailable

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are imported


def why_not() -> str | None:
    if reason := why_unavailable():
        return reason
    if interpreting():
        from kernels.triton.interpreter import why_not as why_not_interpreted

        return why_not_interpreted()
    return None


def require(name: str) -> ModuleType:
    """The module called `name`; where kernels cannot run, the whole test module is skipped and says why."""
    if reason := why_not():
        pytest.skip(reason, allow_module_level=True)
    return importlib.import_module(name)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
