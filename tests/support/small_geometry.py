"""The shape of a KV pool that tests of edges say they have, where no KV is computed."""

from __future__ import annotations

from cluster.wire.messages import KVGeometry

GEOMETRY = KVGeometry(
    first_layer=0,
    num_layers=1,
    first_head=0,
    num_heads=1,
    head_dim=8,
    block_size=4,
    num_blocks=8,
    dtype="float32",
)
