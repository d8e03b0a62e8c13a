"""KV in int8: quantized from a row's own values, the same bytes in every backend, and read back right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ops import KV_SCALE_BYTES, PARTITION_SIZE, pool_head_dim, row_size
from kernels.reference import ReferenceBackend, dequantize_kv, quantize_kv
from tests.kernels.attention_world import World

HEADS = ((9, 3), (4, 4), (8, 1), (8, 2))  # groups of 3, 1, 8, 4
HEAD_DIMS = (32, 64, 80, 128)
CONTEXTS = (1, 16, 17, 127, 128, 129, 300)
TINY = torch.finfo(torch.float32).tiny


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows of very unequal size, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(4 * torch.randn(*shape[:-1], 1, generator=generator))
    return (torch.randn(*shape, generator=generator) * sizes).to(dtype)


def scale_of(kept: Tensor) -> Tensor:
    return kept[..., -KV_SCALE_BYTES:].contiguous().view(torch.float32)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_value_is_within_half_a_step(head_dim: int) -> None:
    x = rows(200, 3, head_dim)
    kept = quantize_kv(x)
    assert kept.shape == (200, 3, row_size(head_dim, torch.int8))
    assert pool_head_dim(kept) == head_dim
    largest = x.abs().amax(-1, keepdim=True)
    assert torch.equal(scale_of(kept), (largest.double() / 127).float())
    assert ((dequantize_kv(kept) - x).abs() <= 0.5001 * scale_of(kept)).all()
    assert torch.equal(kept[..., :head_dim].abs().amax(-1), torch.full((200, 3), 127, dtype=torch.int8))


def test_halves_go_to_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    assert quantize_kv(x)[:8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 10, 6])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_every_backend_writes_the_same_bytes(backend, dtype, head_dim, num_kv_heads):
    num_tokens, num_blocks, block_size = 40, 5, 16
    k, v = (rows(num_tokens, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    for place, special in enumerate(SPECIAL):
        k[place, 0, :4], v[-1 - place, -1, :4] = torch.tensor(special[:4]), torch.tensor(special[:4])
    k[20], v[21] = 0.0, -0.0
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(3))[:num_tokens]
    shape = (num_blocks, 3, 2, block_size, num_kv_heads, row_size(head_dim, torch.int8))
    pool, expected = torch.full(shape, 7, dtype=torch.int8), torch.full(shape, 7, dtype=torch.int8)
    backend.write_kv(k, v, pool, 1, slots)
    ReferenceBackend().write_kv(k, v, expected, 1, slots)
    assert torch.equal(pool, expected)
    assert (pool[:, 0] == 7).all()
    assert (pool[:, 2] == 7).all()
    blocks, offsets = slots // block_size, slots % block_size
    assert torch.equal(pool[blocks, 1, 0, offsets], quantize_kv(k))
    assert torch.equal(pool[blocks, 1, 1, offsets], quantize_kv(v))


# first elements of a row -> nothing may overflow, divide by zero, or hide that a value is broken
SPECIAL = (
    (0.0, 0.0, 0.0, 0.0),
    (1e-45, 0.0, -1e-45, 0.0),
    (TINY, -TINY, 0.0, 1e-40),
    (3e38, -3e38, 1.0, 0.0),
    (torch.inf, 1.0, 2.0, 3.0),
    (1.0, -torch.inf, torch.inf, 0.0),
    (torch.nan, 1.0, 2.0, 3.0),
    (1.0, 2.0, 3.0, torch.nan),
)


@pytest.mark.parametrize("special", SPECIAL, ids=str)
def test_extreme_rows(special: tuple[float, ...]) -> None:
    x = torch.zeros(12)
    x[:4] = torch.tensor(special)
    kept = quantize_kv(x)
    wide = dequantize_kv(kept)
    if x.isfinite().all():
        assert ((wide - x).abs() <= 0.5001 * scale_of(kept)).all()
        assert scale_of(kept) >= TINY
    else:
        assert wide.isnan().all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_close_to_fp64_over_what_is_kept(backend, dtype, heads, head_dim):
    lengths = [1, 17, 130, 257]
    world = World(lengths, heads, head_dim, 16, dtype, kv_int8=True)
    outputs = world.attend(backend, [(index, 0, length) for index, length in enumerate(lengths)])
    for index, out in enumerate(outputs):
        exact = world.exact(index)
        if dtype is torch.float32:
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        else:
            assert ((out.double() - exact).abs() <= world.largest_error(index)).all()


@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((8, 1), 80), ((4, 4), 128), ((8, 2), 32)])
def test_decode_steps_chunks_and_whole_prompts_give_the_same_bits(backend, dtype, heads, head_dim):
    length = 2 * PARTITION_SIZE + 10
    world = World([length], heads, head_dim, dtype=dtype, kv_int8=True)
    [whole] = world.attend(backend, [(0, 0, length)])
    for chunk in (37, PARTITION_SIZE):
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            [part] = world.attend(backend, [(0, start, stop)])
            assert torch.equal(part, whole[start:stop])
    for position in (0, 1, 15, 16, 127, 128, 129, 256, length - 1):
        [step] = world.attend(backend, [(0, position, position + 1)])
        assert torch.equal(step[0], whole[position])


def test_bits_do_not_depend_on_the_batch(backend, dtype):
    lengths = [CONTEXTS[index % len(CONTEXTS)] for index in range(21)]
    world = World(lengths, dtype=dtype, kv_int8=True)
    spans = []
    for index, length in enumerate(lengths):
        num_queries = (1, min(length, 21), length)[index % 3]
        spans.append((index, length - num_queries, length))
    spans = spans[::2] + spans[1::2][::-1]
    for span, out in zip(spans, world.attend(backend, spans), strict=True):
        assert torch.equal(out, world.attend(backend, [span])[0])


def test_bits_do_not_depend_on_threads(make_backend, dtype):
    world = World([300, 1, 129, 64], dtype=dtype, kv_int8=True)
    spans = [(0, 0, 300), (1, 0, 1), (2, 128, 129), (3, 30, 64)]
    results = [torch.cat(world.attend(make_backend(num_threads), spans)) for num_threads in (1, 2, 3)]
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@pytest.mark.parametrize("length", CONTEXTS)
def test_bits_do_not_depend_on_blocks_or_block_size(backend, dtype, length):
    results = [
        World([length], dtype=dtype, kv_int8=True, **where).attend(backend, [(0, 0, length)])[0]
        for where in ({"placement": 1}, {"placement": 2}, {"block_size": 32}, {"block_size": 128})
    ]
    assert not results[0].isnan().any()
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e15])
def test_keys_and_values_of_any_size(backend, dtype, size):
    world = World([150], dtype=dtype, kv_int8=True, size=size)
    world.scale /= max(size, 1.0)
    [out] = world.attend(backend, [(0, 0, 150)])
    assert out.isfinite().all()
    assert ((out.double() - world.exact(0)).abs() <= world.largest_error(0)).all()


def test_a_broken_key_shows_in_its_own_sequence_only(backend, dtype):
    world = World([40, 40], dtype=dtype, kv_int8=True)
    expected = world.attend(backend, [(1, 39, 40)])
    broken = torch.full((1, 3, 64), torch.inf, dtype=dtype)
    slot = torch.tensor([world.sequences[0].blocks[0] * world.block_size])
    backend.write_kv(broken, torch.ones_like(broken), world.pool, 1, slot)
    outputs = world.attend(backend, [(0, 39, 40), (1, 39, 40)])
    assert outputs[0].isnan().all()
    assert torch.equal(outputs[1], expected[0])


def test_a_pool_of_another_dtype_or_device_is_refused():
    from kernels.cpu.checks import check_pool

    pool = torch.zeros(2, 1, 2, 16, 3, 68, dtype=torch.int8)
    assert check_pool(pool, 0, torch.zeros(1)) == (2, 1, 16, 3, 64)
    with pytest.raises(TypeError, match="`pool` must be"):
        check_pool(pool.to(torch.uint8), 0, torch.zeros(1))
    with pytest.raises(ValueError, match="on the CPU"):
        check_pool(pool.to("meta"), 0, torch.zeros(1))
    with pytest.raises(ValueError, match="at most 1024 elements a head, not 1025"):
        check_pool(torch.zeros(2, 1, 2, 16, 3, 1029, dtype=torch.int8), 0, torch.zeros(1))
