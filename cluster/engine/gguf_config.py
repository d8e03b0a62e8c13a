"""GGUF metadata and tensor names in the terms of a Hugging Face checkpoint. Pure mapping, reads no file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.engine.model_spec import CLASS_NAMES, SUPPORTED, Architecture
from cluster.errors import ModelError

ARCHITECTURES = {
    "llama": Architecture.LLAMA,  # Llama, SmolLM2, Mistral: converters write all of them as `llama`
    "mistral": Architecture.MISTRAL,
    "qwen2": Architecture.QWEN2,
    "qwen3": Architecture.QWEN3,
}

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # metadata that travels as a tensor


def hf_tensor_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; unknown names pass unchanged."""
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    return gguf_name


def interleaved_heads(gguf_architecture: str, hf_name: str) -> str | None:
    """Which head count a q/k projection is interleaved by: `query`, `key` or None.

    Converters of the llama family reorder the rows of a head so that the two halves of each rotary pair
    lie side by side; Qwen keeps the halves apart, as Hugging Face does.
    """
    if gguf_architecture not in ("llama", "mistral"):
        return None
    if ".q_proj." in hf_name:
        return "query"
    return "key" if ".k_proj." in hf_name else None


def hf_config(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tensor_names: Sequence[str],
    rope_factors: Sequence[float] | None,
    source: str,
) -> dict[str, Any]:
    """`tensor_names` are Hugging Face names; `rope_factors` the content of `rope_freqs.weight` if there
    is one.

    Raises:
        ModelError: an architecture that is not supported, or a key that is missing.
    """
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelError(f"{source}: GGUF architecture `{name}` is not supported; supported are {SUPPORTED}")
    architecture = ARCHITECTURES[name]

    def key(suffix: str, default: Any = None) -> Any:
        value = metadata.get(f"{name}.{suffix}", default)
        if value is None:
            raise ModelError(f"{source}: GGUF metadata `{name}.{suffix}` is missing")
        return value

    num_heads = key("attention.head_count")
    if isinstance(num_heads, list):
        raise ModelError(f"{source}: a head count per layer is not supported")
    if key("expert_count", 0):
        raise ModelError(f"{source}: mixture-of-experts models are not supported; supported are {SUPPORTED}")
    head_dim = key("attention.key_length", key("embedding_length") // num_heads)
    for suffix in ("attention.value_length", "rope.dimension_count"):
        if key(suffix, head_dim) != head_dim:
            raise ModelError(
                f"{source}: `{name}.{suffix}` {key(suffix)} differs from the head size {head_dim}"
            )
    window = metadata.get(f"{name}.attention.sliding_window")
    config: dict[str, Any] = {
        "model_type": architecture.value,
        "architectures": [CLASS_NAMES[architecture]],
        "vocab_size": vocab_size,
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": key("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(key, metadata, name, rope_factors, source),
        "tie_word_embeddings": "lm_head.weight" not in tensor_names,
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in tensor_names,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in tensor_names,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(metadata),
    }
    if architecture is Architecture.LLAMA and window is not None:
        raise ModelError(f"{source}: a sliding window in a `llama` GGUF is not supported")
    return config


def eos_token_ids(metadata: Mapping[str, Any]) -> list[int] | None:
    """End of sequence, of turn and of message, each once."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return list(dict.fromkeys(i for i in found if i is not None)) or None


def _rope_parameters(
    key: Any, metadata: Mapping[str, Any], name: str, rope_factors: Sequence[float] | None, source: str
) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": key("rope.freq_base", 10_000.0)}
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling == "none" and f"{name}.rope.scale_linear" in metadata:
        scaling = "linear"
    if rope_factors is not None:
        if scaling not in ("none", "longrope"):
            raise ModelError(
                f"{source}: `{ROPE_FACTORS}` together with rope scaling `{scaling}` is not supported"
            )
        factors = [float(f) for f in rope_factors]
        return parameters | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    if scaling == "none":
        return parameters
    if scaling == "linear":
        factor = key("rope.scaling.factor", metadata.get(f"{name}.rope.scale_linear"))
        return parameters | {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        return parameters | {
            "rope_type": "yarn",
            "factor": key("rope.scaling.factor"),
            "original_max_position_embeddings": key("rope.scaling.original_context_length"),
        }
    raise ModelError(f"{source}: GGUF rope scaling `{scaling}` is not supported")
