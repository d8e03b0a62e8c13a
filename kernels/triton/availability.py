"""Whether Triton kernels can run here, told in one line, without importing what may be missing."""

from __future__ import annotations

import importlib.util
import os

import torch

MIN_CAPABILITY = (8, 0)  # bf16 on tensor cores


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: on a CPU, for tests. Triton reads the same variable when
    kernels are imported, so it must not change afterwards."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def why_unavailable() -> str | None:
    """One line that says what is missing; None: `kernels.triton.backend` can be imported and used."""
    if importlib.util.find_spec("triton") is None:
        return "the triton backend needs the package `triton`: pip install triton"
    if interpreting():
        return None
    if not torch.cuda.is_available():
        build = "a build with CUDA" if torch.version.cuda else "a build without CUDA"
        return f"the triton backend needs a CUDA device: torch {torch.__version__} ({build}) sees none"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name()
        needed, found = (f"{major}.{minor}" for major, minor in (MIN_CAPABILITY, capability))
        return f"the triton backend needs compute capability {needed} or more: {name} has {found}"
    return None
