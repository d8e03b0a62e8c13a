"""Copying blocks: plain, in runs, strided; checked against tensor indexing; stopped in between."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import EdgeError
from cluster.kv import block_copy
from cluster.kv.block_copy import BlockRegion, copy_blocks
from cluster.kv.layout import KVLayout, LayoutEdge, intersect, split
from cluster.wire.messages import KVGeometry

SHAPE = (12, 3, 2, 4, 2, 8)
PARTS = [
    (slice(None), slice(None)),  # whole blocks
    (slice(1, 3), slice(None)),  # some layers: contiguous within a block
    (slice(None), slice(1, 2)),  # some heads: strided
    (slice(1, 2), slice(0, 1)),
]


def part(pool: torch.Tensor, which: int) -> torch.Tensor:
    layers, heads = PARTS[which]
    return pool[:, layers, :, :, heads, :]


@settings(deadline=None, max_examples=60)
@given(
    which=st.integers(0, 3),
    pairs=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=12, unique_by=lambda p: p[1]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    max_copy_bytes=st.sampled_from([1, 2000, 2**20]),
    on_host=st.booleans(),  # or as on a GPU: tensors copied in runs
)
def test_copies_exactly_the_listed_parts_of_blocks(
    which: int, pairs: list[tuple[int, int]], dtype: torch.dtype, max_copy_bytes: int, on_host: bool
) -> None:
    source, target = torch.randn(SHAPE).to(dtype), torch.randn(SHAPE).to(dtype)
    expected = target.clone()
    for source_id, target_id in pairs:
        part(expected, which)[target_id] = part(source, which)[source_id]
    regions = BlockRegion(part(source, which)), BlockRegion(part(target, which))
    for region in regions:
        region.is_on_host = on_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_copy, "MAX_COPY_BYTES", max_copy_bytes)
        done = copy_blocks(
            regions[0],
            [source_id for source_id, _ in pairs],
            regions[1],
            [target_id for _, target_id in pairs],
            lambda: False,
        )
    assert done
    assert torch.equal(target, expected)


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.int8]),
    num_heads=st.sampled_from([1, 2, 3, 4]),
    num_layers=st.integers(1, 4),
    data=st.data(),
)
def test_every_byte_of_every_decode_rank_is_written_exactly_once(
    dtype: torch.dtype, num_heads: int, num_layers: int, data: st.DataObject
) -> None:
    """Of any two groups, scales of int8 included: each copy adds, so twice or never would show."""
    model = KVGeometry(
        first_layer=0,
        num_layers=num_layers,
        first_head=0,
        num_heads=num_heads,
        head_dim=6,
        block_size=2,
        num_blocks=2,
        dtype=str(dtype).removeprefix("torch."),
    )
    sizes = st.sampled_from([tp for tp in range(1, 9) if num_heads % tp == 0 or tp % num_heads == 0])
    group = st.tuples(st.integers(1, num_layers), sizes)
    prefill, decode = (split(model, *data.draw(group, name)) for name in ("prefill", "decode"))
    whole_shape = KVLayout.from_geometry(model).shape
    num_bytes = dtype.itemsize * whole_shape[-1]
    whole = torch.randint(1, 255, (*whole_shape[:-1], num_bytes), dtype=torch.uint8).view(dtype)

    def held(layout: KVLayout) -> torch.Tensor:
        layers, heads = layout.layers, layout.heads
        return whole[:, layers.start : layers.stop, :, :, heads.start : heads.stop].contiguous()

    layouts = [KVLayout.from_geometry(geometry) for geometry in prefill]
    pools = [held(layout) for layout in layouts]
    targets = [KVLayout.from_geometry(geometry) for geometry in decode]
    sums = [torch.zeros(layout.shape, dtype=dtype).view(torch.uint8) for layout in targets]
    for edge in intersect(prefill, decode):
        layout = targets[edge.decode_rank]
        arrived = torch.zeros(layout.shape, dtype=dtype)
        source = BlockRegion.of_pool(pools[edge.prefill_rank], layouts[edge.prefill_rank], edge)
        assert source.block_bytes * 2 == source.blocks.nbytes
        assert source.blocks.shape[1:] == edge.block_shape(layout)
        copy_blocks(source, [0, 1], BlockRegion.of_pool(arrived, layout, edge), [0, 1], lambda: False)
        sums[edge.decode_rank] += arrived.view(torch.uint8)
    for layout, found in zip(targets, sums, strict=True):
        assert torch.equal(found, held(layout).view(torch.uint8))


@pytest.mark.parametrize("which", range(4))
def test_stops_between_blocks_when_told(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "MAX_COPY_BYTES", 1)
    source, target = torch.ones(SHAPE), torch.zeros(SHAPE)
    looks = iter([False, False, True])
    regions = BlockRegion(part(source, which)), BlockRegion(part(target, which))
    assert not copy_blocks(regions[0], range(12), regions[1], range(12), lambda: next(looks))
    assert part(target, which)[:2].all()
    assert not target[2:].any()


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "message"),
    [
        ([0, 12], [0, 1], "no such KV block: 12"),
        ([0, 1], [0, -1], "no such KV block: -1"),
        ([0, 1], [0], "2 KV blocks"),
    ],
)
def test_bad_ids_copy_nothing(source_ids: list[int], target_ids: list[int], message: str) -> None:
    target = torch.zeros(SHAPE)
    regions = BlockRegion(torch.ones(SHAPE)), BlockRegion(target)
    with pytest.raises(EdgeError, match=message):
        copy_blocks(regions[0], source_ids, regions[1], target_ids, lambda: False)
    assert not target.any()


def test_other_shapes_or_dtypes_copy_nothing() -> None:
    source = BlockRegion(torch.ones(SHAPE))
    for other in (torch.zeros(12, 3, 2, 4, 1, 8), torch.zeros(SHAPE, dtype=torch.bfloat16)):
        with pytest.raises(EdgeError, match="do not fit"):
            copy_blocks(source, [0], BlockRegion(other), [0], lambda: False)
        assert not other.any()


def test_a_region_is_cut_to_the_edges_layers_and_heads() -> None:
    layout = KVLayout(range(4, 7), range(2, 4), 8, 4, 12, "float32")
    pool = torch.randn(SHAPE)
    region = BlockRegion.of_pool(pool, layout, LayoutEdge(0, 0, range(5, 7), range(3, 4)))
    assert torch.equal(region.blocks, pool[:, 1:3, :, :, 1:2, :])
    assert region.block_bytes == 2 * 2 * 4 * 1 * 8 * 4
