"""GGUF files made of tiny transformers models, laid out as llama.cpp's converter does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from cluster.engine.gguf_config import hf_config, hf_tensor_name
from cluster.engine.gguf_source import GgufSource
from cluster.engine.model_spec import ModelSpec
from cluster.engine.rope_spec import RopeType
from cluster.errors import ModelError
from kernels.reference import ReferenceBackend
from tests.engine.tiny_models import VOCAB_SIZE, Checkpoint, Engine, prompts, transformers_greedy

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def permute(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter does for q and k of the llama family."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    made: Checkpoint,
    architecture: str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_factors: list[float] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Every matrix quantized to `kind`; the model's own weights are set to what that leaves of them."""
    config = made.model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else (
            writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
        )
    add_tokenizer(writer)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = parameter.numpy().astype(np.float32)
            chosen = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            quantized = gguf.quantize(values, chosen)
            parameter.copy_(
                torch.from_numpy(np.array(gguf.dequantize(quantized, chosen))).view(parameter.shape)
            )
            if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                quantized = permute(quantized, heads)  # rows are whole blocks, so they move as they are
            writer.add_tensor(gguf_name(name), quantized, raw_dtype=chosen)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A byte-level vocabulary with three special tokens in front."""
    letters = [chr(c) for c in range(0x100, 0x100 + VOCAB_SIZE)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<|endoftext|>", "<s>", "</s>", *letters[3:-1], letters[3] + letters[4]])
    writer.add_token_types([3, 3, 3, *[1] * (VOCAB_SIZE - 3)])
    writer.add_token_merges([f"{letters[3]} {letters[4]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)


def assert_same_greedy(made: Checkpoint, prepared: Any) -> None:
    engine = Engine(prepared, ReferenceBackend())
    expected = [transformers_greedy(made.model, prompt, 12) for prompt in prompts()]
    assert engine.greedy(prompts(), 12) == expected


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
def test_every_quantization_of_the_llama_family(
    kind: str, checkpoint: Any, prepare: Any, tmp_path: Path
) -> None:
    made = checkpoint("llama", tie_word_embeddings=True)
    path = write_gguf(tmp_path / "tiny.gguf", made, "llama", gguf.GGMLQuantizationType[kind])
    prepared = prepare(path)
    assert prepared.eos_token_ids == (2, 7)
    assert_same_greedy(made, prepared)


@pytest.mark.parametrize(
    ("family", "architecture", "overrides"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", "llama", {"sliding_window": None}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_families(
    family: str, architecture: str, overrides: Any, checkpoint: Any, prepare: Any, tmp_path: Path
) -> None:
    made = checkpoint(family, **overrides)
    assert_same_greedy(made, prepare(write_gguf(tmp_path / "tiny.gguf", made, architecture)))


def test_llama3_scaling_travels_as_factors(checkpoint: Any, prepare: Any, tmp_path: Path) -> None:
    """llama.cpp stores Llama 3.1's scaling as one divisor per frequency."""
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 512,
    }
    made = checkpoint("llama", rope_parameters=rope)
    prepared = prepare(write_gguf(tmp_path / "tiny.gguf", made, "llama", rope_factors=factors))
    assert prepared.spec.rope.rope_type is RopeType.FACTORS
    assert_same_greedy(made, prepared)


def test_yarn_and_linear_scaling(checkpoint: Any, prepare: Any, tmp_path: Path) -> None:
    for scaling, extra in (("yarn", {"original_max_position_embeddings": 64}), ("linear", {})):
        rope = {"rope_type": scaling, "rope_theta": 1000.0, "factor": 4.0} | extra
        made = checkpoint("qwen2", rope_parameters=rope)
        metadata: dict[str, Any] = {"qwen2.rope.scaling.type": scaling, "qwen2.rope.scaling.factor": 4.0}
        if scaling == "yarn":
            metadata["qwen2.rope.scaling.original_context_length"] = 64
        path = write_gguf(tmp_path / f"{scaling}.gguf", made, "qwen2", metadata=metadata)
        assert_same_greedy(made, prepare(path))


def test_directory_with_one_gguf_is_that_file(checkpoint: Any, prepare: Any, tmp_path: Path) -> None:
    made = checkpoint("llama")
    (tmp_path / "dir").mkdir()
    write_gguf(tmp_path / "dir" / "Tiny-1B.Q8_0.gguf", made, "llama", gguf.GGMLQuantizationType.Q8_0)
    prepared = prepare(tmp_path / "dir")
    assert prepared.name == "Tiny-1B"
    assert (prepared.directory / "tokenizer.json").is_file()
    assert (prepared.directory / "tokenizer_config.json").is_file()


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.02, 0.5, 0.99])
def test_truncated_file(fraction: float, checkpoint: Any, prepare: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", checkpoint("llama"), "llama")
    os.truncate(path, int(path.stat().st_size * fraction))
    with pytest.raises(ModelError, match=r"tiny.gguf: not a readable GGUF file, perhaps truncated"):
        prepare(path)


def test_file_that_is_not_gguf(prepare: Any, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"PK" * 4096)
    with pytest.raises(ModelError, match=r"tiny.gguf: not a readable GGUF file.*magic"):
        prepare(tmp_path / "tiny.gguf")


def test_type_without_dequantization(checkpoint: Any, prepare: Any, tmp_path: Path) -> None:
    made = checkpoint("llama")
    writer_type = gguf.GGMLQuantizationType.I32
    path = write_gguf(tmp_path / "tiny.gguf", made, "llama")
    source = GgufSource(path)
    name = "model.layers.0.mlp.up_proj.weight"
    source._tensors[name] = source._tensors[name]._replace(tensor_type=writer_type)
    with pytest.raises(ModelError, match=r"`blk.0.ffn_up.weight` of type I32 cannot be dequantized"):
        source.load(name)


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def read(metadata: dict[str, Any], factors: list[float] | None = None) -> ModelSpec:
    config = hf_config(metadata, vocab_size=32, tensor_names=(), rope_factors=factors, source="x.gguf")
    return ModelSpec.from_hf_config(config, "x.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"general.architecture": "gemma2"},
            "GGUF architecture `gemma2` is not supported; supported are Llama",
        ),
        ({"llama.block_count": None}, "`llama.block_count` is missing"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.attention.head_count": [4, 4]}, "head count per layer"),
        (
            {"llama.attention.value_length": 32},
            "`llama.attention.value_length` 32 differs from the head size 16",
        ),
        ({"llama.rope.dimension_count": 8}, "`llama.rope.dimension_count` 8 differs from the head size 16"),
        ({"llama.rope.scaling.type": "longrope"}, "GGUF rope scaling `longrope` is not supported"),
        ({"llama.attention.sliding_window": 32}, "sliding window"),
    ],
)
def test_metadata_that_cannot_be_served(change: dict[str, Any], message: str) -> None:
    assert read(METADATA).num_kv_heads == 4
    with pytest.raises(ModelError) as caught:
        read(METADATA | change)
    assert str(caught.value).startswith("x.gguf: ")
    assert message in str(caught.value)


def test_tensor_names() -> None:
    assert hf_tensor_name("blk.12.attn_q_norm.weight") == "model.layers.12.self_attn.q_norm.weight"
    assert hf_tensor_name("output.weight") == "lm_head.weight"
    assert hf_tensor_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"
