"""Products at vector widths that this machine may not have: other tiles and panels, the same promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import build
from kernels.cpu.native import bind


@pytest.fixture(scope="module", params=(4, 16))
def library(request: pytest.FixtureRequest) -> Any:
    """Cached like the machine's own; compiled fast, not for speed."""
    flags = (*build.FLAGS, "-O0", "-Wno-psabi", f"-DBATON_WIDTH={request.param}")
    bound = bind(build.load_library(flags))
    assert bound.baton_panel_width() == 2 * request.param
    return bound


def linear(library: Any, x: Tensor, packed: Tensor, out_features: int) -> Tensor:
    y = torch.empty(x.shape[0], out_features)
    library.baton_linear(
        x.data_ptr(),
        x.dtype is torch.bfloat16,
        x.shape[0],
        packed.data_ptr(),
        None,
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
