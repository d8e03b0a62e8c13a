"""Configurations in, specs out; what the decoder does not compute is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.engine.model_spec import Architecture, Dtype, ModelSpec
from cluster.engine.rope_spec import RopeType
from cluster.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128},
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 4},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 10, "truncate": False},
    {"rope_type": "longrope", "short_factor": [2.0] * 32, "long_factor": [2.0] * 32, "attention_factor": 1.0},
]


def read(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec.from_hf_config(config, "config.json")


def test_smollm2_is_read() -> None:
    spec = read(LLAMA)
    assert spec.architecture is Architecture.LLAMA
    assert (spec.head_dim, spec.query_size, spec.kv_size) == (64, 576, 192)
    assert (spec.rope.theta, spec.rope.rope_type) == (100000.0, RopeType.DEFAULT)
    assert spec.eos_token_ids == (2,)
    assert spec.max_context_len == 8192


@pytest.mark.parametrize("family", FAMILIES)
def test_normalised_config_reads_back_equal(family: str) -> None:
    spec = read(FAMILIES[family])
    written = json.loads(json.dumps(spec.to_hf_config(Dtype.BF16)))
    assert read(written) == spec


@pytest.mark.parametrize("rope", ROPES)
def test_rope_scaling_reads_back_equal_in_both_spellings(rope: dict[str, Any]) -> None:
    old = read(LLAMA | {"rope_scaling": rope})
    new_config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new = read(new_config | {"rope_parameters": rope | {"rope_theta": 100000.0}})
    assert old == new
    assert old.rope.rope_type is not RopeType.DEFAULT
    assert read(old.to_hf_config(Dtype.FP32)) == old


def test_biases_and_norms_follow_the_family() -> None:
    flags = {name: read(config | {"attention_bias": False}) for name, config in FAMILIES.items()}
    assert {name: (s.qkv_bias, s.output_bias, s.qk_norm) for name, s in flags.items()} == {
        "llama": (False, False, False),
        "mistral": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (False, False, True),
    }
    biased = read(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)


def test_sliding_window_bounds_the_context() -> None:
    mistral = FAMILIES["mistral"]
    assert read(mistral | {"sliding_window": 4096}).max_context_len == 4096
    assert read(mistral | {"sliding_window": 100000}).max_context_len == 8192
    assert read({k: v for k, v in mistral.items() if k != "sliding_window"}).max_context_len == 4096
    qwen = FAMILIES["qwen2"] | {"sliding_window": 1024}
    assert read(qwen).max_context_len == 8192  # off by default
    assert read(qwen | {"use_sliding_window": True, "max_window_layers": 30}).max_context_len == 8192
    assert read(qwen | {"use_sliding_window": True, "max_window_layers": 29}).max_context_len == 1024
    layers = {"layer_types": ["full_attention"] * 29 + ["sliding_attention"]}
    assert read(qwen | {"use_sliding_window": True} | layers).max_context_len == 1024


def test_list_of_eos_ids() -> None:
    assert read(LLAMA | {"eos_token_id": [128001, 128009]}).eos_token_ids == (128001, 128009)
    assert read(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "`MixtralForCausalLM` is not supported; supported are Llama",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "`gpt2` is not supported"),
        ({"architectures": None, "model_type": None}, "`None` is not supported"),
        ({"hidden_act": "gelu"}, "`gelu` is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized with `gptq`"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type `dynamic` is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope parameter `factor` is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "`factor` must be a positive number, not '2'"),
        ({"rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {}}}, "per layer type"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "longrope"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"hidden_size": "576"}, "`hidden_size` must be an integer, not '576'"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` must be at least 1, not 0"),
        ({"num_key_value_heads": 4}, "9 attention heads cannot share 4"),
        ({"head_dim": 63}, "even head_dim"),
        ({"rms_norm_eps": -1}, "`rms_norm_eps` must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` must be true or false"),
        ({"eos_token_id": "</s>"}, "`eos_token_id` must be token ids"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(LLAMA | change)
    assert str(caught.value).startswith("config.json: ")
    assert message in str(caught.value)
