from __future__ import annotations

import pytest

from cluster.engine.model_spec import ModelSpec
from cluster.engine.parallel import SINGLE_RANK, ParallelConfig, kv_geometry
from cluster.errors import ConfigError
from tests.engine.test_model_spec import LLAMA


def test_one_rank_holds_everything() -> None:
    spec = ModelSpec.from_hf_config(LLAMA, "config.json")
    geometry = kv_geometry(spec, SINGLE_RANK, num_blocks=7, block_size=32, dtype="bfloat16")
    assert (geometry.first_layer, geometry.num_layers) == (0, 30)
    assert (geometry.first_head, geometry.num_heads, geometry.head_dim) == (0, 3, 64)
    assert (geometry.num_blocks, geometry.block_size, geometry.dtype) == (7, 32, "bfloat16")


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_more_ranks_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="not supported yet"):
        ParallelConfig(tensor_size=sizes[0], pipeline_size=sizes[1])
