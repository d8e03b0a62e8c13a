"""What is said where Triton kernels cannot run; needs no triton."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from cluster.engine.backends import make_backend
from cluster.errors import ConfigError
from kernels.triton import availability
from kernels.triton.availability import why_unavailable


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_unavailable() == "the triton backend needs the package `triton`: pip install triton"
    with pytest.raises(ConfigError, match="needs the package `triton`"):
        make_backend("triton", 1)


def test_without_a_device(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = why_unavailable()
    assert reason is not None
    assert reason.startswith("the triton backend needs a CUDA device: torch ")
    assert "\n" not in reason
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        make_backend("triton", 1)


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_capability(installed, monkeypatch, capability, fits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some card")
    expected = None if fits else "the triton backend needs compute capability 8.0 or more: some card has 7.5"
    assert why_unavailable() == expected


def test_without_what_launchers_are_compiled_with(installed, monkeypatch, tmp_path):
    """Triton itself would say so when the first kernel is started."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(availability.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    needs = "the triton backend needs"
    missing = f"{needs} Python.h to start kernels, not in {tmp_path}: install python3-dev"
    assert why_unavailable() == missing
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(availability.shutil, "which", lambda name: None)
    assert why_unavailable() == f"{needs} a C compiler to start kernels: install gcc, or set `CC`"


def test_the_interpreter_needs_no_device(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert availability.interpreting()
    assert why_unavailable() is None


def test_quantized_weights_are_refused():
    with pytest.raises(ConfigError, match="triton backend does not compute with quantization `int8`"):
        make_backend("triton", 1, "int8")
