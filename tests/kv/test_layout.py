"""Layouts: sizes, splitting over ranks, and the edges between any two groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError, EdgeError
from cluster.kv.layout import KVLayout, LayoutEdge, intersect, local_range, single_edge, split
from cluster.wire.messages import KVGeometry
from kernels.ops import row_size

SMOLLM2 = KVGeometry(
    first_layer=0,
    num_layers=30,
    first_head=0,
    num_heads=3,
    head_dim=64,
    block_size=32,
    num_blocks=100,
    dtype="bfloat16",
)


def changed(geometry: KVGeometry, **changes: Any) -> KVGeometry:
    return msgspec.structs.replace(geometry, **changes)


def test_sizes() -> None:
    layout = KVLayout.from_geometry(SMOLLM2)
    assert layout.shape == (100, 30, 2, 32, 3, 64)
    assert layout.bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert layout.bytes_per_block == 32 * layout.bytes_per_token
    assert layout.pool_bytes == 100 * layout.bytes_per_block
    assert KVLayout.from_geometry(changed(SMOLLM2, dtype="float32")).pool_bytes == 2 * layout.pool_bytes
    assert layout.to_geometry() == SMOLLM2


def test_int8_rows_carry_their_scale() -> None:
    layout = KVLayout.from_geometry(changed(SMOLLM2, dtype="int8"))
    assert layout.row_size == row_size(64, torch.int8) == 64 + 4
    assert layout.shape == (100, 30, 2, 32, 3, 68)
    assert layout.bytes_per_block == 30 * 2 * 32 * 3 * 68
    assert layout.to_geometry().dtype == "int8"
    part = LayoutEdge(0, 0, range(5, 9), range(1, 3))
    assert part.block_shape(layout) == (4, 2, 32, 2, 68)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_int8_halves_what_a_block_takes(head_dim: int) -> None:
    kept = [
        KVLayout.from_geometry(changed(SMOLLM2, dtype=dtype, head_dim=head_dim))
        for dtype in ("bfloat16", "int8")
    ]
    assert kept[1].bytes_per_block / kept[0].bytes_per_block == (head_dim + 4) / (2 * head_dim)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float16"}, {"num_layers": 0}, {"num_blocks": -1}, {"first_head": -1}, {"block_size": 0}],
)
def test_layouts_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="KV"):
        KVLayout.from_geometry(changed(SMOLLM2, **changes))


@st.composite
def group_pairs(draw: st.DrawFn) -> tuple[KVGeometry, tuple[int, int], tuple[int, int]]:
    num_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    num_layers = draw(st.integers(1, 9))
    geometry = changed(SMOLLM2, num_layers=num_layers, num_heads=num_heads)
    sizes = [tp for tp in range(1, 17) if num_heads % tp == 0 or tp % num_heads == 0]
    groups = st.tuples(st.integers(1, num_layers), st.sampled_from(sizes))
    return geometry, draw(groups), draw(groups)


def held(geometry: KVGeometry) -> set[tuple[int, int]]:
    layout = KVLayout.from_geometry(geometry)
    return {(layer, head) for layer in layout.layers for head in layout.heads}


@given(group_pairs())
def test_b080_every_element_of_every_decode_rank_is_written_exactly_once(
    pair: tuple[KVGeometry, tuple[int, int], tuple[int, int]],
) -> None:
    geometry, (prefill_pp, prefill_tp), (decode_pp, decode_tp) = pair
    prefill = split(geometry, prefill_pp, prefill_tp)
    decode = split(changed(geometry, num_blocks=7), decode_pp, decode_tp)
    written: Counter[tuple[int, int, int]] = Counter()
    for edge in intersect(prefill, decode):
        moved = {(layer, head) for layer in edge.layers for head in edge.heads}
        assert moved
        assert moved <= held(prefill[edge.prefill_rank])
        assert moved <= held(decode[edge.decode_rank])
        written.update((edge.decode_rank, layer, head) for layer, head in moved)
    wanted = {(rank, *element) for rank, part in enumerate(decode) for element in held(part)}
    assert written.keys() == wanted
    assert set(written.values()) == {1}


@given(group_pairs())
def test_replicated_prefill_ranks_share_the_work(
    pair: tuple[KVGeometry, tuple[int, int], tuple[int, int]],
) -> None:
    geometry, (_, prefill_tp), (_, decode_tp) = pair
    prefill, decode = split(geometry, 1, prefill_tp), split(geometry, 1, decode_tp)
    load = Counter({rank: 0 for rank in range(prefill_tp)})
    for edge in intersect(prefill, decode):
        load[edge.prefill_rank] += len(edge.layers) * len(edge.heads)
    for head in range(geometry.num_heads):  # among the replicas of each head
        replicas = [load[r] for r, g in enumerate(prefill) if (g.first_head, g.num_heads) == (head, 1)]
        if len(replicas) > 1:
            assert max(replicas) - min(replicas) <= geometry.num_layers


@given(group_pairs())
def test_a_split_covers_the_model_with_equal_replicas(
    pair: tuple[KVGeometry, tuple[int, int], tuple[int, int]],
) -> None:
    geometry, (pp, tp), _ = pair
    ranks = split(geometry, pp, tp)
    assert len(ranks) == pp * tp
    times = Counter(element for rank in ranks for element in held(rank))
    assert times.keys() == held(geometry)
    assert set(times.values()) == {max(1, tp // geometry.num_heads)}


def test_one_rank_each_is_one_whole_edge() -> None:
    assert single_edge(SMOLLM2, changed(SMOLLM2, num_blocks=3)) == LayoutEdge(0, 0, range(30), range(3))


@pytest.mark.parametrize("decode_is_other", [True, False])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 16}, "`block_size` is"),
        ({"head_dim": 128}, "`head_dim` is"),
        ({"dtype": "float32"}, "`dtype` is"),
        ({"dtype": "int8"}, "`dtype` is"),
        ({"num_layers": 32}, r"layers \[0, 32\)"),
        ({"num_heads": 6}, r"heads \[0, 6\)"),
        ({"first_layer": 1, "num_layers": 29}, r"layers \[1, 30\)"),
    ],
)
def test_b080_groups_that_do_not_fit_are_refused_with_the_difference(
    changes: dict[str, Any], message: str, decode_is_other: bool
) -> None:
    sides = [[SMOLLM2], [changed(SMOLLM2, **changes)]]
    prefill, decode = sides if decode_is_other else sides[::-1]
    with pytest.raises(EdgeError, match=message):
        intersect(prefill, decode)


def test_groups_with_a_rank_missing_or_overlapping_are_refused() -> None:
    ranks = split(SMOLLM2, 2, 3)
    with pytest.raises(EdgeError, match="decode ranks are incomplete"):
        intersect([SMOLLM2], ranks[:-1])
    with pytest.raises(EdgeError, match="prefill ranks overlap"):
        intersect([*ranks, SMOLLM2], [SMOLLM2])
    with pytest.raises(EdgeError, match="no ranks"):
        intersect([], [SMOLLM2])
    with pytest.raises(EdgeError, match="`dtype`"):
        intersect([ranks[0], changed(ranks[1], dtype="float32"), *ranks[2:]], [SMOLLM2])


@pytest.mark.parametrize(("pp", "tp"), [(31, 1), (1, 2), (1, 4), (0, 1), (1, 0)])
def test_splits_that_do_not_divide_are_refused(pp: int, tp: int) -> None:
    with pytest.raises(ConfigError):
        split(SMOLLM2, pp, tp)


def test_local_range() -> None:
    assert local_range(range(4, 6), range(3, 9)) == slice(1, 3)
    for part in (range(2, 4), range(8, 10)):
        with pytest.raises(ValueError, match="not inside"):
            local_range(part, range(3, 9))
