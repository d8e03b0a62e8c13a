"""Frequencies against transformers' own, bit for bit, and a table that does not depend on its length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cluster.engine.rope_spec import RopeSpec
from cluster.engine.rotary import inverse_frequencies, rotary_tables

HEAD_DIM = 64
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 100000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_frequencies_and_table_are_transformers(rope: dict[str, Any]) -> None:
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": 131072}
    published = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=dict(rope), **sizes))
    spec = RopeSpec.from_hf_config({"rope_parameters": rope}, 131072, HEAD_DIM, "config.json")
    assert torch.equal(inverse_frequencies(spec, HEAD_DIM), published.inv_freq)
    cos, sin = rotary_tables(spec, HEAD_DIM, 3000)
    expected_cos, expected_sin = published(torch.zeros(1), torch.arange(3000)[None])
    torch.testing.assert_close(cos, expected_cos[0, :, : HEAD_DIM // 2], atol=2e-7, rtol=0)
    torch.testing.assert_close(sin, expected_sin[0, :, : HEAD_DIM // 2], atol=2e-7, rtol=0)


def test_entries_do_not_depend_on_the_length_of_the_table() -> None:
    spec = RopeSpec(10000.0)
    long_cos, long_sin = rotary_tables(spec, 24, 1000)
    for length in (1, 7, 333):
        cos, sin = rotary_tables(spec, 24, length)
        assert torch.equal(cos, long_cos[:length])
        assert torch.equal(sin, long_sin[:length])
