"""A real, tiny Llama with random weights and one token per byte: everything but the quality of a model.

Its decode step takes well under a millisecond, so tests can run thousands of requests through real processes.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer

NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 2, 96, 6, 2, 160
HEAD_DIM = HIDDEN // HEADS
MAX_POSITIONS = 2048


def write_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """config.json, model.safetensors and tokenizer files; returns `directory`."""
    write_byte_tokenizer(directory)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (2.0 / columns**0.5)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN) * 4,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            prefix + "self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            prefix + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    save_file(weights, directory / "model.safetensors")
    return directory
