"""Triton's matrix products: right, and a row's bits are its own, however a call is spread over programs."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import ReferenceBackend
from tests.kernels.triton_support import DEVICE, DTYPES, TOLERANCES, random, require

gemm = require("kernels.triton.gemm")
tiles = require("kernels.triton.tiles")
TILE = tiles.INTERPRETER.gemm
SHAPES = ((200, 40), (64, 33), (130, 70), (1, 1), (33, 7))

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make_case(num_rows, in_features, out_features, dtype):
    x = random(num_rows, in_features, dtype=dtype, seed=num_rows)
    weight = (random(out_features, in_features, seed=1) / in_features**0.5).to(dtype)
    return x, weight, random(out_features, dtype=dtype, seed=2)


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_linear(dtype, in_features, out_features):
    """Close to the reference, rounded once, and equal whether the parts of a sum run apart or not."""
    x, weight, bias = make_case(21, in_features, out_features, dtype)
    reference = ReferenceBackend(DEVICE)
    wide = gemm.linear(x, weight, None, torch.float32, TILE, apart=False)
    torch.testing.assert_close(wide, reference.linear_fp32(x, weight), rtol=2e-5, atol=2e-5)
    with_bias = gemm.linear(x, weight, bias, dtype, TILE, apart=False)
    assert torch.equal(with_bias, (wide + bias.float()).to(dtype))
    assert torch.equal(gemm.linear(x, weight, bias, dtype, TILE, apart=True), with_bias)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(with_bias, reference.linear(x, weight, bias), rtol=tolerance, atol=tolerance)


def test_a_rows_bits_do_not_depend_on_the_batch(dtype):
    x, weight, bias = make_case(40, 200, 40, dtype)
    whole = gemm.linear(x, weight, bias, dtype, TILE)
    for start, stop in ((0, 1), (39, 40), (15, 17), (7, 40), (0, 16)):
        assert torch.equal(gemm.linear(x[start:stop], weight, bias, dtype, TILE), whole[start:stop])
    backwards = gemm.linear(x.flip(0), weight, bias, dtype, TILE)
    assert torch.equal(backwards.flip(0), whole)


def test_neighbouring_rows_do_not_leak(dtype):
    x, weight, _ = make_case(16, 70, 33, dtype)
    clean = gemm.linear(x, weight, None, dtype, TILE)
    x[3] = torch.nan
    broken = gemm.linear(x, weight, None, dtype, TILE)
    assert broken[3].isnan().all()
    rest = [row for row in range(16) if row != 3]
    assert torch.equal(broken[rest], clean[rest])


def test_nothing_to_do(dtype):
    x, weight, bias = make_case(3, 32, 8, dtype)
    assert gemm.linear(x[:0], weight, bias, dtype, TILE).shape == (0, 8)
    assert gemm.linear(x, weight[:0], None, dtype, TILE).shape == (3, 0)
    with pytest.raises(ValueError, match="`weight` must have shape"):
        gemm.linear(x, weight[:, :31], None, dtype, TILE)


def test_how_a_sum_is_cut_follows_from_the_weight_alone(dtype):
    for tile in (tiles.HOPPER.gemm_for(dtype.itemsize), tiles.AMPERE.gemm_for(dtype.itemsize)):
        for out_features, in_features in (
            (4096, 4096),
            (28672, 4096),
            (4096, 14336),
            (128_256, 4096),
            (960, 576),
        ):
            splits = tile.split_k(out_features, in_features)
            depth = tile.part_depth(out_features, in_features)
            assert depth % tile.depth == 0
            assert (splits - 1) * depth < in_features <= splits * depth
            across = -(-out_features // tile.columns)
            assert splits == 1 or splits * across <= tile.most_programs
    assert tiles.HOPPER.gemm.split_k(4096, 4096) == 8
    assert tiles.HOPPER.gemm.split_k(128_256, 4096) == 1
