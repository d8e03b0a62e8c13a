"""Backends under test, one of each for the session; the C++ kernels come from the machine's cache."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.cpu.build import load_library
from kernels.cpu.native import bind
from kernels.ops import Backend
from kernels.reference import ReferenceBackend
from tests.support.isa_emulation import emulated_library

BACKENDS = ("reference", "cpu", "cpu-fallback")
DTYPES = (torch.float32, torch.bfloat16)

BackendFactory = Callable[[int], Backend]


@pytest.fixture(scope="session")
def fallback_backend(tmp_path_factory: pytest.TempPathFactory) -> CpuBackend:
    saved = {name: os.environ.get(name) for name in ("CXX", "BATON_CACHE_DIR")}
    os.environ["CXX"] = "no-such-compiler"
    os.environ["BATON_CACHE_DIR"] = str(tmp_path_factory.mktemp("empty-cache"))
    try:
        return CpuBackend(1)
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture(params=BACKENDS)
def make_backend(request: pytest.FixtureRequest, fallback_backend: CpuBackend) -> Iterator[BackendFactory]:
    """make_backend(num_threads) → the backend, torch's own threads set to as many."""
    num_threads_before = torch.get_num_threads()

    def make(num_threads: int) -> Backend:
        torch.set_num_threads(num_threads)
        if request.param == "reference":
            return ReferenceBackend()
        if request.param == "cpu-fallback":
            assert not fallback_backend.is_native
            return fallback_backend
        backend = CpuBackend(num_threads)
        assert backend.is_native, "the C++ kernels did not compile here: see the log"
        return backend

    yield make
    torch.set_num_threads(num_threads_before)


@pytest.fixture
def backend(make_backend: BackendFactory) -> Backend:
    return make_backend(1)


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    result: torch.dtype = request.param
    return result


@pytest.fixture(scope="module", params=["emulated", "real"])
def dot_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """With dot products (pairs of bf16, bytes): emulated anywhere, and the machine's own if it has them."""
    library = emulated_library() if request.param == "emulated" else load_library()
    if not bind(library).baton_dot_is_there():
        pytest.skip("this machine has no dot products of bf16 pairs")
    return library
