"""Greedy ids equal transformers' own models, in fp32, for every family and what varies within it."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.reference import ReferenceBackend
from tests.engine.tiny_models import Engine, prompts, transformers_greedy

NUM_TOKENS = 20

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 6}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.3}}),
    "llama-yarn-plain": (
        "llama",
        {
            "rope_parameters": YARN
            | {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False}
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 200}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_ids_equal_transformers(variant: str, checkpoint: Any, prepare: Any) -> None:
    family, overrides = VARIANTS[variant]
    made = checkpoint(family, **overrides)
    engine = Engine(prepare(made.directory), ReferenceBackend())
    expected = [transformers_greedy(made.model, prompt, NUM_TOKENS) for prompt in prompts()]
    assert engine.greedy(prompts(), NUM_TOKENS) == expected
    assert len({tuple(ids) for ids in expected}) == len(expected)  # the prompts matter


def test_sharded_checkpoint_equals_single_file(checkpoint: Any, prepare: Any, tmp_path: Any) -> None:
    single = checkpoint("qwen3")
    sharded = checkpoint("qwen3", max_shard_size="100KB")
    assert len(list(sharded.directory.glob("*.safetensors"))) > 2
    engine = Engine(prepare(sharded.directory), ReferenceBackend())
    expected = [transformers_greedy(single.model, prompt, NUM_TOKENS) for prompt in prompts()]
    assert engine.greedy(prompts(), NUM_TOKENS) == expected
