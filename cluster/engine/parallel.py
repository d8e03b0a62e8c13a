"""Which part of a model one rank holds: passed in, never read from a global.

A group has one rank for now, so nothing is communicated and `ParallelConfig` refuses anything else.
Everything that depends on the split (the KV geometry, later the weight shards and the reductions) asks
this value.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine.model_spec import ModelSpec
from cluster.errors import ConfigError
from cluster.wire.messages import KVGeometry


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Place of a rank in its group: tensor parallel within a stage, pipeline stages one after another."""

    tensor_size: int = 1
    tensor_rank: int = 0
    pipeline_size: int = 1
    pipeline_rank: int = 0

    def __post_init__(self) -> None:
        if (self.tensor_size, self.pipeline_size) != (1, 1) or (self.tensor_rank, self.pipeline_rank) != (
            0,
            0,
        ):
            raise ConfigError(
                f"tensor-parallel size {self.tensor_size} and pipeline-parallel size {self.pipeline_size} "
                "are not supported yet: a worker has one rank"
            )


SINGLE_RANK = ParallelConfig()


def kv_geometry(
    spec: ModelSpec, parallel: ParallelConfig, *, num_blocks: int, block_size: int, dtype: str
) -> KVGeometry:
    """The shape of this rank's KV pool, as it travels in `Register` and `EdgeHello`; `dtype` as it is spelled
    there."""
    layers_per_stage = spec.num_layers // parallel.pipeline_size
    heads_per_rank = spec.num_kv_heads // parallel.tensor_size
    return KVGeometry(
        first_layer=parallel.pipeline_rank * layers_per_stage,
        num_layers=layers_per_stage,
        first_head=parallel.tensor_rank * heads_per_rank,
        num_heads=heads_per_rank,
        head_dim=spec.head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=dtype,
    )
