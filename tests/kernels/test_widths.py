"""Products at vector widths that this machine may not have: other tiles and panels, the same promises."""

from __future__ import annotations

import ctypes
import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import build
from kernels.cpu.native import SIGNATURES
from kernels.quantization import Quantization, quantize_weight
from tests.kernels.test_int8 import INT8, SHAPES, assert_same_bits, make_case, native

PORTABLE = {
    "vectors of 4": ("-march=x86-64",),
    "vectors of 16": ("-DBATON_WIDTH=16", "-Wno-psabi"),
}
FUNCTIONS = (
    "panel_width",
    "packed_bytes",
    "pack",
    "out_features",
    "linear",
    "int8_packed_bytes",
    "int8_pack",
)
SOURCES = ("gemm.cpp", "gemm_amx.cpp", "gemm_coded.cpp", "gemm_dot.cpp", "gemm_int8.cpp", "line_rows.cpp")
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "-": None}


@pytest.fixture(scope="module", params=PORTABLE)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The matrix kernels compiled for another machine: the same sources without this one's instructions.
    Compiled fast, not for speed."""
    path = tmp_path_factory.mktemp("portable") / "kernels.so"
    flags = [flag for flag in build.FLAGS if flag not in ("-march=native", "-O3")]
    command = [
        build._compiler(),
        *flags,
        "-shared",
        "-O0",
        "-Wall",
        "-Wextra",
        "-Werror",
        *PORTABLE[request.param],
    ]
    sources = [str(build.SOURCE_DIR / name) for name in SOURCES]
    result = subprocess.run(
        [*command, *sources, "-o", str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    bound = ctypes.CDLL(str(path))
    for name in FUNCTIONS:
        function, letters = getattr(bound, f"baton_{name}"), SIGNATURES[f"baton_{name}"]
        function.argtypes = [TYPES[letter] for letter in letters[:-1]]
        function.restype = TYPES[letters[-1]]
    assert bound.baton_panel_width() == 2 * int(request.param.rpartition(" ")[2])
    return bound


def linear(library: Any, x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    y = torch.empty(x.shape[0], out_features)
    library.baton_linear(
        x.data_ptr(),
        x.dtype is torch.bfloat16,
        x.shape[0],
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        False,
        y.data_ptr(),
        False,
        1,
    )
    return y


@pytest.mark.parametrize(("in_features", "out_features"), [(100, 7), (33, 129), (3, 224), (577, 70)])
def test_every_number_of_rows(library: Any, dtype: torch.dtype, in_features: int, out_features: int) -> None:
    generator = torch.Generator().manual_seed(in_features)
    x = torch.randn(40, in_features, generator=generator).to(dtype)
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype)
    size = library.baton_packed_bytes(out_features, in_features, weight.element_size())
    packed = torch.empty(size, dtype=torch.uint8)
    library.baton_pack(weight.data_ptr(), out_features, in_features, weight.element_size(), packed.data_ptr())
    assert library.baton_out_features(packed.data_ptr(), size, in_features) == out_features
    alone = torch.cat([linear(library, x[row : row + 1], packed, out_features) for row in range(40)])
    torch.testing.assert_close(alone.double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-5)
    for num_rows in (*range(2, 30), 40):
        assert torch.equal(linear(library, x[:num_rows], packed, out_features), alone[:num_rows])


def int8_linear(library: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    values, scales = quantize_weight(weight, Quantization.INT8)
    out_features, in_features = weight.shape
    packed = torch.empty(library.baton_int8_packed_bytes(out_features, in_features), dtype=torch.uint8)
    kind, pointers = 1 + INT8.index(Quantization.INT8), (values.data_ptr(), scales.data_ptr())
    library.baton_int8_pack(kind, *pointers, out_features, in_features, packed.data_ptr())
    return linear(library, x.contiguous(), packed, out_features, bias)


def test_integer_products_have_the_same_bits_on_every_path(library: Any) -> None:
    here = native(Quantization.INT8)
    for in_features, out_features in SHAPES:
        for num_rows in (1, 5, 13):
            x, weight, bias = make_case(num_rows, in_features, out_features, torch.float32)
            expected = here.linear(x, here.pack_linear(weight), bias)
            assert_same_bits(int8_linear(library, x, weight, bias), expected)
