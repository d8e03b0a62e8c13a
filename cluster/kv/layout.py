"""What one rank's KV pool looks like, and which ranks have to send what to whom.

1. A model's KV is `num_layers x num_heads` elements; `split` gives each rank of a PP x TP group its rectangle
   of them. With more tensor-parallel ranks than KV heads, neighbouring ranks hold replicas of one head.
2. At the handshake both sides give their `KVGeometry`; `intersect` refuses groups that do not fit and
   otherwise lists the edges: prefill rank, decode rank, layers, heads. Each (layer, head) of each decode
   rank, replicas included, is covered by exactly one edge; replicated prefill ranks share the work.
3. An edge's layers and heads cut a view out of both ranks' pools (`local_range`), and blocks are copied
   from the one view into the other.

Pools are block-major: `[num_blocks, num_layers, 2, block_size, num_heads, row_size]`, K before V, so all of
a block lies together. A row is what one head keeps of one token: `head_dim` elements, and in int8 the scale
they share behind them. A scale never lies apart from its values: whatever moves rows moves scales.
Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import msgspec

from cluster.errors import ConfigError, EdgeError
from cluster.wire.messages import KVGeometry

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}
SCALE_BYTES = {"int8": 4}  # an fp32 behind each row; as `kernels.ops.row_size` has it


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A rank's pool: which layers and heads it holds, and in what shape.

    Raises:
        ConfigError: a size is not positive, a start is negative, or the dtype is not supported.
    """

    layers: range
    heads: range
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"KV dtype `{self.dtype}` is not supported: use one of {sorted(ITEM_BYTES)}")
        sizes = {
            "layers": len(self.layers),
            "heads": len(self.heads),
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
        }
        for name, size in sizes.items():
            if size <= 0:
                raise ConfigError(f"KV layout: `{name}` must be positive, not {size}")
        if min(self.layers.start, self.heads.start) < 0:
            raise ConfigError(f"KV layout: negative start in layers {self.layers} or heads {self.heads}")

    @classmethod
    def from_geometry(cls, geometry: KVGeometry) -> KVLayout:
        return cls(
            layers=range(geometry.first_layer, geometry.first_layer + geometry.num_layers),
            heads=range(geometry.first_head, geometry.first_head + geometry.num_heads),
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
            num_blocks=geometry.num_blocks,
            dtype=geometry.dtype,
        )

    def to_geometry(self) -> KVGeometry:
        return KVGeometry(
            first_layer=self.layers.start,
            num_layers=len(self.layers),
            first_head=self.heads.start,
            num_heads=len(self.heads),
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            dtype=self.dtype,
        )

    @property
    def row_size(self) -> int:
        """Elements of one token and head."""
        return self.head_dim + SCALE_BYTES.get(self.dtype, 0)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (len(self.layers), 2, self.block_size, len(self.heads), self.row_size)

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return (self.num_blocks, *self.block_shape)

    @property
    def bytes_per_block(self) -> int:
        return prod(self.block_shape) * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_per_block // self.block_size

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


class LayoutEdge(NamedTuple):
    """One transfer channel: these layers and heads go from this prefill rank to this decode rank."""

    prefill_rank: int
    decode_rank: int
    layers: range
    heads: range

    def block_shape(self, layout: KVLayout) -> tuple[int, int, int, int, int]:
        """Shape of the part of a block that this edge carries."""
        return (len(self.layers), 2, layout.block_size, len(self.heads), layout.row_size)


def local_range(part: range, whole: range) -> slice:
    """Where `part`, in the model's numbering, lies within a rank that holds `whole`."""
    if not (part.start in whole and part[-1] in whole):
        raise ValueError(f"{part} is not inside {whole}")
    return slice(part.start - whole.start, part.stop - whole.start)


def split(geometry: KVGeometry, pp: int, tp: int) -> list[KVGeometry]:
    """The ranks of a group, `rank = pp_rank * tp + tp_rank`, of a model whose whole KV is `geometry`.

    Layers are dealt out in order, earlier stages taking one more where they do not divide evenly. Heads
    divide evenly by `tp`, or `tp` by heads: then `tp // num_heads` neighbours replicate each head.

    Raises:
        ConfigError: more stages than layers, or heads and `tp` do not divide.
    """
    if pp <= 0 or tp <= 0:
        raise ConfigError(f"parallel sizes must be positive: pp {pp}, tp {tp}")
    if pp > geometry.num_layers:
        raise ConfigError(f"pp {pp} is more than the model's {geometry.num_layers} layers")
    if geometry.num_heads % tp and tp % geometry.num_heads:
        raise ConfigError(
            f"tp {tp} neither divides the {geometry.num_heads} KV heads nor is a multiple of them"
        )
    ranks: list[KVGeometry] = []
    base, extra = divmod(geometry.num_layers, pp)
    first_layer = geometry.first_layer
    for stage in range(pp):
        num_layers = base + (stage < extra)
        for tp_rank in range(tp):
            heads = max(1, geometry.num_heads // tp)
            ranks.append(
                msgspec.structs.replace(
                    geometry,
                    first_layer=first_layer,
                    num_layers=num_layers,
                    first_head=geometry.first_head + tp_rank * geometry.num_heads // tp,
                    num_heads=heads,
                )
            )
        first_layer += num_layers
    return ranks


def intersect(prefill: Sequence[KVGeometry], decode: Sequence[KVGeometry]) -> list[LayoutEdge]:
    """The edges between two groups, given each group's ranks in order; the same list on both sides.

    Raises:
        EdgeError: the groups hold KV of different shape, or one of them is incomplete; names the difference.
    """
    _check_same_shape(prefill, decode)
    prefill_layouts = [KVLayout.from_geometry(geometry) for geometry in prefill]
    decode_layouts = [KVLayout.from_geometry(geometry) for geometry in decode]
    owners = _owners("prefill", prefill_layouts)
    whole = _whole("prefill", owners)
    decode_whole = _whole("decode", _owners("decode", decode_layouts))
    if whole != decode_whole:
        raise EdgeError(
            f"KV layouts differ: prefill holds {_name(*whole)}, decode holds {_name(*decode_whole)}"
        )
    edges: list[LayoutEdge] = []
    load = [0] * len(prefill)  # elements each prefill rank has to send
    for decode_rank, target in enumerate(decode_layouts):
        for (layers, heads), ranks in owners.items():
            common_layers, common_heads = _overlap(layers, target.layers), _overlap(heads, target.heads)
            if not common_layers or not common_heads:
                continue
            owner = min(ranks, key=lambda rank: (load[rank], rank))
            load[owner] += len(common_layers) * len(common_heads)
            edges.append(LayoutEdge(owner, decode_rank, common_layers, common_heads))
    return edges


def single_edge(prefill: KVGeometry, decode: KVGeometry) -> LayoutEdge:
    """The one edge between two groups of one rank each.

    Raises:
        EdgeError: they do not fit.
    """
    [edge] = intersect([prefill], [decode])
    return edge


def _check_same_shape(prefill: Sequence[KVGeometry], decode: Sequence[KVGeometry]) -> None:
    if not prefill or not decode:
        raise EdgeError("KV layouts cannot be matched: a group has no ranks")
    for field in ("block_size", "head_dim", "dtype"):
        expected = getattr(prefill[0], field)
        for side, ranks in (("prefill", prefill), ("decode", decode)):
            for value in (getattr(rank, field) for rank in ranks):
                if value != expected:
                    raise EdgeError(
                        f"KV layouts differ: `{field}` is {expected} on prefill rank 0 but {value} on a "
                        f"{side} rank"
                    )


def _owners(side: str, layouts: Sequence[KVLayout]) -> dict[tuple[range, range], list[int]]:
    """rectangle |-> ranks that hold it; rectangles that overlap without being equal are refused."""
    owners: dict[tuple[range, range], list[int]] = {}
    for rank, layout in enumerate(layouts):
        owners.setdefault((layout.layers, layout.heads), []).append(rank)
    rectangles = list(owners)
    for index, (layers, heads) in enumerate(rectangles):
        for other_layers, other_heads in rectangles[:index]:
            if _overlap(layers, other_layers) and _overlap(heads, other_heads):
                raise EdgeError(
                    f"{side} ranks overlap: {_name(layers, heads)} and {_name(other_layers, other_heads)}"
                )
    return owners


def _whole(side: str, rectangles: dict[tuple[range, range], list[int]]) -> tuple[range, range]:
    """The rectangle that these disjoint ones fill; holes are refused."""
    layers = range(min(part.start for part, _ in rectangles), max(part.stop for part, _ in rectangles))
    heads = range(min(part.start for _, part in rectangles), max(part.stop for _, part in rectangles))
    covered = sum(len(part) * len(other) for part, other in rectangles)
    if covered != len(layers) * len(heads):
        raise EdgeError(f"{side} ranks are incomplete: they do not cover all of {_name(layers, heads)}")
    return layers, heads


def _overlap(left: range, right: range) -> range:
    start = max(left.start, right.start)
    return range(start, max(start, min(left.stop, right.stop)))


def _name(layers: range, heads: range) -> str:
    return f"layers [{layers.start}, {layers.stop}) of heads [{heads.start}, {heads.stop})"
