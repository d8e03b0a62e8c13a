"""Whether Triton kernels can run here, told in one line, without importing what may be missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

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
    return _why_no_launchers()


def _why_no_launchers() -> str | None:
    """Triton compiles a few lines of C for each kind of launch, with what it finds where it looks here."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "the triton backend needs a C compiler to start kernels: install gcc, or set `CC`"
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    headers = sysconfig.get_paths(scheme=scheme)["include"]
    if not Path(headers, "Python.h").exists():
        return f"the triton backend needs Python.h to start kernels, not in {headers}: install python3-dev"
    return None
